"""Explains a step that hangs, or of which a rank failed, while its ranks are still there: the folder ``hang``.

A child of the supervisor writes it, so that nothing it meets can keep the supervisor from the kill at the limit. It
opens the memory of the ranks from outside, which keeps it alive whatever becomes of them, stops them for as long as it
reads (one moment for all ranks, and their cores for the reading), and lets them go on. On GPUs only the rank itself can
read its buffer: it is asked to, and the bundle says so where it did not answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness import processes
from harness.processes import PROC, ProcessKey
from harness.rank import DUMP_SUFFIX, fault_file, launch_file, log_file, responder_file, write_whole

if TYPE_CHECKING:
    from megamoe.config import MegaMoEConfig
    from megamoe.inspect.dump import LaunchFacts
    from megamoe.inspect.outside import OutsideBuffers

HANG_FOLDER = "hang"
SUMMARY_JSON = "summary.json"
SUMMARY_TEXT = "summary.txt"
REQUEST = "request"
"""Asks ranks on a GPU to save their buffers; holds the seconds they have."""
MAX_SECONDS = 10.0
TIME_SHARE = 0.8  # of what is left until the kill
DUMPS_SHARE = 0.5  # of the bundle's time: when it has passed no further buffer is saved
STACKS_WAIT_S = 0.5
BUFFER_LINK = "/memfd:megamoe-rank"
"""How links to ranks' memory begin (megamoe/inspect/names.py, which is imported only where there is one)."""
DEVICE_WAIT_SHARE = 0.4
NATIVE_SECONDS = 3.0  # of one process
NATIVE_SHARE = 0.8
FAULT_WAIT_S = 3.0
LOG_LINES = 30
LOG_BYTES = 1 << 16


@dataclass(frozen=True)
class Trouble:
    """Why a step is explained, and what is known of its ranks then.

    Attributes:
        why: in words.
        ranks: every rank's process, dead ones too.
        asked: ranks that were asked for their Python stacks, with the length of their logs before that.
        ended_by_itself: the cause is a rank that ended in order, with an exit code; only worth a bundle where a launch
            hangs on it.
    """

    why: str
    ranks: Mapping[int, ProcessKey]
    asked: Mapping[int, int]
    ended_by_itself: bool = False


class Bundle:
    """The supervisor's side: starts the child that writes the bundle, once, and ends it in time."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder = folder
        self._ends_at = time.monotonic() + limit_s
        self._pid: int | None = None
        self._ranks: tuple[ProcessKey, ...] = ()
        self._running = False

    def begin(self, trouble: Trouble) -> None:
        """Fork the child. It has the rest of the step's time, less what ending the step takes."""
        seconds = min(MAX_SECONDS, (self._ends_at - time.monotonic()) * TIME_SHARE)
        if self._pid is not None or seconds <= 0:
            return
        self._ranks = tuple(trouble.ranks.values())
        self._pid = os.fork()
        if self._pid == 0:
            _run_child(self._folder, trouble, seconds)
        self._running = True

    @property
    def is_under_way(self) -> bool:
        return self._running

    def note_ends(self, statuses: Mapping[int, int]) -> None:
        """``statuses`` has the children that have ended, by pid."""
        if self._running and self._pid in statuses:
            self._running = False
            _continue(self._ranks)  # should it have died between stopping them and letting them go on

    def finish(self, seconds: float) -> None:
        """Wait for the child, at most so long, then end it."""
        until = time.monotonic() + seconds
        statuses: dict[int, int] = {}
        while self._running and self._pid is not None:
            processes.reap_children(statuses)
            self.note_ends(statuses)
            if self._running and time.monotonic() > until:
                os.kill(self._pid, signal.SIGKILL)  # a child that is not reaped keeps its pid
                until += 1.0
            time.sleep(0.01)

    def read(self) -> tuple[str, str]:
        """(folder, one line that explains); two empty texts where there is no bundle."""
        folder = self._folder / HANG_FOLDER
        if self._pid is None or not folder.is_dir():
            return "", ""
        try:
            return str(folder), str(json.loads((folder / SUMMARY_JSON).read_text())["explanation"])
        except (OSError, ValueError, KeyError, TypeError):
            return str(folder), "the bundle was not finished in its time"


def _run_child(folder: Path, trouble: Trouble, seconds: float) -> None:
    """The forked child's life; it never returns."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        processes.set_parent_death_signal(signal.SIGKILL)
        write_bundle(folder, trouble, seconds)
        code = 0
    except BaseException:  # noqa: BLE001 (the process ends here; what went wrong stands in the bundle's folder)
        with suppress(OSError):
            (folder / HANG_FOLDER / "error.txt").write_text(traceback.format_exc())
    finally:
        _continue(trouble.ranks.values())
        os._exit(code)


def _continue(ranks: Iterable[ProcessKey]) -> None:
    for key in ranks:
        processes.send_signal(key, signal.SIGCONT)


def write_bundle(folder: Path, trouble: Trouble, seconds: float) -> None:
    """Write ``hang/`` in a step's folder within ``seconds``: texts first, saved buffers as far as the time allows.

    Nothing stays where a rank ended by itself and no launch hangs on it.
    """
    writer = _Writer(folder, trouble, time.monotonic(), seconds)
    writer.read_memory()
    writer.ask_devices()
    if trouble.ended_by_itself and not writer.is_in_trouble:
        shutil.rmtree(folder / HANG_FOLDER)
        return
    writer.write_texts()


class _Writer:
    def __init__(self, folder: Path, trouble: Trouble, started: float, seconds: float) -> None:
        self.folder = folder
        self.hang = folder / HANG_FOLDER
        self.trouble = trouble
        self.started = started
        self.seconds = seconds
        self.is_in_trouble = False
        self.explanation = "no rank holds a buffer whose memory could be read"
        self.words: dict[int, list[str]] = {}  # by rank of the group
        self.notes: list[str] = []
        self.alive = {rank: key for rank, key in trouble.ranks.items() if processes.is_alive(key)}
        self.hang.mkdir(exist_ok=True)

    def left(self, share: float = 1.0) -> float:
        return self.started + self.seconds * share - time.monotonic()

    # --- memory on the CPU ---------------------------------------------------------------------------------------

    def read_memory(self) -> None:
        holders = [key for key in self.alive.values() if _holds_buffers(key.pid)]
        if not holders:
            return
        for key in holders:
            processes.send_signal(key, signal.SIGSTOP)
        try:
            from megamoe.inspect.outside import OutsideBuffers

            buffers = OutsideBuffers([key.pid for key in self.alive.values()])
            self._describe(buffers)
            self._save(buffers)
        except (ImportError, OSError, LookupError, ValueError) as error:  # the rest of the bundle is worth having
            self.notes.append(f"buffers not read, or not all: {type(error).__name__}: {error}")
        finally:
            _continue(holders)

    def _describe(self, buffers: OutsideBuffers) -> None:
        from megamoe.inspect.counters import describe_seen, read_counters
        from megamoe.inspect.report import describe_config, describe_facts
        from megamoe.inspect.verdict import find_culprit

        self.notes += buffers.problems
        groups = buffers.groups()
        troubled = {config for config, group in groups.items() if any(image.is_troubled for image in group.values())}
        self.is_in_trouble = bool(troubled)
        if groups:
            self.explanation = "no launch is under way: what hangs is outside the kernel (Python stacks: rank<r>.txt)"
        for config, images in groups.items():
            if config not in troubled:
                epochs = ", ".join(str(image.word("epoch")) for image in images.values())
                self.notes.append(f"at rest, epochs of the ranks {epochs}: {describe_config(config)}")
                continue
            seen = {rank: read_counters(image) for rank, image in images.items()}
            self.explanation = find_culprit(seen, config.num_ranks)
            self.notes.append(describe_facts(read_launch_facts(self.folder, config)))
            lost = [rank for rank in images if rank in self.trouble.ranks and rank not in self.alive]
            self.notes += [f"rank {rank} is gone; its memory was read through a peer's" for rank in lost]
            for rank, counters in seen.items():
                self.words.setdefault(rank, []).append(f"{describe_config(config)}\n{describe_seen(counters, images)}")

    def _save(self, buffers: OutsideBuffers) -> None:
        """Save what is in trouble; where nothing is, everything."""
        from megamoe.inspect.dump import SUFFIX, write_dump

        groups = buffers.groups()
        for number, (config, group) in enumerate(groups.items()):
            if self.is_in_trouble and not any(image.is_troubled for image in group.values()):
                continue
            for rank, image in group.items():
                if self.left(DUMPS_SHARE) <= 0:
                    self.notes.append(f"rank {rank}: its buffer was not saved, the time was over")
                    continue
                facts = read_launch_facts(self.folder, config)
                write_dump(self.hang / f"rank{rank}-buffer{number}{SUFFIX}", image, facts)

    # --- memory on GPUs ------------------------------------------------------------------------------------------

    def ask_devices(self) -> None:
        """Have ranks that can answer save their buffers, and describe what came."""
        waiting = {rank for rank in self.alive if responder_file(self.folder, rank).exists()}
        if not waiting:
            return
        from megamoe.inspect.counters import describe_seen, read_counters
        from megamoe.inspect.dump import SUFFIX, load_dump
        from megamoe.inspect.verdict import find_culprit

        seconds = max(0.0, self.left(DEVICE_WAIT_SHARE))
        write_whole(self.hang / REQUEST, f"{seconds:.1f}")
        until = time.monotonic() + seconds + 0.5
        while time.monotonic() < until and any(self._may_answer(rank) for rank in waiting):
            time.sleep(0.02)
        for rank in sorted(waiting):
            answer = answer_file(self.folder, rank)
            said = (
                answer.read_text()
                if answer.exists()
                else f"no answer within {seconds:.1f} s: it ended, or its context is stuck"
            )
            self.notes.append(f"rank {rank}, from inside: {said}")
        dumps = [load_dump(path) for path in sorted(self.hang.glob(f"rank*-device*{SUFFIX}"))]
        for config in dict.fromkeys(dump.image.config for dump in dumps):
            images = {dump.rank: dump.image for dump in dumps if dump.image.config == config}
            seen = {rank: read_counters(image) for rank, image in images.items()}
            if any(image.is_troubled for image in images.values()):
                self.is_in_trouble = True
                self.explanation = find_culprit(seen, config.num_ranks)
            for rank, counters in seen.items():
                self.words.setdefault(rank, []).append(describe_seen(counters, images))

    def _may_answer(self, rank: int) -> bool:
        return processes.is_alive(self.alive[rank]) and not answer_file(self.folder, rank).exists()

    # --- texts ---------------------------------------------------------------------------------------------------

    def write_texts(self) -> None:
        self._write_summary([])  # enough to find the cause, should the rest not be finished
        stacks = self._python_stacks()
        native = {rank: self._native_stack(key) for rank, key in self.alive.items()}
        ranks = sorted({*self.trouble.ranks, *self.words})
        for rank in ranks:
            process = rank if rank in self.trouble.ranks else 0  # virtual ranks share one
            own = process == rank
            log = log_file(self.folder, process).name
            parts = [
                f"rank {rank}: {self._process_words(process)}, log {log}",
                *self._sections("fault", _fault_text(self.folder, process) if own else ""),
                *self._sections("counters", "\n\n".join(self.words.get(rank, ["not read"]))),
                *self._sections("Python stacks", stacks[process] if own else f"see rank{process}.txt"),
                *self._sections("native stack", native.get(process, "the process is gone") if own else ""),
                *self._sections(f"last lines of {log} before that", self._log_tail(process) if own else ""),
            ]
            (self.hang / f"rank{rank}.txt").write_text("\n".join(parts) + "\n", errors="replace")
        self._write_summary([f"rank{rank}.txt" for rank in ranks])
        told = {"why": self.trouble.why, "explanation": self.explanation}
        write_whole(self.hang / SUMMARY_JSON, json.dumps(told))

    @staticmethod
    def _sections(title: str, text: str) -> list[str]:
        return [f"--- {title}", text] if text else []

    def _write_summary(self, files: list[str]) -> None:
        facts = [
            f"explained because: {self.trouble.why}",
            f"verdict: {self.explanation}",
            *self.notes,
            *(f"rank {rank}: {self._process_words(rank)}" for rank in self.trouble.ranks),
        ]
        dumps = sorted(path.name for path in self.hang.glob(f"*{DUMP_SUFFIX}"))
        facts.append(f"saved buffers: {', '.join(dumps) or 'none'} (megamoe inspect {self.hang})")
        facts.append("a rank each: " + ", ".join(files) if files else "this bundle was not finished")
        (self.hang / SUMMARY_TEXT).write_text("\n".join(facts) + "\n", errors="replace")

    def _process_words(self, rank: int) -> str:
        key = self.trouble.ranks[rank]
        return f"pid {key.pid}" if rank in self.alive else f"pid {key.pid}, gone"

    def _python_stacks(self) -> dict[int, str]:
        """What faulthandler wrote into the logs of the ranks that were asked."""
        until = time.monotonic() + min(STACKS_WAIT_S, self.left())
        stacks: dict[int, str] = {}
        while True:
            for rank, offset in self.trouble.asked.items():
                stacks[rank] = _appended(log_file(self.folder, rank), offset)
            if all("thread 0x" in text.lower() for text in stacks.values()) or time.monotonic() > until:
                break
            time.sleep(0.02)
        for rank in self.trouble.ranks:
            if not stacks.get(rank):
                why = "asked, no answer" if rank in self.trouble.asked else "gone, or no handler for SIGUSR1"
                stacks[rank] = f"none: {why}"
        return stacks

    def _log_tail(self, rank: int) -> str:
        """What the rank said before it was asked for its stacks."""
        log = log_file(self.folder, rank)
        try:
            with log.open("rb") as file:
                end = self.trouble.asked.get(rank, file.seek(0, os.SEEK_END))
                file.seek(max(0, end - LOG_BYTES))
                lines = file.read(min(end, LOG_BYTES)).decode(errors="replace").splitlines()
        except OSError as error:
            return f"(not read: {error})"
        return "\n".join(lines[-LOG_LINES:]) or "(empty)"

    def _native_stack(self, key: ProcessKey) -> str:
        program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if program is None:
            return "py-spy is not installed (pip install py-spy)"
        seconds = min(NATIVE_SECONDS, self.left(NATIVE_SHARE))
        if seconds <= 0:
            return "the time was over"
        command = [program, "dump", "--native", "--pid", str(key.pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"py-spy took longer than {seconds:.1f} s"
        return done.stdout.rstrip() or f"py-spy: {done.stderr.strip()}"


def _holds_buffers(pid: int) -> bool:
    folder = PROC / str(pid) / "fd"
    try:
        return any(os.readlink(folder / name).startswith(BUFFER_LINK) for name in os.listdir(folder))
    except OSError:  # it closes files, or is gone
        return False


def _appended(log: Path, offset: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(offset)
            return file.read(LOG_BYTES).decode(errors="replace").rstrip()
    except OSError:
        return ""


def _fault_text(folder: Path, rank: int) -> str:
    try:
        return fault_file(folder, rank).read_text(errors="replace")
    except OSError:
        return ""


def announce_fault(text: str) -> None:
    """Called in a rank: have the supervisor explain the step, and wait until it has, but not long. Does nothing in a
    process that no supervisor started.

    Args:
        text: the fault that aborted the group, in words.
    """
    if processes.STEP_ID_VARIABLE not in os.environ:
        return
    folder = Path(os.environ["MEGAMOE_RUN_DIR"])
    write_whole(fault_file(folder, int(os.environ.get("RANK", "0"))), text)
    until = time.monotonic() + FAULT_WAIT_S
    while time.monotonic() < until and not (folder / HANG_FOLDER / SUMMARY_JSON).exists():
        time.sleep(0.02)


def answer_file(folder: Path, rank: int) -> Path:
    """What a rank on a GPU says of its buffers once it has saved them, or that it could not."""
    return folder / HANG_FOLDER / f"rank{rank}.answer"


def read_launch_facts(folder: Path, config: MegaMoEConfig) -> LaunchFacts | None:
    """What the ranks' last launch of a config was asked to do; None where they did not say."""
    from megamoe.inspect.dump import LaunchFacts

    found: LaunchFacts | None = None
    for path in sorted(folder.glob(launch_file(Path(), 0).name.replace("0", "*"))):
        with suppress(OSError, LookupError, TypeError, ValueError):  # what a script wrote may be anything
            said = json.loads(path.read_text())
            if said["config"] != dataclasses.asdict(config):
                continue
            facts = LaunchFacts.parse(said["facts"])
            found = found or facts
            if dataclasses.replace(facts, windows=found.windows) == found:  # each names its own
                found = dataclasses.replace(found, windows={**found.windows, **facts.windows})
    return found
