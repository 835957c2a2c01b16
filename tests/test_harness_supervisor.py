"""Nothing outlives a step: real processes that resist, hide or sleep, and supervisors that are killed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import processes
from harness.hang import Trouble
from harness.holdings import FileKey, memfd_holders
from harness.outcome import Outcome, read_outcome
from harness.rank import exit_file, pid_file
from harness.supervisor import temporary_folder
from harness.watch import Ranks
from tests.harness_project import PASSING, REPOSITORY, Project, processes_in, wait_until_gone

LIMIT_S = 2.0
EMPTY_S = 10.0

IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignoring", flush=True)
while True:
    time.sleep(1000)
"""

DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 64)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    time.sleep(1000)
os.wait()
"""

SLEEPS = """
import time
print("asleep", flush=True)
time.sleep(1000)
"""


class Supervised:
    """A supervisor started by hand on a script of the test."""

    def __init__(self, folder: Path, script: str, seconds: float, launcher: tuple[str, ...]) -> None:
        self.folder = folder / "step"
        self.step_id = f"test.{os.getpid()}.{folder.name}"
        (folder / "script.py").write_text(script)
        command = [sys.executable, "-m", "harness.supervisor", "--folder", str(self.folder), "--seconds", str(seconds)]
        command += ["--step-id", self.step_id, "--", sys.executable, *launcher, "-m", "harness.rank"]
        command += [str(folder / "script.py")]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.started = time.monotonic()
        self.guardian = subprocess.Popen(command, env=environment, start_new_session=True)

    def wait(self, timeout_s: float = 30.0) -> Outcome:
        self.guardian.wait(timeout_s)
        outcome = read_outcome(self.folder)
        assert outcome is not None
        return outcome

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"never came true; {self.log('supervisor.log')}"
            time.sleep(0.02)

    def log(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def num_processes(self) -> int:
        return len(processes_in(self.folder))

    def supervisor_pid(self) -> int:
        table = processes.all_processes()
        (pid,) = [process.pid for process in table.values() if process.parent_pid == self.guardian.pid]
        return pid


@pytest.fixture
def supervised(tmp_path: Path) -> Callable[..., Supervised]:
    def start(script: str, seconds: float = LIMIT_S, launcher: tuple[str, ...] = ()) -> Supervised:
        return Supervised(tmp_path, script, seconds, launcher)

    return start


def _assert_clean(step: Supervised) -> None:
    assert processes_in(step.folder) == []
    assert not temporary_folder(step.step_id).exists()


@pytest.mark.parametrize(
    ("script", "num_processes"),
    [(IGNORES_SIGTERM, 1), (DAEMON + SLEEPS, 2), (SLEEPS, 1)],
    ids=["ignores SIGTERM", "daemon in a session of its own", "sleeps"],
)
def test_limit_ends_everything(supervised: Callable[..., Supervised], script: str, num_processes: int) -> None:
    step = supervised(script)
    step.wait_for(lambda: step.num_processes() == num_processes, LIMIT_S)
    outcome = step.wait()
    assert time.monotonic() - step.started < LIMIT_S + EMPTY_S
    assert outcome.end == "timed out"
    assert outcome.seconds == pytest.approx(LIMIT_S, abs=0.5)
    assert outcome.seconds_to_empty < EMPTY_S
    assert outcome.survivors == ()
    assert outcome.num_processes >= num_processes
    assert outcome.peak_pss_bytes > 1 << 20
    assert step.guardian.returncode == 1
    _assert_clean(step)


def test_daemon_of_a_finished_command_is_ended_and_named(supervised: Callable[..., Supervised]) -> None:
    step = supervised(DAEMON, seconds=30)
    outcome = step.wait()
    assert (outcome.end, outcome.exit_code) == ("exited", 0)
    assert len(outcome.left_behind) == 1
    assert "script.py" in outcome.left_behind[0]
    assert step.guardian.returncode == 1
    _assert_clean(step)


def test_killed_supervisor_leaves_nothing(supervised: Callable[..., Supervised]) -> None:
    """Its orphans, a daemon among them, fall to the guardian."""
    step = supervised(DAEMON + IGNORES_SIGTERM, seconds=60)
    step.wait_for(lambda: step.num_processes() == 2 and "ignoring" in step.log("rank0.log"))
    os.kill(step.supervisor_pid(), signal.SIGKILL)
    outcome = step.wait(EMPTY_S)
    assert outcome.end == "supervisor died"
    assert "SIGKILL" in outcome.message
    _assert_clean(step)


def test_killed_guardian_leaves_nothing(supervised: Callable[..., Supervised]) -> None:
    """The kernel tells the supervisor, which stops the step."""
    step = supervised(DAEMON + IGNORES_SIGTERM, seconds=60)
    step.wait_for(lambda: step.num_processes() == 2 and "ignoring" in step.log("rank0.log"))
    supervisor = processes.read_process(step.supervisor_pid())
    assert supervisor is not None
    step.guardian.kill()
    step.guardian.wait()
    step.wait_for(lambda: not processes.is_alive(supervisor.key), EMPTY_S)
    outcome = read_outcome(step.folder)
    assert outcome is not None
    assert outcome.end == "interrupted"
    _assert_clean(step)


def test_ranks_die_with_both_supervisors(supervised: Callable[..., Supervised]) -> None:
    """With both gone and no harness above nobody is left to look: torchrun dies with the supervisor, the ranks with
    torchrun. (A daemon needs the harness then, see test_harness_takes_over.)"""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    step = supervised(IGNORES_SIGTERM, seconds=100, launcher=launcher)
    step.wait_for(lambda: all("ignoring" in step.log(f"rank{rank}.log") for rank in range(2)), 60)
    assert step.num_processes() == 3
    supervisor_pid = step.supervisor_pid()
    step.guardian.kill()
    os.kill(supervisor_pid, signal.SIGKILL)
    step.guardian.wait()
    assert wait_until_gone(step.folder, EMPTY_S) == []
    shutil.rmtree(temporary_folder(step.step_id))


def test_stopped_supervisor_is_ended_by_its_guardian(supervised: Callable[..., Supervised]) -> None:
    """A supervisor that no longer runs (SIGSTOP) cannot hold its step beyond the limit."""
    step = supervised(SLEEPS, seconds=0.5)
    step.wait_for(lambda: step.num_processes() == 1)
    os.kill(step.supervisor_pid(), signal.SIGSTOP)
    outcome = step.wait()
    assert time.monotonic() - step.started < 0.5 + EMPTY_S
    assert outcome.end == "supervisor died"
    _assert_clean(step)


def test_terminated_guardian_stops_the_step(supervised: Callable[..., Supervised]) -> None:
    step = supervised(SLEEPS, seconds=60)
    step.wait_for(lambda: step.num_processes() == 1)
    step.guardian.terminate()
    outcome = step.wait(EMPTY_S)
    assert outcome.end == "interrupted"
    assert "SIGTERM" in outcome.message
    _assert_clean(step)


def test_mark_finds_a_process_that_is_no_descendant(tmp_path: Path, supervised: Callable[..., Supervised]) -> None:
    """The second net: a process with the step's mark, started by somebody else, is ended too."""
    step = supervised(SLEEPS)
    environment = {**os.environ, processes.STEP_ID_VARIABLE: step.step_id, "MEGAMOE_RUN_DIR": str(step.folder)}
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPS], env=environment, start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True)
    try:
        step.wait()
        assert stranger.wait(1) == -signal.SIGTERM
        assert other.poll() is None
        _assert_clean(step)
    finally:
        for process in (stranger, other):
            process.kill()
            process.wait()


def test_stacks_and_shared_memory(supervised: Callable[..., Supervised]) -> None:
    """Before a hanging rank is killed its stacks are in its log; its file in /dev/shm goes, another's stays."""
    name = f"megamoe-test-{os.getpid()}"
    script = f"""
import mmap, os, time
file = os.open("/dev/shm/{name}-held", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
os.close(file)
def wait_for_a_peer_that_never_comes():
    time.sleep(1000)
wait_for_a_peer_that_never_comes()
"""
    foreign = Path(f"/dev/shm/{name}-foreign")
    foreign.touch()
    try:
        step = supervised(script)
        outcome = step.wait()
        assert "wait_for_a_peer_that_never_comes" in step.log("rank0.log")
        assert outcome.removed_files == (f"/dev/shm/{name}-held",)
        assert not Path(f"/dev/shm/{name}-held").exists()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_a_file_made_just_before_the_limit_goes_too(supervised: Callable[..., Supervised]) -> None:
    """After the last sample (they come once a second): whoever ends everything looks once more before that."""
    path = Path(f"/dev/shm/megamoe-test-{os.getpid()}-late")
    step = supervised(f"""
import os, time
time.sleep({LIMIT_S - 0.6})
file = os.open("{path}", os.O_RDWR | os.O_CREAT)
print("made", flush=True)
time.sleep(1000)
""")
    try:
        outcome = step.wait()
        assert "made" in step.log("rank0.log")
        assert outcome.removed_files == (str(path),)
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_who_ended_first_is_known_to_a_late_look(tmp_path: Path) -> None:
    """By their deaths; of those that reached their end, by that, whoever takes longer to die."""
    children = [subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.DEVNULL) for _ in range(6)]
    try:
        for rank, child in enumerate(children):
            found = processes.read_process(child.pid)
            assert found is not None
            pid_file(tmp_path, rank).write_text(f"{child.pid} {found.key.start_ticks}")
        said: list[str] = []
        explained: list[Trouble] = []
        ranks = Ranks(tmp_path, len(children), said.append, explained.append)
        ranks.look()
        assert ranks.broken == []
        exit_file(tmp_path, 5).write_text("1")  # the first, and it lives on
        time.sleep(0.05)
        exit_file(tmp_path, 1).write_text("1")
        exit_file(tmp_path, 3).write_text("0")
        for rank in (3, 4, 2, 1):
            children[rank].kill()
            children[rank].wait()
        ranks.look()
        assert ranks.broken == [5, 4, 2, 1]
        assert said[0] == "rank 5 ended with exit code 1"
        (trouble,) = explained
        assert trouble.why == said[0]
        assert trouble.ended_by_itself
        assert list(trouble.ranks) == [0, 1, 2, 3, 4, 5]
        ranks.look()
        assert ranks.broken == [5, 4, 2, 1]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_memfd_holder_is_found() -> None:
    handle = os.memfd_create("megamoe-test")
    try:
        status = os.fstat(handle)
        mine = processes.read_process(os.getpid())
        assert mine is not None
        key = FileKey(status.st_dev, status.st_ino)
        (holder,) = memfd_holders({key: "/memfd:megamoe-test (deleted)"}, [mine])
        assert f"pid {os.getpid()} " in holder
        assert memfd_holders({dataclasses.replace(key, inode=key.inode + 10**9): "/memfd:other"}, [mine]) == []
    finally:
        os.close(handle)


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness.supervisor", "--folder", str(tmp_path), "--seconds", "5"]
    command += ["--step-id", f"test.{os.getpid()}.none", "--", "/no/such/program"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False)
    outcome = read_outcome(tmp_path)
    assert done.returncode == 1
    assert outcome is not None
    assert outcome.end == "not started"
    assert "/no/such/program" in outcome.message


def test_signal_goes_to_the_named_process_only() -> None:
    """A pid with another start time is somebody else: nothing is sent."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.DEVNULL)
    try:
        found = processes.read_process(child.pid)
        assert found is not None
        older = dataclasses.replace(found.key, start_ticks=found.key.start_ticks - 1)
        assert not processes.send_signal(older, signal.SIGKILL)
        time.sleep(0.1)
        assert child.poll() is None
        assert processes.send_signal(found.key, signal.SIGKILL)
        assert child.wait(5) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_sweep_gives_up_in_bounded_time() -> None:
    """Something that cannot be ended (here: it is never signalled) is named, not waited for."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.DEVNULL)
    try:
        found = processes.read_process(child.pid)
        assert found is not None
        untouchable = dataclasses.replace(found, key=dataclasses.replace(found.key, start_ticks=0))
        swept = processes.sweep(lambda: [untouchable], reap=lambda: True, grace_s=0.1, give_up_s=0.3)
        assert len(swept.survivors) == 1
        assert swept.ended == ()
        assert 0.4 <= swept.seconds < 2
    finally:
        child.kill()
        child.wait()


TORCHRUN_RANK = """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    daemon(ignore=(signal.SIGTERM, signal.SIGHUP))
print("rank", rank, "in session", os.getsid(0), flush=True)
time.sleep(1000)
"""


def test_ranks_of_torchrun_end(tmp_path: Path) -> None:
    """torchrun puts each rank into a session of its own, where no group kill reaches it."""
    project = Project(tmp_path)
    project.phase(1, TORCHRUN_RANK, targets={"host": {"ranks": {2: ["process"]}}})
    with project.start("run", "--target", "host") as harness:
        deadline = time.monotonic() + 60
        while len(logs := [log for log in tmp_path.glob("runs/*/*/rank?.log") if "session" in log.read_text()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len({log.read_text().split("session ")[1].split()[0] for log in logs}) == 2
        assert len(processes_in(tmp_path)) == 4
        harness.terminate()
        assert wait_until_gone(tmp_path, EMPTY_S) == []
        harness.communicate(timeout=EMPTY_S)
    assert harness.returncode == 1


def test_harness_takes_over(tmp_path: Path) -> None:
    """Guardian and supervisor killed at once, with a daemon that ignores SIGTERM: the harness ends it."""
    project = Project(tmp_path)
    project.phase(1, "daemon(ignore=(signal.SIGTERM,)); time.sleep(1000)")
    with project.start("run", "--target", "host") as harness:
        deadline = time.monotonic() + 20
        while len(processes_in(tmp_path)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below = processes.descendants(harness.pid, processes.all_processes())
        for process in below[:2]:
            os.kill(process.pid, signal.SIGKILL)
        output, _ = harness.communicate(timeout=2 * EMPTY_S)
    assert harness.returncode == 1
    assert "the harness ended" in output
    assert "LEFT BEHIND" not in output  # at once, not by the post-flight
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_harness_ends_in_the_middle_of_a_step(tmp_path: Path, number: signal.Signals) -> None:
    project = Project(tmp_path)
    project.phase(1, "daemon(ignore=(signal.SIGTERM,)); time.sleep(1000)")
    project.phase(2, PASSING)
    with project.start("run", "--target", "host") as harness:
        deadline = time.monotonic() + 20
        while len(processes_in(tmp_path)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        harness.send_signal(number)
        assert wait_until_gone(tmp_path, EMPTY_S) == []
        output, _ = harness.communicate(timeout=EMPTY_S)
    if number == signal.SIGINT:
        assert harness.returncode == 1
        assert "0 passed, 1 failed, 1 skipped" in output
    else:
        assert harness.returncode == -signal.SIGKILL
