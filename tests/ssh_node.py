"""A GPU node for tests: a real sshd on loopback with a key of its own, a folder in tmp_path, and a project to send."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness import processes
from tests.harness_project import REPOSITORY, Project
from tests.needs import need

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, sshd: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and sshd.poll() is None:
        with socket.socket() as attempt:
            attempt.settimeout(1)
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"sshd does not listen: {log.read_text()}")


class Sshd:
    """An sshd that accepts one key, as the current user; ``path`` is the PATH of its shells."""

    def __init__(self, folder: Path, path: str | None = None) -> None:
        need(SSHD and shutil.which("ssh-keygen"), "sshd and ssh-keygen (Debian: openssh-server, openssh-client)")
        need(shutil.which("rsync"), "rsync (Debian: rsync)")
        folder.mkdir(parents=True)
        for name in ("host_key", "user_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own demand; the package makes it only where it starts it
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        self.port = _free_port()
        self.log = folder / "sshd.log"
        self._folder = folder
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "KexAlgorithms curve25519-sha256\n"  # 0.1 s faster than the post-quantum one, four times a run
            f"SetEnv SHLVL=2{f' PATH={path}' if path else ''}\n"  # bash then leaves the machine's own ~/.bashrc alone
        )
        command = [str(SSHD), "-D", "-f", str(folder / "sshd_config"), "-E", str(self.log)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        _wait_for_port(self.port, self._process, self.log)

    @property
    def options(self) -> list[str]:
        folder = self._folder
        files = ["-F", "none", "-o", f"UserKnownHostsFile={folder}/known_hosts", "-o", "IdentitiesOnly=yes"]
        return ["-p", str(self.port), "-i", f"{folder}/user_key", *files]

    def connections(self) -> list[processes.Process]:
        """sshd's processes of connections, as they are below it."""
        return processes.descendants(self._process.pid, processes.all_processes())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@dataclass(frozen=True)
class NodeProject:
    """A git checkout of a toy project with the real harness in it, and the folder on the "node" that it goes to."""

    project: Project
    sshd: Sshd
    folder: Path
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.project.root

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def git(self, *arguments: str) -> None:
        command = ["git", "-C", str(self.root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def change(self, name: str, old: str, new: str) -> None:
        """Another constant in the project's own copy of the harness."""
        path = self.root / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def write_nodes(self, **fields: Any) -> None:
        node = {
            "host": "127.0.0.1",
            "ssh_options": self.sshd.options,
            "folder": str(self.folder),
            "python": sys.executable,
        }
        (self.root / "nodes.yaml").write_text(yaml.safe_dump({"gpu1": node | self.fields | fields}))

    def environment(self) -> dict[str, str]:
        return {**self.project.environment(), "PYTHONPATH": str(self.root)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *arguments],
            cwd=self.root,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *arguments: str, timeout: float = 60) -> tuple[int, str]:
        with self.start(*arguments) as process:
            output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def run(self, *arguments: str) -> tuple[int, str]:
        return self.call("run", "--node", "gpu1", "--target", "host", *arguments)

    def start_run(self, *arguments: str) -> subprocess.Popen[str]:
        return self.start("run", "--node", "gpu1", "--target", "host", *arguments)

    def processes_on_node(self, *, with_agent: bool = True) -> list[str]:
        """What lives and works in the node's folder: the harness, its steps, and the agent that looks after them."""
        found = []
        for process in processes.all_processes().values():
            try:
                cwd = os.readlink(processes.PROC / str(process.pid) / "cwd")
                environment = (processes.PROC / str(process.pid) / "environ").read_bytes()
            except OSError:
                continue
            is_agent = b"MEGAMOE_COMMIT=" not in environment
            if is_agent and not with_agent:
                continue
            if Path(cwd).is_relative_to(self.folder) and not process.is_dead:
                found.append(processes.describe(process))
        return found


def make_node_project(root: Path, sshd: Sshd, folder: Path) -> NodeProject:
    project = Project(root)
    for path in (REPOSITORY / "harness").rglob("*"):
        if path.suffix in (".py", ".pyc", ".j2"):  # not what another test's interpreter is just writing
            target = root / "harness" / path.relative_to(REPOSITORY / "harness")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    (root / ".gitignore").write_text("/runs/\n__pycache__/\n/nodes.yaml\n*.ignored\n")
    node = NodeProject(project, sshd, folder)
    node.git("init", "-q")
    node.git("add", ".")
    node.git("commit", "-qm", "toy")
    node.write_nodes()
    return node


def wait_for(condition: Callable[[], object], seconds: float) -> float:
    """Seconds until ``condition`` holds; fails after ``seconds``."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - start


def stand_in(folder: Path, name: str, text: str) -> Path:
    """A command ``name`` in ``folder``, a shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def quoted(*words: object) -> str:
    return shlex.join(str(word) for word in words)
