"""What the supervisor of a step reports: one JSON file in the step's folder, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """How a supervised command ended, and whether anything of it was left.

    end: ``exited`` by itself, ``timed out``, ``interrupted`` from outside, ``not started`` (no such program), or
        ``supervisor died`` (its guardian then cleaned up and wrote this).
    exit_code: of the command; negative is the signal that ended it; None when it never ended by itself.
    seconds: from start to the command's end or to the limit. seconds_to_empty: from there until nothing was left.
    peak_pss_bytes: the largest sum over all of the step's processes at one moment.
    left_behind: processes that still ran 2 s after the command had ended by itself (they were ended then).
    survivors: processes that could not be ended in bounded time, in words.
    removed_files, unexplained_files: /dev/shm files, see holdings.remove_shm_files.
    held_memfds: living processes that hold the step's shared memory.
    broken_ranks: ranks that ended with an error or a signal, first one first.
    bundle: folder that explains a hang, a fault or a rank's end (hang.py). explanation: its verdict, in one line.
    """

    end: str
    exit_code: int | None = None
    seconds: float = 0.0
    seconds_to_empty: float = 0.0
    peak_pss_bytes: int = 0
    num_processes: int = 0
    left_behind: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    removed_files: tuple[str, ...] = ()
    unexplained_files: tuple[str, ...] = ()
    held_memfds: tuple[str, ...] = ()
    broken_ranks: tuple[int, ...] = ()
    bundle: str = ""
    explanation: str = ""
    message: str = ""

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)  # the step may have removed it
        target = folder / OUTCOME_FILE
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        temporary.replace(target)


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome in a step's folder; None when nobody lived, or had the room, to write one."""
    path = folder / OUTCOME_FILE
    if not path.is_file():  # the step may have made a folder or a pipe of that name
        return None
    values: dict[str, Any] = json.loads(path.read_text())
    lists_to_tuples: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Outcome(**lists_to_tuples)
