"""Before and after a run: is there room, does something of an earlier run still live, was something left?

GPU processes and memory before and after belong here too, with the harness issue.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import processes
from harness.launch import key_of_run, run_mark
from harness.machine import free_disk_bytes, memory_bytes

MIN_DISK_BYTES = 1 << 30
MIN_MEMORY_BYTES = 4 << 30  # what one 8-rank step may take


@dataclass(frozen=True)
class PreFlight:
    """Figures before the run, and what the reader should know in words. Nothing here stops a run."""

    free_disk_bytes: int
    available_memory_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class PostFlight:
    """What was left after all steps, each in words; ``leftovers`` is empty when all is as it should be."""

    leftovers: tuple[str, ...]


def _stale_processes() -> list[str]:
    """Processes marked by a step whose harness is gone. They are reported and left alone: they are not this run's."""
    table = processes.all_processes()

    def is_stale(step_id: str) -> bool:
        key = key_of_run(step_id)
        return key is not None and not processes.is_alive(key)

    return [processes.describe(process) for process in processes.marked(is_stale, table)]


def _stale_folders() -> list[str]:
    stale = []
    for path in Path(tempfile.gettempdir()).glob("megamoe-*"):
        key = key_of_run(path.name.removeprefix("megamoe-"))
        if key is not None and not processes.is_alive(key):
            stale.append(str(path))
    return stale


def pre_flight(folder: Path) -> PreFlight:
    """Look before the first step; ``folder`` is where results go."""
    disk, memory = free_disk_bytes(folder), memory_bytes("MemAvailable")
    warnings = []
    if disk < MIN_DISK_BYTES:
        warnings.append(f"disk: {disk / 2**30:.2f} GiB free for {folder}; logs and dumps may not fit, make room")
    if memory < MIN_MEMORY_BYTES:
        warnings.append(f"memory: {memory / 2**30:.1f} GiB available; a step of 8 ranks may take 4 GiB")
    for text in _stale_processes():
        warnings.append(f"an earlier run, whose harness is gone, still has {text}; end it by its pid if it is yours")
    for text in _stale_folders():
        warnings.append(f"an earlier run left the folder {text}; it can be removed")
    return PreFlight(disk, memory, tuple(warnings))


def post_flight() -> PostFlight:
    """End what is left of any step of this run, and say what it was. Steps have cleaned up before: this finds nothing
    unless that went wrong."""
    mark = run_mark(processes.own_key()) + "."

    def left() -> list[processes.Process]:
        table = processes.all_processes()
        return [p for p in processes.marked(lambda step_id: step_id.startswith(mark), table) if p.pid != os.getpid()]

    swept = processes.sweep(left, reap=lambda: True)
    leftovers = [f"ended {text}" for text in swept.ended] + [f"COULD NOT END {text}" for text in swept.survivors]
    for path in Path(tempfile.gettempdir()).glob(f"megamoe-{mark}*"):
        shutil.rmtree(path, ignore_errors=True)
        leftovers.append(f"removed {path}")
    return PostFlight(tuple(leftovers))
