"""Runs one command under a time limit and leaves nothing of it behind: ``python -m harness.supervisor``.

Two processes. The *guardian* (the one started) forks the *supervisor*; both are subreapers, so whatever the command
starts stays below them, daemons in sessions of their own too. The supervisor starts the command, watches it, stops
it at the limit, and ends everything that is left. If the supervisor is killed, its orphans fall to the guardian,
which ends them; if the guardian is killed, the kernel tells the supervisor (parent-death signal), which stops. If
both are killed, the harness, a subreaper too, takes over (launch.py), and ranks die with their parents anyway.
A mark in the environment and a list of every process ever seen are the second and third net.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from harness import processes
from harness.hang import Bundle
from harness.holdings import memfd_holders, recorded_holdings, remove_shm_files, unexplained_shm_files
from harness.outcome import Outcome, read_outcome
from harness.processes import Process, Sweep
from harness.watch import Ranks, Watch, recorded_processes

TICK_S = 0.05
SETTLE_S = 2.0  # helpers of a command that has ended (resource trackers, say) may take this long to follow
EXPLAIN_SHARE = 0.75  # a step that still runs at 45 s of 60 is explained
BUNDLE_SLACK_S = 3.0  # what a bundle begun at a rank's end may still take once the command has ended
# A supervisor that is so late is itself stuck (stopped, say). More than it takes to settle and to sweep (6 s together),
# and little enough for the guardian to have swept 10 s after the limit.
GUARDIAN_SLACK_S = 7.0
LAUNCHER_LOG = "launcher.log"
SUPERVISOR_LOG = "supervisor.log"


@dataclass(frozen=True)
class Job:
    """One supervised command. ``folder`` receives logs and the outcome; ``seconds`` is its time limit."""

    command: tuple[str, ...]
    folder: Path
    step_id: str
    seconds: float
    num_ranks: int


class StopRequest:
    """Set by SIGTERM, SIGINT and SIGHUP, also when the parent dies."""

    def __init__(self) -> None:
        self.reason: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.reason = self.reason or signal.Signals(number).name


def live_processes_of(job: Job) -> list[Process]:
    """Everything of the step that lives: by descent from this process, by its mark, by the list of processes seen."""
    table = processes.all_processes()
    below = processes.descendants(os.getpid(), table)
    marked = processes.marked(lambda step_id: step_id == job.step_id, table)
    recorded = [p for key in recorded_processes(job.folder) if (p := table.get(key.pid)) is not None and p.key == key]
    own_pid, parent_pid = os.getpid(), os.getppid()
    return [p for p in processes.unique((*below, *marked, *recorded)) if p.pid not in (own_pid, parent_pid)]


class Log:
    """The supervisor's own log, in seconds since the start."""

    def __init__(self, folder: Path) -> None:
        self._start = time.monotonic()
        self._file = (folder / SUPERVISOR_LOG).open("a", buffering=1)

    def __call__(self, text: str) -> None:
        self._file.write(f"{time.monotonic() - self._start:7.2f} s  {text}\n")


def _environment(job: Job) -> dict[str, str]:
    return {
        **os.environ,
        processes.STEP_ID_VARIABLE: job.step_id,
        "MEGAMOE_RUN_DIR": str(job.folder),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _die_with_supervisor() -> None:
    processes.set_parent_death_signal(signal.SIGKILL)


def _start(job: Job) -> subprocess.Popen[bytes]:
    with (job.folder / LAUNCHER_LOG).open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(job),
            start_new_session=True,
            preexec_fn=_die_with_supervisor,  # noqa: PLW1509 (this process has one thread)
        )


def _wait_for_end(
    job: Job, root: subprocess.Popen[bytes], watch: Watch, ranks: Ranks, bundle: Bundle, stop: StopRequest
) -> Outcome:
    """Watch the command until it ends, its limit passes or somebody asks to stop."""
    start = time.monotonic()
    statuses: dict[int, int] = {}
    while True:
        processes.reap_children(statuses)
        bundle.note_ends(statuses)
        ranks.look()
        if ranks.broken and not bundle.is_under_way:
            ranks.end_after_broken()
        elapsed = time.monotonic() - start
        if root.pid in statuses:
            root.returncode = statuses[root.pid]
            return Outcome("exited", exit_code=root.returncode, seconds=elapsed)
        if stop.reason is not None:
            return Outcome("interrupted", seconds=elapsed, message=f"stopped from outside ({stop.reason})")
        if elapsed >= job.seconds * EXPLAIN_SHARE:
            ranks.note_time(f"still running after {elapsed:.1f} s")
        if elapsed >= job.seconds:
            return Outcome("timed out", seconds=elapsed, message=f"still running at its limit of {job.seconds:g} s")
        watch.sample_if_due()
        ranks.wait(min(TICK_S, max(0.0, job.seconds - elapsed)))


def _settle(job: Job, watch: Watch) -> tuple[str, ...]:
    """Give what a finished command leaves a moment to follow it; the rest has been left behind."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        processes.reap_children()
        alive = [p for p in live_processes_of(job) if not p.is_dead]
        if not alive or time.monotonic() >= deadline:
            return tuple(processes.describe(p) for p in alive)
        watch.sample_if_due()
        time.sleep(TICK_S)


def _account(job: Job, outcome: Outcome, swept: Sweep, watch: Watch, say: Log) -> Outcome:
    """Remove the step's files in /dev/shm, and add to ``outcome`` what the step took and what was left of it."""
    held = watch.holdings.names
    removed = remove_shm_files(held)
    for text in (*swept.ended, *removed):
        say(f"ended or removed: {text}")
    for text in swept.survivors:
        say(f"COULD NOT END {text}")
    return replace(
        outcome,
        peak_pss_bytes=watch.peak_pss_bytes,
        num_processes=len(watch.seen),
        survivors=swept.survivors,
        removed_files=tuple(removed),
        unexplained_files=tuple(unexplained_shm_files(watch.holdings.before, held)),
        held_memfds=tuple(memfd_holders(held, processes.all_processes().values())),
    )


def supervise(job: Job, stop: StopRequest) -> Outcome:
    """Run the job to its end, whatever that is, and return only when nothing of it is left (or say what is)."""
    say = Log(job.folder)
    watch = Watch(job.folder)
    bundle = Bundle(job.folder, job.seconds)
    ranks = Ranks(job.folder, job.num_ranks, say, bundle.begin)
    say(f"limit {job.seconds:g} s: {' '.join(job.command)}")
    try:
        root = _start(job)
    except OSError as error:
        return Outcome("not started", message=f"cannot start {job.command[0]}: {error}")
    outcome = _wait_for_end(job, root, watch, ranks, bundle, stop)
    bundle.finish(BUNDLE_SLACK_S if outcome.end == "exited" else 0.0)
    ended_at = time.monotonic()
    say(f"{outcome.end}, exit code {outcome.exit_code}, after {outcome.seconds:.2f} s")
    left_behind = _settle(job, watch) if outcome.end == "exited" else ()
    watch.look_at_holdings()
    swept = processes.sweep(lambda: live_processes_of(job), reap=processes.reap_children)
    root.returncode = root.returncode if root.returncode is not None else -signal.SIGKILL  # reaped by the sweep
    if outcome.end == "exited":
        ranks.look()
        outcome = replace(outcome, left_behind=left_behind, broken_ranks=tuple(ranks.broken))
    outcome = _account(job, outcome, swept, watch, say)
    folder, explanation = bundle.read()
    outcome = replace(outcome, bundle=folder, explanation=explanation)
    return replace(outcome, seconds_to_empty=time.monotonic() - ended_at)


def _run_supervisor(job: Job, guardian_pid: int) -> int:
    """The forked half. Its exit code is 0 when the command ended by itself with 0 and left nothing."""
    stop = StopRequest()
    processes.set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != guardian_pid:
        return 1
    processes.become_subreaper()
    try:
        outcome = supervise(job, stop)
    finally:
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)  # the guardian may be gone
    outcome.write(job.folder)
    clean = outcome.end == "exited" and not (outcome.left_behind or outcome.survivors)
    return 0 if clean and outcome.exit_code == 0 else 1


def _wait_for_supervisor(pid: int, job: Job, stop: StopRequest) -> tuple[int, float]:
    """Wait for the supervisor, hand on a request to stop, and kill it when it is far too late: (status, seconds)."""
    start = time.monotonic()
    deadline = start + job.seconds + GUARDIAN_SLACK_S
    forwarded = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status), time.monotonic() - start
        if stop.reason is not None and not forwarded:
            forwarded = True
            os.kill(pid, signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + GUARDIAN_SLACK_S)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(TICK_S)


def clean_up(job: Job) -> tuple[Sweep, tuple[str, ...]]:
    """End and remove what is left of a job whose supervisor is gone: (processes, files)."""
    swept = processes.sweep(lambda: live_processes_of(job), reap=processes.reap_children)
    return swept, tuple(remove_shm_files(recorded_holdings(job.folder)))


def guard(job: Job, supervisor_pid: int, stop: StopRequest) -> int:
    """The guardian's half: wait for the supervisor and end whatever it could not."""
    status, seconds = _wait_for_supervisor(supervisor_pid, job, stop)
    swept, removed = clean_up(job)
    outcome = read_outcome(job.folder)
    if outcome is None:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        message = f"the step's supervisor {how} after {seconds:.1f} s; its guardian ended {len(swept.ended)} processes"
        outcome = Outcome("supervisor died", seconds=seconds, message=message, removed_files=removed)
        outcome = replace(outcome, survivors=swept.survivors, seconds_to_empty=swept.seconds)
        outcome.write(job.folder)
        return 1
    if outcome.survivors and not swept.survivors:
        replace(outcome, survivors=()).write(job.folder)  # they went in the end
    return status


def _parse(arguments: list[str]) -> tuple[Job, int | None]:
    parser = argparse.ArgumentParser(prog="python -m harness.supervisor", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where logs and outcome.json go")
    parser.add_argument("--seconds", type=float, required=True, help="time limit of the command")
    parser.add_argument("--step-id", required=True, help="the mark that all of the step's processes carry")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--parent", type=int, help="pid that must still be the parent, else nothing is started")
    parser.add_argument("command", nargs="+", help="after --")
    values = parser.parse_args(arguments)
    job = Job(tuple(values.command), values.folder.resolve(), values.step_id, values.seconds, values.num_ranks)
    return job, values.parent


def temporary_folder(step_id: str) -> Path:
    """The step's TMPDIR, so that nothing of it stays in /tmp. Short, since unix sockets allow 108 characters; the name
    follows from the step, so that whoever cleans up can find it."""
    return Path(tempfile.gettempdir()) / f"megamoe-{step_id}"


def main(arguments: list[str]) -> int:
    job, parent_pid = _parse(arguments)
    stop = StopRequest()
    processes.set_parent_death_signal(signal.SIGTERM)
    if parent_pid is not None and os.getppid() != parent_pid:
        return 1
    processes.become_subreaper()
    job.folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_folder(job.step_id)
    temporary.mkdir(mode=0o700)
    os.environ["TMPDIR"] = str(temporary)
    guardian_pid = os.getpid()
    supervisor_pid = os.fork()
    if supervisor_pid == 0:
        os._exit(_run_supervisor(job, guardian_pid))
    try:
        return guard(job, supervisor_pid, stop)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
