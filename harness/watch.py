"""Looks at a step's processes while it runs: who they are, how much memory they take, which ranks are still there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from harness import processes
from harness.holdings import Holdings, shm_snapshot
from harness.jsonlines import read_json_lines
from harness.processes import Process, ProcessKey
from harness.rank import exit_file, pid_file

SAMPLE_S = 0.25
HOLDINGS_S = 1.0
MAX_SAMPLING_SHARE = 0.05
PROCESSES_FILE = "processes.jsonl"


class Watch:
    """Samples everything below this process. Each process ever seen is written down at once, so that whoever has to
    clean up after this one knows them too. Sampling slows itself down to a twentieth of one core."""

    def __init__(self, folder: Path) -> None:
        self.seen: set[ProcessKey] = set()
        self.peak_pss_bytes = 0
        self.holdings = Holdings(folder, shm_snapshot())
        self._file = (folder / PROCESSES_FILE).open("a", buffering=1)
        self._next_sample = 0.0
        self._next_holdings = 0.0

    def sample_if_due(self) -> None:
        if (now := time.monotonic()) < self._next_sample:
            return
        below = [p for p in processes.descendants(os.getpid(), processes.all_processes()) if not p.is_dead]
        for process in below:
            self._note(process)
        self.peak_pss_bytes = max(self.peak_pss_bytes, sum(processes.pss_bytes(p.pid) for p in below))
        if now >= self._next_holdings:
            for process in below:
                self.holdings.add(process.pid)
            cost_s = time.monotonic() - now
            self._next_holdings = now + max(HOLDINGS_S, cost_s / MAX_SAMPLING_SHARE)
        cost_s = time.monotonic() - now
        self._next_sample = now + max(SAMPLE_S, cost_s / MAX_SAMPLING_SHARE)

    def _note(self, process: Process) -> None:
        if process.key not in self.seen:
            self.seen.add(process.key)
            line = {"pid": process.pid, "start_ticks": process.key.start_ticks, "what": processes.describe(process)}
            self._file.write(json.dumps(line) + "\n")


def recorded_processes(folder: Path) -> list[ProcessKey]:
    """Every process that a Watch wrote down for this step."""
    return [ProcessKey(line["pid"], line["start_ticks"]) for line in read_json_lines(folder / PROCESSES_FILE)]


class Ranks:
    """The ranks of a step by the files they leave, and their stacks when something goes wrong."""

    def __init__(self, folder: Path, num_ranks: int, say: Callable[[str], None]) -> None:
        self.broken: list[int] = []
        self._folder = folder
        self._num_ranks = num_ranks
        self._say = say
        self._keys: dict[int, ProcessKey] = {}
        self._ended: set[int] = set()
        self._asked_for_stacks = False

    def look(self) -> None:
        """Find ranks that started or ended; on the first that ended badly, have the others print their stacks."""
        for rank in range(self._num_ranks):
            if rank not in self._keys and (path := pid_file(self._folder, rank)).exists():
                pid, start_ticks = path.read_text().split()
                self._keys[rank] = ProcessKey(int(pid), int(start_ticks))
            if rank in self._keys and rank not in self._ended and self._has_ended(rank):
                self._ended.add(rank)
                self._note_end(rank)

    def _has_ended(self, rank: int) -> bool:
        return exit_file(self._folder, rank).exists() or not processes.is_alive(self._keys[rank])

    def _note_end(self, rank: int) -> None:
        path = exit_file(self._folder, rank)
        how = f"with exit code {path.read_text()}" if path.exists() else "without reaching its end (a signal)"
        if path.exists() and path.read_text() == "0":
            return
        self.broken.append(rank)
        self._say(f"rank {rank} ended {how}")
        self.ask_for_stacks(f"rank {rank} ended {how}")

    def ask_for_stacks(self, why: str) -> None:
        """SIGUSR1 to every rank that has a handler for it; once a step, since the first look tells the story."""
        if self._asked_for_stacks:
            return
        self._asked_for_stacks = True
        asked, deaf = [], []
        for rank, key in self._keys.items():
            if not processes.is_alive(key):
                continue
            has_handler = processes.catches_signal(key.pid, signal.SIGUSR1)
            if has_handler and processes.send_signal(key, signal.SIGUSR1):
                asked.append(rank)
            elif not has_handler:
                deaf.append(rank)
        self._say(f"{why}: stacks of ranks {asked} go to their logs" + (f"; no handler in ranks {deaf}" * bool(deaf)))
