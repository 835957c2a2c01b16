"""Starts a supervised command, waits for it, and takes over if its guardian and supervisor are both gone."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from harness import processes
from harness.machine import num_usable_cores
from harness.outcome import Outcome, read_outcome
from harness.plan import Step
from harness.processes import ProcessKey
from harness.record import RECORD_FILE
from harness.spec import DEVICE_WAIT_S
from harness.supervisor import GUARDIAN_SLACK_S, SUPERVISOR_LOG, Job, StopRequest, clean_up, temporary_folder

HARNESS_PARENT = Path(__file__).resolve().parent.parent
POLL_S = 0.1
TAKE_OVER_SLACK_S = GUARDIAN_SLACK_S + 6.0  # by then a guardian that still runs has swept
_STEP_COUNTER = itertools.count(1)


def run_mark(key: ProcessKey) -> str:
    """The part of a step id that names the harness process, so that a later run can tell whether it still lives."""
    return f"{key.pid}.{key.start_ticks}"


def key_of_run(step_id: str) -> ProcessKey | None:
    """The harness process that a step id names; None when the id is not one of ours."""
    parts = step_id.split(".")
    if len(parts) != 4 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return ProcessKey(int(parts[0]), int(parts[1]))


def new_step_id() -> str:
    return f"{run_mark(processes.own_key())}.{next(_STEP_COUNTER)}.{secrets.token_hex(4)}"


def script_arguments(step: Step, record: Path) -> tuple[str, ...]:
    return (
        str(step.spec.script),
        *("--target", step.target),
        *("--ranks", str(step.num_ranks)),
        *("--group", step.group),
        *("--cases", ",".join(step.cases) if step.cases is not None else "all"),
        *("--record", str(record)),
    )


def step_command(step: Step, folder: Path) -> tuple[str, ...]:
    """The command of a step: plain Python for one process, torchrun for one process a rank.

    Port 0 lets each launcher's store take a free port and hold it, so that two runs never clash.
    """
    rank = ("-m", "harness.rank", *script_arguments(step, folder / RECORD_FILE))
    if step.group != "process":
        return (sys.executable, *rank)
    torchrun = (
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={step.num_ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
    )
    return (sys.executable, *torchrun, *rank)


def step_environment(step: Step, project_root: Path) -> dict[str, str]:
    """This process's environment with what a step is promised: the checkout's packages first, the limit of a device
    wait, and no multicast (DESIGN.md)."""
    environment = base_environment(project_root)
    environment |= {
        "MEGAMOE_TIMEOUT_S": f"{DEVICE_WAIT_S:g}",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    if step.group == "process":
        # All ranks are here: without this gloo asks for the host's name and address, which a container may not have.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment["OMP_NUM_THREADS"] = str(max(1, num_usable_cores() // step.num_ranks))
    return environment


def base_environment(project_root: Path) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    folders = dict.fromkeys([str(project_root), str(HARNESS_PARENT), *([inherited] if inherited else [])])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def _start_guardian(job: Job, environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    command = (
        *(sys.executable, "-m", "harness.supervisor"),
        *("--folder", str(job.folder), "--seconds", str(job.seconds), "--step-id", job.step_id),
        *("--num-ranks", str(job.num_ranks), "--parent", str(os.getpid()), "--"),
        *job.command,
    )
    with (job.folder / SUPERVISOR_LOG).open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the harness alone, which then stops the step in order
        )


def _wait_for_guardian(
    guardian: subprocess.Popen[bytes], job: Job, stop: StopRequest, on_tick: Callable[[float], None]
) -> None:
    start = time.monotonic()
    deadline = start + job.seconds + TAKE_OVER_SLACK_S
    forwarded = False
    while True:
        try:
            guardian.wait(timeout=POLL_S)
            return
        except subprocess.TimeoutExpired:
            on_tick(time.monotonic() - start)
        if stop.reason is not None and not forwarded:
            forwarded = True
            guardian.send_signal(signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + TAKE_OVER_SLACK_S)
        if time.monotonic() > deadline:
            guardian.kill()


def _take_over(job: Job, guardian: subprocess.Popen[bytes], seconds: float) -> Outcome:
    """The guardian is gone without an orderly end: end what it leaves. The harness is a subreaper, so the supervisor
    and everything below it, if they live, are children of this process now."""
    swept, removed = clean_up(job)
    outcome = read_outcome(job.folder)
    if outcome is None:
        message = (
            f"the step's guardian ended with {guardian.returncode} after {seconds:.1f} s and its supervisor left no "
            f"outcome; the harness ended {len(swept.ended)} processes"
        )
        outcome = Outcome("supervisor died", seconds=seconds, message=message, removed_files=removed)
    outcome = replace(outcome, survivors=swept.survivors)
    try:
        outcome.write(job.folder)
    except OSError as error:
        return replace(outcome, message=f"{outcome.message}; its outcome cannot be written: {error}")
    return outcome


def run_supervised(
    command: tuple[str, ...],
    folder: Path,
    *,
    seconds: float,
    num_ranks: int,
    environment: Mapping[str, str],
    project_root: Path,
    stop: StopRequest,
    on_tick: Callable[[float], None],
) -> Outcome:
    """Run ``command`` in ``project_root`` for at most ``seconds``; logs and outcome go to ``folder``.

    Returns when nothing of it is left, or says in the outcome what could not be ended. ``on_tick`` is called about
    ten times a second with the seconds since the start.
    """
    processes.become_subreaper()
    folder.mkdir(parents=True, exist_ok=True)
    job = Job(command, folder.resolve(), new_step_id(), seconds, num_ranks)
    start = time.monotonic()
    guardian = _start_guardian(job, environment, project_root)
    _wait_for_guardian(guardian, job, stop, on_tick)
    outcome = read_outcome(job.folder)
    if guardian.returncode < 0 or outcome is None:
        outcome = _take_over(job, guardian, time.monotonic() - start)
    shutil.rmtree(temporary_folder(job.step_id), ignore_errors=True)
    return outcome
