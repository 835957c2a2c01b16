"""Copies between this checkout and a node's folder, by rsync over ssh: the sources there, results back."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.git import GitError, describe_commit, run_git
from harness.manifest import KEPT_FOLDERS, make_manifest, manifest_hash
from harness.nodes import Node, NodeError, explain_ssh

PROBE_SECONDS = 60.0
COPY_SECONDS = 900.0

# Runs on the node in the login shell, outside the exec prefix: there rsync writes.
_PROBE = """
say() { echo "MEGAMOE-PROBE $1"; exit 0; }
command -v rsync >/dev/null || say no-rsync
if [ -e "$1" ] && [ ! -d "$1" ]; then say no-folder; fi
if [ "$2" = look ] && [ ! -d "$1/.megamoe-node" ]; then say never-used; fi
if [ -d "$1" ] && [ ! -d "$1/.megamoe-node" ] && [ -n "$(ls -A "$1")" ]; then say foreign; fi
said=$(mkdir -p "$1/.megamoe-node" "$1/runs" 2>&1) || say "cannot-make $said"
say ok
"""


@dataclass(frozen=True)
class Snapshot:
    """A copy of what git knows or would take, and its manifest. ``commit`` ends in ``+`` when files differ from it."""

    folder: Path
    manifest: Mapping[str, str]
    commit: str

    @property
    def hash(self) -> str:
        return manifest_hash(self.manifest)


def files_to_send(root: Path) -> list[str]:
    """Tracked files as they are in the work tree, and untracked ones that git does not ignore. Raises GitError, or
    NodeError for a checkout inside the checkout."""
    listed = run_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    names = sorted({name for name in listed if name and os.path.lexists(root / name)})  # a tracked one may be deleted
    for name in names:
        if name.endswith("/") or ((root / name).is_dir() and not (root / name).is_symlink()):
            raise NodeError(
                f"{root / name} is a git checkout of its own and cannot be sent; move it or have git ignore it"
            )
    return [name for name in names if Path(name).parts[0] not in KEPT_FOLDERS]


@contextmanager
def snapshot(root: Path) -> Iterator[Snapshot]:
    """A copy, so that what is hashed and what is sent are the same even while somebody edits. Raises NodeError."""
    try:
        names = files_to_send(root)
        commit = describe_commit(root)
    except GitError as error:
        raise NodeError(f"which files to send cannot be told ({error}); --node needs a git checkout") from error
    with tempfile.TemporaryDirectory(prefix="megamoe-send-") as name:
        folder = Path(name)
        for file in names:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / file, folder / file, follow_symlinks=False)
        yield Snapshot(folder, make_manifest(folder), commit)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was printed"


def _run(node: Node, command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env={**os.environ, "LC_ALL": "C"},  # messages are looked at
            check=False,
        )
    except FileNotFoundError as error:
        raise NodeError(f"{command[0]} is not on PATH here: install it (Debian: openssh-client, rsync)") from error
    except subprocess.TimeoutExpired as error:
        raise NodeError(
            f"{node.words}: {command[0]} did not end in {seconds:g} s; is the node or the line stuck?"
        ) from error


def probe(node: Node, *, create: bool) -> None:
    """Look at the node's folder, and with ``create`` make it and what belongs into it.

    Raises NodeError: unreachable, no rsync, or a folder that holds what is not ours (copying deletes there).
    """
    mode = "create" if create else "look"
    done = _run(node, node.remote_command("sh", "-c", _PROBE, "sh", str(node.folder), mode), PROBE_SECONDS)
    if done.returncode == 255:
        raise NodeError(explain_ssh(node, done.stderr))
    answers = [line.removeprefix("MEGAMOE-PROBE ") for line in done.stdout.splitlines() if "MEGAMOE-PROBE " in line]
    if not answers:
        raise NodeError(
            f"{node.words}: its login shell does not run `sh -c` ({_last_line(done.stderr)}); look at it by hand"
        )
    answer, _, said = answers[-1].partition(" ")
    problems = {
        "no-rsync": "rsync is not installed there (Debian: apt-get install rsync)",
        "no-folder": f"{node.folder} is not a folder; name another in nodes.yaml",
        "never-used": f"{node.folder} has never held a run; is it the folder of nodes.yaml that `run --node` used?",
        "foreign": f"{node.folder} holds files that are not ours and would be deleted; name an empty or a new folder",
        "cannot-make": _cannot_write(node, said),
    }
    if answer in problems:
        raise NodeError(f"{node.words}: {problems[answer]}")


def _cannot_write(node: Node, said: str) -> str:
    if "No space left" in said:
        return f"no space left for {node.folder}: make room there, or name a folder on another disk in nodes.yaml"
    return f"{node.folder} cannot be written ({_last_line(said)}); name a folder that its user owns"


def _explain_rsync(node: Node, done: subprocess.CompletedProcess[str]) -> NodeError:
    errors = done.stderr
    if done.returncode == 255:
        return NodeError(explain_ssh(node, errors))
    if done.returncode == 11 and not errors.strip():  # a write failed there, and what was said about it came too late
        return NodeError(f"{node.words}: {_cannot_write(node, 'No space left')}")
    # rsync's last line only counts errors; the first tells.
    first = next((line.strip() for line in errors.splitlines() if line.strip()), "nothing was printed")
    if "No space left" in errors or "Permission denied" in errors or "Read-only file system" in errors:
        return NodeError(f"{node.words}: {_cannot_write(node, first if 'No space' not in errors else errors)}")
    return NodeError(f"{node.words}: rsync failed with {done.returncode} ({first})")


def _rsync(node: Node, *arguments: str) -> list[str]:
    return ["rsync", "-rlpt", "--protect-args", "--timeout=60", "-e", shlex.join(node.ssh_command()), *arguments]


def push(node: Node, sent: Snapshot) -> None:
    """Make the node's folder the snapshot, by content, whatever sizes and times say. Raises NodeError."""
    kept = [f"--exclude=/{name}" for name in KEPT_FOLDERS]
    command = _rsync(node, "--checksum", "--delete", *kept, "--", f"{sent.folder}/", f"{node.host}:{node.folder}/")
    done = _run(node, command, COPY_SECONDS)
    if done.returncode != 0:
        raise _explain_rsync(node, done)


def pull(node: Node, run: str, folder: Path) -> None:
    """Copy the results of ``run`` from the node into ``folder``. Raises NodeError."""
    command = _rsync(node, "--", f"{node.host}:{node.folder}/runs/{run}/", f"{folder}/")
    done = _run(node, command, COPY_SECONDS)
    if done.returncode == 0:
        return
    if "No space left" in done.stderr:
        raise NodeError(f"no space left for {folder} here: make room, then `python -m harness fetch {node.name} {run}`")
    if "Permission denied" in done.stderr:
        first = done.stderr.strip().splitlines()[0]
        raise NodeError(
            f"{node.words}: some results cannot be read ({first}); run the exec prefix as your own user "
            "(docker exec --user), or copy them by hand"
        )
    raise _explain_rsync(node, done)
