"""Before and after a run: are the GPUs there and free, is there room, does something of an earlier run still live; was
something left? Each problem is one line that says what to do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import processes
from harness.flight_gpus import GpuLook, GpuMemory, compare_after, look_at_gpus, problems_before
from harness.holdings import FileKey, recorded_holdings, remove_shm_files, shm_snapshot
from harness.launch import key_of_run, run_mark
from harness.machine import Machine, free_disk_bytes, memory_bytes

MIN_DISK_BYTES = 1 << 30
MIN_MEMORY_BYTES = 4 << 30  # what one 8-rank step may take


@dataclass(frozen=True)
class PreFlight:
    """Figures before the run, and what the reader should know in words. Nothing here stops a run."""

    free_disk_bytes: int
    available_memory_bytes: int
    gpus: tuple[GpuMemory, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class PostFlight:
    """What was left after all steps, each in words: ``leftovers`` is empty when all is as it should be. ``notes`` tell
    what changed meanwhile and is, for all that is known, somebody else's."""

    leftovers: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Baseline:
    """What there was before the run, for the comparison after it."""

    shm_files: Mapping[FileKey, str]
    gpus: GpuLook | None


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


def _disk_warnings(folders: Iterable[Path]) -> list[str]:
    """One line a file system."""
    by_device = {folder.stat().st_dev: folder for folder in reversed(list(folders))}
    return [
        f"disk: {free / 2**30:.2f} GiB free for {folder}; logs and dumps may not fit, make room"
        for folder in by_device.values()
        if (free := free_disk_bytes(folder)) < MIN_DISK_BYTES
    ]


def pre_flight(folder: Path, machine: Machine, *, with_gpus: bool) -> tuple[PreFlight, Baseline]:
    """Look before the first step; ``folder`` is where results go. ``with_gpus``: the run is for GPUs."""
    gpus = look_at_gpus() if with_gpus else None
    memory = memory_bytes("MemAvailable")
    warnings = _disk_warnings((folder, Path(tempfile.gettempdir())))
    if memory < MIN_MEMORY_BYTES:
        warnings.append(
            f"memory: {memory / 2**30:.1f} GiB available, a step of 8 ranks may take 4; end what holds it, or use fewer"
        )
    if gpus is not None:
        warnings += problems_before(gpus, machine)
    for text in _stale_processes():
        warnings.append(f"an earlier run, whose harness is gone, still has {text}; end it by its pid if it is yours")
    for text in _stale_folders():
        warnings.append(f"an earlier run left the folder {text}; it can be removed")
    figures = gpus.gpus if gpus is not None else ()
    return PreFlight(free_disk_bytes(folder), memory, figures, tuple(warnings)), Baseline(shm_snapshot(), gpus)


def _leftover_processes() -> list[str]:
    """End what is left of any step of this run, and say what it was."""
    mark = run_mark(processes.own_key()) + "."

    def left() -> list[processes.Process]:
        table = processes.all_processes()
        return [p for p in processes.marked(lambda step_id: step_id.startswith(mark), table) if p.pid != os.getpid()]

    swept = processes.sweep(left, reap=lambda: True)
    survivors = [f"COULD NOT END {text}; the kernel holds it, `dmesg` may say why" for text in swept.survivors]
    return [f"ended {text}" for text in swept.ended] + survivors


def _leftover_files(folder: Path, baseline: Baseline) -> tuple[list[str], list[str]]:
    """(left behind and removed now, to note): temporary folders of steps, and shared memory by its name."""
    leftovers = []
    for path in Path(tempfile.gettempdir()).glob(f"megamoe-{run_mark(processes.own_key())}.*"):
        shutil.rmtree(path, ignore_errors=True)
        leftovers.append(f"removed {path}" if not path.exists() else f"COULD NOT REMOVE {path}; remove it by hand")
    held: dict[FileKey, str] = {}
    for path in folder.rglob("shared_memory.jsonl"):
        held |= recorded_holdings(path.parent)
    new = {key: path for key, path in shm_snapshot().items() if key not in baseline.shm_files}
    leftovers += [f"removed {path}" for path in remove_shm_files({key: held[key] for key in new.keys() & held.keys()})]
    notes = [
        f"{path} is new, and no process of this run was seen to hold it; remove it if it is yours"
        for key, path in new.items()
        if key not in held and _is_own(path)
    ]
    return leftovers, notes


def _is_own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.getuid()
    except FileNotFoundError:  # gone by now
        return False


def post_flight(folder: Path, baseline: Baseline) -> PostFlight:
    """Look after the last step. Steps have cleaned up before: this finds nothing unless that went wrong, and ends and
    removes what it does find. ``folder`` holds the results of the run."""
    leftovers = _leftover_processes()
    files, notes = _leftover_files(folder, baseline)
    leftovers += files
    if baseline.gpus is not None:
        left_on_gpus, notes_on_gpus = compare_after(baseline.gpus)
        leftovers += left_on_gpus
        notes += notes_on_gpus
    return PostFlight(tuple(leftovers), tuple(notes))
