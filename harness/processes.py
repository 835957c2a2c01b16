"""Processes as the kernel shows them in /proc: who descends from whom, what they hold, how to end them.

A process is named by its pid *and* its start time, because a pid alone may be somebody else's a moment later, and is
found by descent or by a mark in its environment, never by its command's name.
Standard library only: the supervisor must start in a few milliseconds and hold a few megabytes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
STEP_ID_VARIABLE = "MEGAMOE_STEP_ID"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessKey:
    """What stays true of a process for as long as the machine runs; ``start_ticks`` counts clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class Process:
    """One line of /proc/<pid>/stat."""

    key: ProcessKey
    parent_pid: int
    state: str

    @property
    def pid(self) -> int:
        return self.key.pid

    @property
    def is_dead(self) -> bool:
        return self.state in "ZXx"


@dataclass(frozen=True)
class Sweep:
    """What ending a set of processes came to. ``survivors`` is empty unless the kernel would not end them in time."""

    ended: tuple[str, ...]
    survivors: tuple[str, ...]
    seconds: float


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {argument}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's, so that a daemon cannot leave the tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signal_number: int) -> None:
    """Have the kernel send this process ``signal_number`` when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def read_process(pid: int) -> Process | None:
    """The process ``pid``, or None when there is none (any more)."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command stands in parentheses and may hold any byte: the fields start after the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(ProcessKey(pid, int(fields[19])), int(fields[1]), fields[0].decode())


def own_key() -> ProcessKey:
    process = read_process(os.getpid())
    if process is None:
        raise OSError("this process does not find itself in /proc: is /proc mounted?")
    return process.key


def is_alive(key: ProcessKey) -> bool:
    process = read_process(key.pid)
    return process is not None and process.key == key and not process.is_dead


def all_processes() -> dict[int, Process]:
    """Every process of the machine that this one may see, by pid."""
    table = {}
    for name in os.listdir(PROC):
        if name.isdigit() and (process := read_process(int(name))) is not None:
            table[process.pid] = process
    return table


def descendants(pid: int, table: Mapping[int, Process]) -> list[Process]:
    """All processes below ``pid``, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent_pid, []).append(process)
    found = list(children.get(pid, ()))
    for process in found:  # grows while it is walked
        found.extend(children.get(process.pid, ()))
    return found


def step_id_of(pid: int) -> str | None:
    """The step that process ``pid`` was started for, by the mark in its environment; None without a mark."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except (OSError, ValueError):  # gone, or another user's: then no step of ours started it
        return None
    prefix = STEP_ID_VARIABLE.encode() + b"="
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None


def marked(belongs: Callable[[str], bool], table: Mapping[int, Process]) -> list[Process]:
    """The processes whose step id ``belongs`` accepts."""
    return [
        process
        for process in table.values()
        if not process.is_dead and (step_id := step_id_of(process.pid)) is not None and belongs(step_id)
    ]


def describe(process: Process) -> str:
    """A process for the reader: ``pid 12 (state S) python3 script.py``."""
    try:
        words = (PROC / str(process.pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    command = " ".join(word.decode(errors="replace") for word in words if word)
    return f"pid {process.pid} (state {process.state}) {command[:160] or '<no command line>'}"


def send_signal(key: ProcessKey, signal_number: int) -> bool:
    """Signal exactly this process; False when it is gone. The pidfd closes the gap between looking and signalling."""
    try:
        handle = os.pidfd_open(key.pid)
    except ProcessLookupError:
        return False
    try:
        process = read_process(key.pid)
        if process is None or process.key != key:
            return False
        signal.pidfd_send_signal(handle, signal_number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def catches_signal(pid: int, signal_number: int) -> bool:
    """Whether the process has a handler: without one SIGUSR1 would end it instead of printing its stacks."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def reap_children(statuses: dict[int, int] | None = None) -> bool:
    """Collect every child that has ended, adopted ones too; ``statuses`` receives exit status by pid.

    True when no child is left, dead or alive. For a subreaper that is proof that nothing at all is left below it,
    which no walk over /proc can give: a chain of processes that fork and end may slip past each look.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        if statuses is not None:
            statuses[pid] = os.waitstatus_to_exitcode(status)


def sweep(
    find: Callable[[], Collection[Process]],
    *,
    reap: Callable[[], bool],
    grace_s: float = 1.0,
    give_up_s: float = 3.0,
) -> Sweep:
    """Terminate, then kill everything that ``find`` finds, until two looks in a row find nothing.

    ``find`` is asked again each time, since what is being ended may start others; ``reap`` collects dead children and
    says whether none is left. Bounded: at most ``grace_s`` for the polite part and ``give_up_s`` for the kill; what
    still lives then is named in ``survivors``.
    """
    start = time.monotonic()
    ended: dict[ProcessKey, str] = {}

    def look() -> tuple[list[Process], bool]:
        childless = reap()
        alive = [process for process in find() if not process.is_dead]
        for process in alive:
            ended.setdefault(process.key, describe(process))
        return alive, childless and not alive

    asked: set[ProcessKey] = set()
    alive, empty = look()
    while alive and time.monotonic() - start < grace_s:
        for process in alive:
            if process.key not in asked:
                asked.add(process.key)
                send_signal(process.key, signal.SIGTERM)
                send_signal(process.key, signal.SIGCONT)  # a stopped process would not hear the first
        time.sleep(0.02)
        alive, empty = look()
    kill_until = time.monotonic() + give_up_s
    empty_looks = 0
    while empty_looks < 2 and time.monotonic() < kill_until:
        for process in alive:
            send_signal(process.key, signal.SIGKILL)
        empty_looks = empty_looks + 1 if empty else 0
        time.sleep(0.005)
        alive, empty = look()
    survivors = {process.key: describe(process) for process in alive}
    names = tuple(text for key, text in ended.items() if key not in survivors)
    return Sweep(names, tuple(survivors.values()), time.monotonic() - start)


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process: its own pages, and its share of the shared ones. 0 when it is gone."""
    try:
        text = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # gone, or another user's
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def unique(processes: Iterable[Process]) -> list[Process]:
    return list({process.key: process for process in processes}.values())
