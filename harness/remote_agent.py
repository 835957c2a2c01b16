"""What runs on the node, inside its exec prefix: holds the folder's lock, verifies the copy, starts the harness there,
streams its logs, and stops it when it is told to or when nobody is there any more.

remote.py sends the source of this module, of processes.py and of manifest.py over ssh, so nothing that lies on the node
is trusted before it is verified. Standard library only. Messages are lines ``MEGAMOE-NODE {json}`` in both directions.

Who is there is known by what arrives on standard input: a line at least every OWNER_SILENCE_S. No pid is remembered
anywhere (inside a prefix it may mean nothing, later it may be another's): a run is going on if its lock is held, and is
stopped by its parent. If this process is killed, the kernel tells the harness below it (parent-death signal).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import manifest, processes

MARK = b"MEGAMOE-NODE "
OWNER_SILENCE_S = 20.0
IDLE_SILENCE_S = 900.0  # before and after a run, while the other side hashes, copies or fetches
LAST_STEP_S = 80.0  # a step takes 60 s at most, and 10 s to be gone
STOP_S = 10.0
TICK_S = 0.1
LOGS_S = 0.5
MAX_WAITING_BYTES = 1 << 20
MAX_STREAMED_BYTES = 1 << 20  # of one rank's log; the rest comes with the results
CHUNK_BYTES = 1 << 16

STATE_FILE = "node.json"
CONSOLE_LOG = "console.log"


class Line:
    """The connection. Never blocks, so that a reader who stands still cannot keep a run from being stopped."""

    def __init__(self) -> None:
        self.is_open = True
        self.last_heard = time.monotonic()
        self._incoming = b""
        self._outgoing = b""
        os.set_blocking(0, False)
        os.set_blocking(1, False)

    @property
    def num_waiting_bytes(self) -> int:
        return len(self._outgoing)

    def send(self, kind: str, **fields: Any) -> None:
        self._outgoing += MARK + json.dumps({"kind": kind, **fields}).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        try:
            while self.is_open and self._outgoing:
                self._outgoing = self._outgoing[os.write(1, self._outgoing[:CHUNK_BYTES]) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Send what waits, and return what has arrived, after ``seconds`` at most."""
        self._write()
        if not self.is_open:
            time.sleep(seconds)
            return []
        select.select([0], [1] if self._outgoing else [], [], seconds)
        try:
            data = os.read(0, CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return []
        self.last_heard = time.monotonic()
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]

    def silent_for(self, seconds: float) -> bool:
        return not self.is_open or time.monotonic() - self.last_heard > seconds


class Lock:
    """One run at a time in a folder. The kernel lets go of it when its last holder has ended, however it did."""

    def __init__(self, folder: Path) -> None:
        path = folder / ".megamoe-node" / "lock"
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except BlockingIOError:
            self.is_held = False

    def holder(self) -> str:
        return os.pread(self.descriptor, 1000, 0).decode(errors="replace")

    def note(self, text: str) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)


class Tails:
    """What was added to a run's logs since the last look."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._sent: dict[str, int] = {}

    def send(self, name: str, path: Path, limit: int | None) -> None:
        begin = self._sent.get(name, 0)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(begin)
            while self._line.num_waiting_bytes < MAX_WAITING_BYTES and (limit is None or begin < limit):
                data = file.read(CHUNK_BYTES)
                if not data:
                    break
                begin += len(data)
                self._line.send("log", path=name, data=base64.b64encode(data).decode())
        self._sent[name] = begin

    def send_all(self, folder: Path) -> None:
        for path in sorted((*folder.rglob("*.log"), folder / "results.jsonl")):
            if path.name != CONSOLE_LOG and not path.is_symlink():
                self.send(str(path.relative_to(folder)), path, MAX_STREAMED_BYTES)


class RemoteRun:
    """The harness as a child of this process, from its start to the moment when nothing of it is left."""

    def __init__(self, folder: Path, line: Line, lock: Lock, order: Mapping[str, Any]) -> None:
        self.line = line
        self.folder = folder
        self.runs = folder / "runs"
        self.before = set(os.listdir(self.runs))
        self.run_folder: Path | None = None
        self.console = folder / ".megamoe-node" / CONSOLE_LOG
        self.tails = Tails(line)
        self.stop_asked: float | None = None
        self.owner_lost: float | None = None
        self.was_killed = False
        self.trouble: OSError | None = None
        self.state = {
            "state": "running",
            "folder": str(folder),
            "manifest": order["manifest"],
            "commit": order["environment"]["MEGAMOE_COMMIT"],
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        processes.become_subreaper()
        with self.console.open("wb") as console:
            self.harness = subprocess.Popen(
                [sys.executable, "-m", "harness", "run", *order["arguments"], "--plain", "--runs-dir", str(self.runs)],
                cwd=folder,
                env={
                    **os.environ,
                    **order["environment"],
                    "PYTHONPATH": str(folder),
                    "PYTHONDONTWRITEBYTECODE": "1",  # the copy stays what was verified
                },
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(
                    lock.descriptor,
                ),  # while the harness lives the folder is taken, whatever comes of this process
                preexec_fn=lambda: processes.set_parent_death_signal(signal.SIGTERM),  # noqa: PLW1509 (one thread)
            )

    def _find_run_folder(self) -> None:
        """The harness names its folder itself; with the lock held, a new one is its own."""
        if self.run_folder is None and (new := sorted(set(os.listdir(self.runs)) - self.before)):
            self.run_folder = self.runs / new[0]
            self.line.send("run", name=new[0], folder=str(self.run_folder))
            self.console = self.console.replace(self.run_folder / CONSOLE_LOG)
            self._write_state()

    def _write_state(self) -> None:
        if self.run_folder is not None:
            temporary = self.run_folder / (STATE_FILE + ".tmp")
            temporary.write_text(json.dumps(self.state, indent=1) + "\n")
            temporary.replace(self.run_folder / STATE_FILE)

    def _signal(self, number: int) -> None:
        """Before it has made its folder the harness may not handle signals yet, and has nothing to tidy up."""
        self.harness.send_signal(number if self.run_folder is not None else signal.SIGTERM)

    def _look_after_stops(self) -> None:
        now = time.monotonic()
        if self.stop_asked is None and self.owner_lost is None and self.line.silent_for(OWNER_SILENCE_S):
            self.owner_lost = now
            self._signal(signal.SIGUSR2)  # the step that runs is the last: what it finds out is worth its seconds
        if self.owner_lost is not None and self.stop_asked is None and now - self.owner_lost > LAST_STEP_S:
            self.ask_to_stop()
        if self.stop_asked is not None and now - self.stop_asked > STOP_S and not self.was_killed:
            self.was_killed = True
            self.harness.kill()

    def ask_to_stop(self) -> None:
        if self.stop_asked is None:
            self.stop_asked = time.monotonic()
            self._signal(signal.SIGINT)

    def watch(self) -> None:
        """Returns when the harness has ended and everything below it is gone."""
        next_logs = 0.0
        while self.harness.poll() is None:
            for message in self.line.wait(TICK_S):
                if message["kind"] == "stop":
                    self.ask_to_stop()
            self._look_after_stops()
            if (now := time.monotonic()) >= next_logs:
                next_logs = now + LOGS_S
                self._tell()
                self.line.send("beat")
        swept = processes.sweep(
            lambda: processes.descendants(os.getpid(), processes.all_processes()), reap=processes.reap_children
        )
        self._end(swept)

    def _tell(self) -> None:
        """A full disk, say, must not keep this process from its watch."""
        try:
            self._find_run_folder()
            self._send_logs()
        except OSError as error:
            self.trouble = self.trouble or error

    def _send_logs(self) -> None:
        if self.line.is_open:
            self.tails.send(CONSOLE_LOG, self.console, None)
            if self.run_folder is not None:
                self.tails.send_all(self.run_folder)

    def _end(self, swept: processes.Sweep) -> None:
        code = self.harness.returncode
        self._tell()
        ended_by = "itself"
        if self.owner_lost is not None:
            ended_by = "a lost connection"
        elif self.stop_asked is not None:
            ended_by = "a stop from outside"
        self.state |= {
            "state": "ended",
            "exit_code": code,
            "ended_by": ended_by,
            "left_by_harness": [*swept.ended, *(f"COULD NOT END {text}" for text in swept.survivors)],
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        try:
            self._write_state()
        except OSError as error:
            self.trouble = self.trouble or error
        give_up = time.monotonic() + STOP_S
        while self.line.is_open and self.line.num_waiting_bytes and time.monotonic() < give_up:
            self.line.wait(TICK_S)
        self._tell()
        trouble = "" if self.trouble is None else str(self.trouble)
        self.line.send("end", **self.state, trouble=trouble, free_bytes=shutil.disk_usage(self.folder).free)


def _hello(folder: Path, job: Mapping[str, Any], lock: Lock) -> dict[str, Any]:
    if not Path("/proc/self").is_symlink() or os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc is not the one of this process: the exec prefix must mount it (unshare --mount-proc)")
    names = sorted((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    return {
        "python": platform.python_version(),
        "missing": [name for name in job["modules"] if importlib.util.find_spec(name) is None],
        "busy": None if lock.is_held else lock.holder(),
        "runs": [path.name for path in names if (path / STATE_FILE).is_file()],
        "silence_s": OWNER_SILENCE_S,
        "last_step_s": LAST_STEP_S + STOP_S,
    }


def _verify(folder: Path, expected: Mapping[str, str], line: Line) -> None:
    found = manifest.differences(expected, folder)
    line.send("verified", files=len(expected), differences=found[:3], num_differences=len(found))


def _serve(folder: Path, job: Mapping[str, Any], line: Line) -> None:
    lock = Lock(folder)
    line.send("hello", **_hello(folder, job, lock))
    while not line.silent_for(IDLE_SILENCE_S):
        for message in line.wait(TICK_S):
            if message["kind"] == "lock":  # a copy is about to be made
                lock.note(message["note"])
            elif message["kind"] == "verify":
                _verify(folder, message["manifest"], line)
            elif message["kind"] == "run" and lock.is_held:
                run = RemoteRun(folder, line, lock, message)
                run.watch()
                if run.owner_lost is not None:  # a line that is silent may stay open for long
                    return


def main(job: Mapping[str, Any]) -> int:
    """Serve one connection in the current folder."""
    line = Line()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):  # already the leader of its session
        os.setsid()
    try:
        _serve(Path.cwd(), job, line)
    except OSError as error:
        line.send("error", text=str(error), errno=error.errno)
        line.wait(1.0)
        return 1
    return 0
