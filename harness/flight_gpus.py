"""The GPUs as nvidia-smi shows them: how much memory is taken, and by whom. Before a run, and against that after it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness import processes
from harness.machine import Machine

QUERY_SECONDS = 30.0  # without persistence mode the driver may have to wake first
BUSY_BYTES = 1 << 30
SLACK_BYTES = 64 << 20  # what the driver itself keeps goes up and down by this
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO
RELEASE_S = 5.0  # memory of a process that has ended may take this long to be free again

_GPU_FIELDS = "index,uuid,name,memory.total,memory.used"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_gpu_memory"


@dataclass(frozen=True)
class GpuMemory:
    """One GPU by nvidia-smi's index. Bytes are None where the driver does not tell (``[N/A]``)."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True)
class GpuProcess:
    """A process with a context on a GPU. In a container its pid may be the host's, or it may not be shown at all."""

    gpu_uuid: str
    pid: int
    name: str
    used_bytes: int | None

    @property
    def words(self) -> str:
        memory = "" if self.used_bytes is None else f" ({self.used_bytes / 2**30:.2f} GiB)"
        return f"pid {self.pid} {self.name}{memory}"


@dataclass(frozen=True)
class GpuLook:
    """The GPUs that this process may use, and what runs on them. ``problem`` says why nothing is known."""

    gpus: tuple[GpuMemory, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    problem: str = ""

    def processes_on(self, gpu: GpuMemory) -> list[GpuProcess]:
        return [process for process in self.processes if process.gpu_uuid == gpu.uuid]


class _NoAnswer(Exception):
    """What nvidia-smi could not tell, and what to do."""


def _ask(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=QUERY_SECONDS
        )
    except FileNotFoundError as error:
        raise _NoAnswer(
            "no nvidia-smi on PATH, so nobody knows who uses them; it comes with the driver (in a container: "
            "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(
            f"nvidia-smi did not answer in {QUERY_SECONDS:g} s: the driver may be stuck, look at `dmesg`"
        ) from error
    if done.returncode != 0:
        said = " ".join((done.stdout + " " + done.stderr).split())
        raise _NoAnswer(
            f"nvidia-smi failed with {done.returncode} ({said[:200]}): is the driver loaded and of one version?"
        )
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.count(",") >= 3]


def _mib(text: str) -> int | None:
    """Bytes from a number of MiB; None for ``[N/A]`` and its like."""
    return int(text) << 20 if text.isdecimal() else None


def _chosen(gpus: list[GpuMemory], environment: Mapping[str, str]) -> list[GpuMemory]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or UUID; all without it. Raises _NoAnswer for an absent one."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    chosen = []
    for word in filter(None, (word.strip() for word in wanted.split(","))):
        if word == "-1":  # ends the list
            break
        if word.startswith("MIG-"):  # parts of GPUs are not told apart here
            continue
        found = [
            gpu for gpu in gpus if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if not found:
            there = ", ".join(str(gpu.index) for gpu in gpus) or "none"
            raise _NoAnswer(
                f"CUDA_VISIBLE_DEVICES={wanted} names {word}, there are {there}: correct it, or gpus in nodes.yaml"
            )
        chosen.append(found[0])
    return chosen


def look_at_gpus() -> GpuLook:
    """Ask nvidia-smi for what this process may use."""
    try:
        rows = _ask(f"--query-gpu={_GPU_FIELDS}")
        gpus = [
            GpuMemory(int(row[0]), row[1], row[2], _mib(row[3]), _mib(row[4]))
            for row in rows
            if len(row) == 5 and row[0].isdecimal()
        ]
        gpus = _chosen(gpus, os.environ)
        # A process's name is a path and may hold commas; the fields around it may not.
        apps = [
            GpuProcess(row[0], int(row[1]), ",".join(row[2:-1]), _mib(row[-1]))
            for row in _ask(f"--query-compute-apps={_PROCESS_FIELDS}")
            if row[1].isdecimal()
        ]
    except _NoAnswer as error:
        return GpuLook(problem=str(error))
    uuids = {gpu.uuid for gpu in gpus}
    return GpuLook(tuple(gpus), tuple(app for app in apps if app.gpu_uuid in uuids))


def problems_before(look: GpuLook, machine: Machine) -> list[str]:
    """What may spoil a run on these GPUs, each in one line."""
    if look.problem:
        return [f"GPUs: {look.problem}"]
    problems = []
    if len(look.gpus) != len(machine.gpus):
        why = f" ({machine.problem})" if machine.problem else ""
        problems.append(
            f"GPUs: nvidia-smi shows {len(look.gpus)}, torch sees {len(machine.gpus)}{why}: is this torch built for "
            "CUDA, and for a version that the driver knows?"
        )
    for gpu in look.gpus:
        others = look.processes_on(gpu)
        if others or (gpu.used_bytes or 0) > BUSY_BYTES:
            who = ", ".join(process.words for process in others) or "a process that this one may not see"
            problems.append(
                f"GPU {gpu.index}: {_of_total(gpu)} taken, by {who}; wait for it, end it by its pid if it is yours, "
                "or use other GPUs (CUDA_VISIBLE_DEVICES, gpus in nodes.yaml)"
            )
    return problems


def _of_total(gpu: GpuMemory) -> str:
    if gpu.used_bytes is None or gpu.total_bytes is None:
        return "memory (how much is not told)"
    return f"{gpu.used_bytes / 2**30:.2f} of {gpu.total_bytes / 2**30:.0f} GiB"


def _grown(before: GpuLook, after: GpuLook) -> list[tuple[GpuMemory, int]]:
    """Each GPU with more memory taken than before, and by how many bytes."""
    was = {gpu.uuid: gpu.used_bytes for gpu in before.gpus}
    more = [(gpu, (gpu.used_bytes or 0) - (was.get(gpu.uuid) or 0)) for gpu in after.gpus]
    return [(gpu, num_bytes) for gpu, num_bytes in more if num_bytes > SLACK_BYTES]


def is_container() -> bool:
    """Whether this is another pid namespace than the machine's first. nvidia-smi shows few there, or none."""
    try:
        return os.readlink(processes.PROC / "self/ns/pid") != FIRST_PID_NAMESPACE
    except OSError:
        return True


def _device_holders() -> list[str]:
    """Living processes that have a GPU's device file open, as far as this one may look: of the same user, in here."""
    holders = []
    for process in processes.all_processes().values():
        try:
            links = [os.readlink(path) for path in (processes.PROC / str(process.pid) / "fd").iterdir()]
        except OSError:  # another user's, or gone by now
            continue
        if any(re.fullmatch(r"/dev/nvidia[0-9]+", link) for link in links):
            holders.append(processes.describe(process))
    return holders


def compare_after(before: GpuLook, look: Callable[[], GpuLook] = look_at_gpus) -> tuple[list[str], list[str]]:
    """(left behind, to note): memory that is taken now and was not before, once ended processes have let go of it.

    All processes of the run have ended by now, or are named by who could not end them. So memory of any process that
    shows is somebody else's, and worth a note. Memory of none is left behind where nvidia-smi shows all there are; in
    a container it is for all that is known a process's outside.
    """
    if before.problem:
        return [], []
    deadline = time.monotonic() + RELEASE_S
    after = look()
    while _grown(before, after) and time.monotonic() < deadline:
        time.sleep(0.5)
        after = look()
    if after.problem:
        return [f"GPUs: {after.problem}"], []
    known = {(process.gpu_uuid, process.pid) for process in before.processes}
    left, notes = [], []
    for gpu, more in _grown(before, after):
        text = f"GPU {gpu.index}: {more / 2**30:.2f} GiB more are taken than before the run"
        shown = after.processes_on(gpu)
        new = [process for process in shown if (gpu.uuid, process.pid) not in known]
        if shown:
            notes.append(f"{text}, by {', '.join(process.words for process in new or shown)}, not of this run")
        elif is_container():
            who = ", or by ".join(["a process outside this container", *_device_holders()])
            notes.append(f"{text}, by {who}: every process of this run has ended; `nvidia-smi` on the host shows whose")
        else:
            left.append(f"{text}, and no process shows there: look at `nvidia-smi` and `dmesg`")
    return left, notes
