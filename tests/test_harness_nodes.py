"""Runs on a node: a real ssh, sshd and rsync on loopback, with a key made for the test."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import processes
from harness.nodes import DEFAULT_NODES_FILE, NodeError, load_node
from harness.remote import run_on_node
from tests.harness_project import PASSING, REPOSITORY
from tests.needs import need
from tests.ssh_node import NodeProject, Sshd, make_node_project, quoted, stand_in, wait_for

HANGS = 'case("small"); view("x"); print("rank waits", flush=True); time.sleep(1000)'


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd") / "s")
    yield server
    server.close()


@pytest.fixture
def node(tmp_path: Path, sshd: Sshd) -> Iterator[NodeProject]:
    """The folder's name would trip whoever forgets to quote."""
    made = make_node_project(tmp_path / "here", sshd, tmp_path / "a node" / "me's $HOME")
    yield made
    wait_for(lambda: not made.processes_on_node(), 15)


def step_lines(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def only_run(node: NodeProject) -> Path:
    (run,) = node.runs.iterdir()
    return run


def wait_for_rank(node: NodeProject) -> None:
    """Until the rank's log has come here while the rank runs there."""
    wait_for(lambda: any(path.read_text() for path in node.runs.glob("*/phase1-*/rank0.log")), 20)


def ssh_clients(caller: subprocess.Popen[str]) -> list[processes.Process]:
    return processes.descendants(caller.pid, processes.all_processes())


def refusal(node: NodeProject) -> str:
    """What a run there is refused with. In this process, which is faster; `one_error` is of a call."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(NodeError) as caught:
            run_on_node(load_node("gpu1", node.root / "nodes.yaml"), [], node.root, node.runs, print)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "\n" not in str(caught.value)
    assert not node.runs.exists()
    return str(caught.value)


def one_error(output: str) -> str:
    """The only line of a call that could not run anything."""
    (line,) = output.splitlines()
    assert line.startswith("error: gpu1 (127.0.0.1): "), line
    return line


def test_what_is_sent_and_what_comes_back(node: NodeProject) -> None:
    """Exactly what git tracks or would take; by content, whatever size and time say; results and facts come back."""
    node.project.phase(
        1,
        """
        print("rank speaks", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"], flush=True)
        """
        + PASSING,
    )
    (node.root / "notes.txt").write_text("one")
    node.git("add", ".")
    node.git("commit", "-qm", "more")
    (node.root / "gone.py").write_text("")
    node.git("add", "gone.py")
    (node.root / "gone.py").unlink()
    (node.root / "new file.py").write_text("not yet added")
    (node.root / "x.ignored").write_text("")
    (node.root / "notes.txt").chmod(0o755)
    (node.root / "link").symlink_to("notes.txt")
    node.write_nodes(gpus=[2, 0], exec_prefix=["sh", "-c", 'echo "welcome to gpu1"; exec "$@"', "sh"])
    (node.folder / ".megamoe-node").mkdir(parents=True)
    (node.folder / "harness" / "__pycache__").mkdir(parents=True)
    (node.folder / "harness" / "__pycache__" / "cli.cpython-311.pyc").write_bytes(b"old")
    (node.folder / "harness" / "left_over.py").write_text("")
    (node.folder / "notes.txt").write_text("eno")  # same size, same time, other content
    times = (node.root / "notes.txt").stat()
    os.utime(node.folder / "notes.txt", ns=(times.st_atime_ns, times.st_mtime_ns))

    code, output = node.run()
    assert code == 0, output
    assert "welcome" not in output
    assert output.splitlines()[-1] == "1 passed, 0 failed"
    listed = subprocess.run(["find", ".", "-not", "-type", "d"], cwd=node.folder, capture_output=True, text=True).stdout
    sent = {name[2:] for name in listed.splitlines() if not name.startswith(("./runs/", "./.megamoe-node/"))}
    here = {str(path.relative_to(node.root)) for path in node.root.rglob("*") if not path.is_dir()}
    ignored = {name for name in here if name.startswith((".git/", "runs/")) or "__pycache__" in name}
    assert sent == here - ignored - {"nodes.yaml", "x.ignored"}
    assert (node.folder / "notes.txt").read_text() == "one"
    assert os.access(node.folder / "notes.txt", os.X_OK)
    assert os.readlink(node.folder / "link") == "notes.txt"

    run = only_run(node)
    assert (run / "phase1-host-1-single" / "rank0.log").read_text() == "rank speaks 2,0 PCI_BUS_ID\n"
    assert f"results: {run}" in output
    there = {path.name for path in (node.folder / "runs" / run.name).iterdir()}
    assert there | {"from_node.json"} == {path.name for path in run.iterdir()}
    facts = json.loads((run / "run.json").read_text())
    commit = subprocess.run(["git", "-C", node.root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert facts["commit"] == commit.strip() + "+"
    state = json.loads((run / "node.json").read_text())
    assert (state["state"], state["ended_by"], state["exit_code"]) == ("ended", "itself", 0)
    assert state["left_by_harness"] == []


def test_failure_says_what_to_run_here(node: NodeProject) -> None:
    """Options arrive as they were given; the line to see it again is for this side; exit codes are the harness's."""
    node.project.phase(1, 'case("small", ok=False, message="rows differ"); finish(False); sys.exit(1)')
    nodes = (node.root / "nodes.yaml").rename(node.root.parent / "my nodes.yaml")
    code, output = node.run("--nodes", str(nodes), "--cases", "small", "--no-gates", "--seconds", "7.5")
    assert code == 1
    (line,) = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert f"logs: {only_run(node)}/phase1-host-1-single" in line
    assert f"python -m harness run --node gpu1 --nodes '{nodes}' --phases 1" in line
    node.write_nodes()
    assert step_lines(only_run(node))[0]["limit_s"] == 7.5
    code, output = node.run("--cases", "it's a $(case); 'x'")
    assert code == 2
    assert """no asked-for phase has ["it's a $(case); 'x'"]""" in output
    assert node.call("run", "--node", "gpu1", "--phases-root", ".")[0] == 2


def test_stale_copy_inside_the_prefix_is_an_error(node: NodeProject, tmp_path: Path) -> None:
    """Where the container has another folder mounted, nothing runs, however much alike its files look."""
    need(subprocess.run(["unshare", "-m", "true"]).returncode == 0, "permission to make mount namespaces (unshare -m)")
    node.project.phase(1, PASSING)
    assert node.run()[0] == 0
    stale = tmp_path / "stale"
    shutil.copytree(node.folder, stale, symlinks=True)
    script = stale / "phases" / "phase1" / "script.py"
    times = script.stat()
    script.write_text(script.read_text().replace("pass_all()", "pass_ill()"))
    os.utime(script, ns=(times.st_atime_ns, times.st_mtime_ns))
    (stale / "torch.py").write_text("shadows")
    enter = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    node.write_nodes(exec_prefix=["unshare", "-m", "sh", "-c", enter, "sh", str(stale), str(node.folder)])
    shutil.rmtree(node.runs)
    code, output = node.run()
    assert code == 2
    line = one_error(output)
    assert "phases/phase1/script.py is another version; torch.py should not be there;" in line
    assert "is another folder mounted there? Nothing was run" in line
    assert not node.runs.exists()


@pytest.mark.parametrize(
    "prefix",
    [
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc"],
        ["unshare", "-m", "sh", "-c", 'mount --rbind / "$1" && cd / && exec chroot "$@"', "sh", "ROOT"],
    ],
    ids=["pid namespace", "chroot"],
)
def test_exec_prefix(node: NodeProject, tmp_path: Path, prefix: list[str]) -> None:
    """A run inside that hangs is stopped from here, where its pids mean nothing."""
    need(subprocess.run(["unshare", "-m", "true"]).returncode == 0, "permission to make mount namespaces (unshare -m)")
    (tmp_path / "root").mkdir()
    node.write_nodes(exec_prefix=[str(tmp_path / "root") if word == "ROOT" else word for word in prefix])
    node.project.phase(1, HANGS)
    with node.start_run() as caller:
        wait_for_rank(node)
        caller.send_signal(signal.SIGINT)
        output, _ = caller.communicate(timeout=15)
    assert caller.returncode == 1
    assert "the run was stopped (SIGINT)" in output
    assert "stopped from outside (SIGTERM)" in step_lines(only_run(node))[0]["reasons"]
    wait_for(lambda: not node.processes_on_node(), 1)


def test_hanging_rank_ends_at_its_limit(node: NodeProject) -> None:
    """The limit is kept there; the results and the stacks come here."""
    node.project.phase(1, HANGS)
    code, output = node.run("--seconds", "2")
    assert code == 1
    (step,) = step_lines(only_run(node))
    assert step["status"] == "timed out"
    assert "most recent call first" in (only_run(node) / "phase1-host-1-single" / "rank0.log").read_text()
    assert output.splitlines()[-1] == "0 passed, 1 failed (1 timed out)"


def test_stop_from_here(node: NodeProject) -> None:
    """Meanwhile no second run begins there, and fetch says that one is going on. Within 5 s of the stop nothing runs
    there, a daemon that ignores SIGTERM included, and the results are here."""
    node.project.phase(1, "daemon(ignore=(signal.SIGTERM,))\n" + HANGS)
    node.project.phase(2, PASSING)
    with node.start_run() as caller:
        wait_for_rank(node)
        code, output = node.run()
        assert code == 2
        assert re.search(r"is in use \(copied to and run since .*\); wait for its end", one_error(output))
        code, output = node.call("fetch", "gpu1")
        assert (code, "is still going on; fetch it again later" in output) == (1, True)
        caller.send_signal(signal.SIGTERM)
        wait_for(lambda: not node.processes_on_node(with_agent=False), 5)
        caller.communicate(timeout=20)
    assert caller.returncode == 1
    first, second = step_lines(only_run(node))
    assert (first["status"], second["status"]) == ("failed", "skipped")
    state = json.loads((only_run(node) / "node.json").read_text())
    assert (state["state"], state["ended_by"]) == ("ended", "a stop from outside")


def test_stop_while_copying(node: NodeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has begun there, and nothing stays here."""
    stand_in(tmp_path / "bin", "rsync", f"touch {tmp_path}/copying; exec sleep 100")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with node.start_run() as caller:
        wait_for((tmp_path / "copying").exists, 20)
        caller.send_signal(signal.SIGTERM)
        output, _ = caller.communicate(timeout=10)
    assert caller.returncode != 0
    assert "Traceback" not in output
    assert list((tmp_path / "tmp").iterdir()) == []
    wait_for(lambda: not node.processes_on_node(), 5)
    assert list((node.folder / "runs").iterdir()) == []


@pytest.mark.parametrize("victim", ["ssh client", "harness here", "ssh client stops"])
def test_broken_connection(node: NodeProject, victim: str) -> None:
    """The step that runs is the last and keeps its limit; then nothing runs there, and fetch gets the results."""
    node.change("harness/remote_agent.py", "OWNER_SILENCE_S = 20.0", "OWNER_SILENCE_S = 3.0")
    node.change("harness/remote.py", "SILENCE_S = 30.0", "SILENCE_S = 5.0")
    node.project.phase(1, HANGS)
    node.project.phase(2, PASSING)
    nodes = (node.root / "nodes.yaml").rename(node.root.parent / "my nodes.yaml")
    with node.start_run("--seconds", "4", "--nodes", str(nodes)) as caller:
        wait_for_rank(node)
        (ssh,) = ssh_clients(caller)
        if victim == "harness here":
            caller.kill()
        else:
            processes.send_signal(ssh.key, signal.SIGKILL if victim == "ssh client" else signal.SIGSTOP)
        output, _ = caller.communicate(timeout=30)
        if victim == "ssh client stops":
            wait_for(lambda: not node.processes_on_node(), 15)
    run = only_run(node)
    if victim != "harness here":
        assert caller.returncode == 1
        last = output.splitlines()[-1]
        assert "the connection broke" in last
        assert last.endswith(f" python -m harness fetch gpu1 {run.name} --nodes '{nodes}'")
    wait_for(lambda: not node.processes_on_node(), 15)
    code, output = node.call("fetch", "gpu1", run.name, "--nodes", str(nodes))
    assert code == 0, output
    assert f"ended by a lost connection, exit code 1; results: {run}" in output
    first, second = step_lines(run)
    assert (first["status"], second["status"]) == ("timed out", "skipped")
    assert second["reasons"] == ["the run was stopped (who started it is gone)"]
    assert (run / "junit.xml").exists()


def test_agent_is_killed(node: NodeProject) -> None:
    """What looks after the run there is not what ends it: without it the harness stops by itself."""
    node.project.phase(1, HANGS)
    with node.start_run() as caller:
        wait_for_rank(node)
        (agent,) = [process for process in processes.all_processes().values() if is_agent(process, node)]
        processes.send_signal(agent.key, signal.SIGKILL)
        output, _ = caller.communicate(timeout=20)
    assert caller.returncode == 1
    assert "the connection broke" in output
    wait_for(lambda: not node.processes_on_node(), 8)
    code, output = node.call("fetch", "gpu1")
    assert code == 1
    assert "was cut off" in output
    assert step_lines(only_run(node))[0]["status"] == "failed"


def is_agent(process: processes.Process, node: NodeProject) -> bool:
    try:
        words = (processes.PROC / str(process.pid) / "cmdline").read_bytes()
        cwd = os.readlink(processes.PROC / str(process.pid) / "cwd")
    except OSError:
        return False
    return cwd == str(node.folder) and b"MEGAMOE-NODE" in words and words.startswith(sys.executable.encode())


def test_unreachable(node: NodeProject, tmp_path: Path) -> None:
    """ssh's own errors: each one line with what to do."""

    def error(*replaced: tuple[str, str], **fields: Any) -> str:
        options = node.sshd.options
        for old, new in replaced:
            options = [word.replace(old, new) for word in options]
        node.write_nodes(ssh_options=options, **fields)
        return refusal(node)

    (tmp_path / "empty").touch()
    known = Path(node.sshd.options[-3].partition("=")[2])
    other = tmp_path / "other"
    for name in ("wrong", "wrong_host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    other.write_text(f"[127.0.0.1]:{node.sshd.port} {(tmp_path / 'wrong_host.pub').read_text()}")
    assert "unknown host key: run `ssh " in error((str(known), str(tmp_path / "empty")))
    assert "its host key is not the one that is known here" in error((str(known), str(other)))
    assert "it accepts none of your keys" in error((node.sshd.options[3], str(tmp_path / "wrong")))
    assert "nothing listens there" in error((str(node.sshd.port), "1"))
    assert "no such host: check host" in error(host="no-such-host.invalid")


def test_node_without_rsync(node: NodeProject, tmp_path: Path) -> None:
    for name in ("sh", "ls", "mkdir"):
        path = shutil.which(name)
        assert path is not None
        stand_in(tmp_path / "bin", name, f'exec {path} "$@"')
    server = Sshd(tmp_path / "sshd", f"{tmp_path}/bin")
    try:
        node.write_nodes(ssh_options=server.options)
        code, output = node.run()
    finally:
        server.close()
    assert code == 2
    assert one_error(output).endswith("rsync is not installed there (Debian: apt-get install rsync)")
    assert not node.folder.exists()


def test_wrong_python_or_prefix(node: NodeProject, tmp_path: Path) -> None:
    def error(**fields: Any) -> str:
        node.write_nodes(**fields)
        return refusal(node)

    assert "/no/python cannot be started (" in error(python="/no/python")
    pretend = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])"
    old = stand_in(tmp_path, "old", quoted("exec", sys.executable, "-c", pretend) + ' "$3"')
    assert "python is 3.9, 3.11 or newer is needed" in error(python=str(old))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    assert re.search(
        r"\(3\.\d+\.\d+\) has no torch, .*psutil, jinja2: install it, or", error(python=f"{tmp_path}/bare/bin/python")
    )
    assert "cannot be started inside `no-such-container x` (" in error(exec_prefix="no-such-container x")
    closed = ["sh", "-c", 'exec "$@" </dev/null', "sh"]
    assert "it must pass standard input on (docker exec -i)" in error(exec_prefix=closed)
    need(subprocess.run(["unshare", "-m", "true"]).returncode == 0, "permission to make mount namespaces (unshare -m)")
    enter = 'mount -t tmpfs none "$1" && shift && exec "$@"'
    hidden = ["unshare", "-m", "sh", "-c", enter, "sh"]
    advice = "under the same path (docker run -v)"
    assert f"there is no {node.folder} inside `" in (line := error(exec_prefix=[*hidden, str(node.folder.parent)]))
    assert line.endswith(advice)
    assert " is another folder than the one outside: " in (line := error(exec_prefix=[*hidden, str(node.folder)]))
    assert line.endswith(advice)
    assert "the exec prefix must mount it (unshare --mount-proc)" in error(exec_prefix="unshare --pid --fork")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that the toy project fits on about twice."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True)
    need(mounted.returncode == 0, "permission to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk(node: NodeProject, small_disk: Path) -> None:
    """Full before the copy, during it, and during the run."""
    node.write_nodes(folder=str(small_disk / "megamoe"))
    blocker = small_disk / "blocker"
    node.project.phase(
        1,
        "pass_all()\ntry:\n    open('big', 'wb', buffering=0).write(bytes(4 << 20))\nexcept OSError: pass\n"
        "try:\n    open('big', 'ab', buffering=0).write(bytes(4096))\nexcept OSError: pass",
    )
    blocker.write_bytes(bytes((2 << 20) - 4 * 4096))
    code, output = node.run()
    assert code == 2
    assert f"no space left for {small_disk}/megamoe: make room there, or name a folder on" in one_error(output)
    blocker.unlink()
    code, output = node.run()
    assert code == 1
    (line,) = [line for line in output.splitlines() if "no space left" in line]
    assert f"no space left for {small_disk}/megamoe: make room there" in line
    wait_for(lambda: not node.processes_on_node(), 10)


def test_foreign_folder_is_left_alone(node: NodeProject) -> None:
    node.folder.mkdir(parents=True)
    (node.folder / "thesis.tex").write_text("years of work")
    code, output = node.run()
    assert code == 2
    assert "holds files that are not ours and would be deleted; name an empty or a new folder" in one_error(output)
    assert [path.name for path in node.folder.iterdir()] == ["thesis.tex"]


def test_fetch_without_anything_to_fetch(node: NodeProject) -> None:
    code, output = node.call("fetch", "gpu1")
    assert (code, "has never held a run" in one_error(output)) == (2, True)
    (node.folder / ".megamoe-node").mkdir(parents=True)
    for name in ("2026-01-02", "2026-01-01", "not a run"):
        (node.folder / "runs" / name).mkdir(parents=True)
        if name != "not a run":
            (node.folder / "runs" / name / "node.json").write_text("{}")
    code, output = node.call("fetch", "gpu1", "2026-01-03")
    assert code == 2
    assert one_error(output).endswith("no run '2026-01-03'; the newest are 2026-01-02, 2026-01-01")
    assert not node.runs.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file; copy nodes.example.yaml to it"),
        ("- a", "expected names of nodes, each with its fields"),
        ("a: [", "cannot be read: "),
        ("other: {host: h, folder: /a/b}", "no node 'gpu1'; there are other"),
        ("gpu1: h", "gpu1: expected fields like host and folder, got 'h'"),
        ("gpu1: {host: h}", "gpu1: folder is missing"),
        ("gpu1: {host: h, folder: /a/b, port: 22}", "no field 'port'; there are exec_prefix, folder, gpus, host"),
        ("gpu1: {host: -oProxyCommand=x, folder: /a/b}", "host: expected a name as ssh takes it"),
        ("gpu1: {host: h, folder: a/b}", "folder: expected an absolute path of a folder of its own"),
        ("gpu1: {host: h, folder: /tmp}", "folder: expected an absolute path of a folder of its own"),
        ("gpu1: {host: h, folder: /a/b, gpus: 2}", "gpus: expected a list of GPU indices like [0, 1]"),
        ("gpu1: {host: h, folder: /a/b, gpus: [1, 1]}", "gpus: [1, 1] names a GPU twice"),
        ('gpu1: {host: h, folder: /a/b, exec_prefix: "a \'b"}', "exec_prefix: No closing quotation"),
        ("gpu1: {host: h, folder: /a/b, ssh_options: ['-oX=\"y\"']}", "ssh_options: no quotes inside a word"),
        ("gpu1: {host: h, folder: /a/b, python: 3}", "python: expected one line of text, got 3"),
    ],
)
def test_bad_nodes_file(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "nodes.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NodeError, match=re.escape(words)) as caught:
        load_node("gpu1", path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_make_takes_a_node() -> None:
    command = ["make", "-n", "phase", "N=3", "NODE=gpu1"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert "-m harness run --target best   --node gpu1 --phases 3" in printed


def test_the_example_is_sound() -> None:
    node = load_node("gpu1", REPOSITORY / "nodes.example.yaml")
    assert (node.file_option, replace(node, file=DEFAULT_NODES_FILE).file_option) == (f" --nodes {node.file}", "")
    assert node.exec_prefix == ("docker", "exec", "-i", "moe")
    assert node.gpus == (0, 1)
