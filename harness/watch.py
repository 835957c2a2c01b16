"""Looks at a step's processes while it runs: who they are, how much memory they take, which ranks are still there.
Ranks that live on after a broken one are ended here."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from harness import processes
from harness.hang import Trouble
from harness.holdings import Holdings, shm_snapshot
from harness.jsonlines import read_sound_lines
from harness.processes import Process, ProcessKey
from harness.rank import exit_file, fault_file, log_file, pid_file

SAMPLE_S = 0.25
HOLDINGS_S = 1.0
FINALIZE_S = 2.0
"""What ranks have to end by themselves, once one ended with an error."""
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

    def look_at_holdings(self) -> None:
        """The last look, before everything is ended: what was made since the last sample is the step's too."""
        for process in processes.descendants(os.getpid(), processes.all_processes()):
            if not process.is_dead:
                self._note(process)
                self.holdings.add(process.pid)

    def _note(self, process: Process) -> None:
        if process.key not in self.seen:
            self.seen.add(process.key)
            line = {"pid": process.pid, "start_ticks": process.key.start_ticks, "what": processes.describe(process)}
            self._file.write(json.dumps(line) + "\n")


def recorded_processes(folder: Path) -> list[ProcessKey]:
    """Every process that a Watch wrote down for this step."""
    lines = read_sound_lines(folder / PROCESSES_FILE)
    keys = [(line.get("pid"), line.get("start_ticks")) for line in lines]
    return [ProcessKey(pid, ticks) for pid, ticks in keys if type(pid) is int and type(ticks) is int]


class Deaths:
    """Ends of processes, in the order in which they ended. The kernel keeps it: what becomes ready joins the end of an
    epoll instance's list, so a look that comes late, on a busy machine, still sees who was first."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._followed: dict[int, int] = {}

    def follow(self, name: int, key: ProcessKey) -> bool:
        """Report the end of this process as ``name``; False when it has ended already."""
        try:
            handle = os.pidfd_open(key.pid)
        except ProcessLookupError:
            return False
        if not processes.is_alive(key):
            os.close(handle)
            return False
        self._followed[handle] = name
        self._epoll.register(handle, select.EPOLLIN)
        return True

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or as soon as there is an end to look at."""
        self._epoll.poll(seconds)

    def look(self) -> list[int]:
        """The names of those that ended since the last look."""
        ended = []
        for handle, _ in self._epoll.poll(0, max(1, len(self._followed))):
            self._epoll.unregister(handle)
            os.close(handle)
            ended.append(self._followed.pop(handle))
        return ended


class Ranks:
    """The ranks of a step by the files they leave. On the first trouble they are asked for their stacks, and
    ``explain`` is called, once; those that live on after a broken one are killed."""

    def __init__(
        self, folder: Path, num_ranks: int, say: Callable[[str], None], explain: Callable[[Trouble], None]
    ) -> None:
        self.broken: list[int] = []
        self._folder = folder
        self._num_ranks = num_ranks
        self._say = say
        self._explain = explain
        self._keys: dict[int, ProcessKey] = {}
        self._ended: set[int] = set()
        self._killed: set[int] = set()
        self._end_at = 0.0
        self._deaths = Deaths()
        self._has_trouble = False

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or as soon as a rank's process has ended."""
        self._deaths.wait(seconds)

    def look(self) -> None:
        """Find ranks that started or ended; on the first that ended badly, have the others print their stacks."""
        dead_before_seen = []
        for rank in range(self._num_ranks):
            if rank not in self._keys and (path := pid_file(self._folder, rank)).exists():
                words = path.read_text(errors="replace").split()
                if len(words) != 2 or not all(word.isdecimal() for word in words):
                    continue  # not what a rank writes
                self._keys[rank] = ProcessKey(int(words[0]), int(words[1]))
                if not self._deaths.follow(rank, self._keys[rank]):
                    dead_before_seen.append(rank)
        newly_ended = self._in_order_of_their_ends([*dead_before_seen, *self._deaths.look()])
        self._ended.update(newly_ended)
        self._look_for_faults()
        for rank in newly_ended:
            self._note_end(rank)

    def _look_for_faults(self) -> None:
        if self._has_trouble:
            return
        for rank in self._keys:
            if (path := fault_file(self._folder, rank)).exists():
                self._note_trouble(f"rank {rank} met a fault: {path.read_text(errors='replace')}", self._keys)
                return

    def _in_order_of_their_ends(self, dead: list[int]) -> list[int]:
        """The newly ended: ``dead``, in the order of their deaths, and those that live on after the end of their
        script. Of two that reached their end, the one that did so first comes first, whoever took longer to die. (One
        that did not was killed, by itself or because another rank was broken: there deaths tell.)"""
        lingering = [rank for rank in self._keys if rank not in dead and exit_file(self._folder, rank).exists()]
        ended = [rank for rank in (*dead, *lingering) if rank not in self._ended]
        ends = {rank: path.stat().st_mtime_ns for rank in ended if (path := exit_file(self._folder, rank)).exists()}
        by_end = iter(sorted(ends, key=ends.__getitem__))
        return [next(by_end) if rank in ends else rank for rank in ended]

    def _note_end(self, rank: int) -> None:
        path = exit_file(self._folder, rank)
        how = f"with exit code {path.read_text()}" if path.exists() else "without reaching its end (a signal)"
        if path.exists() and path.read_text() == "0":
            return
        self.broken.append(rank)
        self._say(f"rank {rank} ended {how}")
        if others := self._keys.keys() - self._ended:
            self._note_trouble(f"rank {rank} ended {how}", others, ended_by_itself=path.exists())

    def end_after_broken(self) -> None:
        """Kill the ranks that live on after one is broken; the launcher only asks them to, which they do not hear
        (rank.py). After a signal that is at once. A rank whose script ended, and after it all others, has some time to
        print its error and to end: then the launcher names the right one."""
        if len(self._keys) == 1:
            return  # no launcher waits for it
        now = time.monotonic()
        self._end_at = self._end_at or now + FINALIZE_S
        by_itself = exit_file(self._folder, self.broken[0]).exists()
        for rank in self._keys.keys() - self._killed:
            if (by_itself or rank in self._ended) and now < self._end_at:
                continue
            self._killed.add(rank)
            if processes.send_signal(self._keys[rank], signal.SIGKILL):
                self._say(f"rank {rank} killed, since rank {self.broken[0]} is broken")

    def note_time(self, why: str) -> None:
        """The step takes so long that it may hang."""
        self._note_trouble(why, self._keys)

    def _note_trouble(self, why: str, ranks: Collection[int], *, ended_by_itself: bool = False) -> None:
        """Ask ranks for their stacks and have the step explained, unless that was done before: the first look tells the
        story."""
        if self._has_trouble:
            return
        self._has_trouble = True
        asked = self._ask_for_stacks(why, ranks)
        self._explain(Trouble(why, dict(sorted(self._keys.items())), asked, ended_by_itself))

    def _ask_for_stacks(self, why: str, ranks: Collection[int]) -> dict[int, int]:
        """SIGUSR1 to those that have a handler for it; the length of their logs before that, by rank."""
        asked, deaf = {}, []
        for rank in sorted(ranks):
            key = self._keys[rank]
            if not processes.is_alive(key):
                continue
            log = log_file(self._folder, rank)
            length = log.stat().st_size if log.exists() else 0
            has_handler = processes.catches_signal(key.pid, signal.SIGUSR1)
            if has_handler and processes.send_signal(key, signal.SIGUSR1):
                asked[rank] = length
            elif not has_handler:
                deaf.append(rank)
        self._say(
            f"{why}: stacks of ranks {list(asked)} go to their logs" + f"; no handler in ranks {deaf}" * bool(deaf)
        )
        return asked
