"""What this machine can run: GPUs as torch sees them, memory, disk, versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROBE_SECONDS = 120.0
HOPPER = (9, 0)

# Runs in a process of its own: the harness itself must hold no CUDA context.
_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [[torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in range(count)]
print(json.dumps(gpus))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch names it, with its compute capability."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """``gpus`` are all that torch sees, if it was asked; ``problem`` says why it was not or could not be."""

    hostname: str
    python_version: str
    torch_version: str | None
    num_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    problem: str = ""

    @property
    def num_hopper_gpus(self) -> int:
        return sum(gpu.capability == HOPPER for gpu in self.gpus)


def memory_bytes(field: str) -> int:
    """A field of /proc/meminfo (``MemTotal``, ``MemAvailable``) in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/meminfo has no {field}")


def free_disk_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def num_usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _ask_torch_for_gpus() -> tuple[tuple[Gpu, ...], str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return (), f"torch did not answer in {PROBE_SECONDS:g} s when asked for GPUs"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return (), f"torch could not be asked for GPUs: {last}"
    gpus = json.loads(done.stdout.splitlines()[-1])
    return tuple(Gpu(name, (major, minor)) for name, major, minor in gpus), ""


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def look_at_machine(*, with_gpus: bool) -> Machine:
    """Ask the system, and with ``with_gpus`` torch as well (2 to 3 s: it must be imported)."""
    gpus, problem = _ask_torch_for_gpus() if with_gpus else ((), "GPUs were not looked for")
    return Machine(
        hostname=platform.node(),
        python_version=platform.python_version(),
        torch_version=_torch_version(),
        num_cores=num_usable_cores(),
        memory_bytes=memory_bytes("MemTotal"),
        gpus=gpus,
        problem=problem,
    )
