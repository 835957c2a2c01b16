"""A run on a node (``--node NAME``): copy, verify, start the harness there, show what it says, bring the results here.

One ssh connection stays open from before the copy until the results are here. At its other end is remote_agent.py.
"""

from __future__ import annotations

import base64
import codecs
import json
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from harness.nodes import Node, NodeError, explain_ssh
from harness.results import fresh_folder
from harness.sync import Snapshot, probe, pull, push, snapshot

HELLO_SECONDS = 60.0
VERIFY_SECONDS = 120.0
SILENCE_S = 30.0
BEAT_S = 2.0
STOP_SECONDS = 20.0
MARK = "MEGAMOE-NODE "
ORIGIN_FILE = "from_node.json"
DEFAULT_RUNS_FOLDER = Path("runs")
NO_FOLDER_CODE = 97
MIN_FREE_BYTES = 1 << 20
SENT_MODULES = ("processes", "manifest", "remote_agent")  # each may import those before it
NEEDED_MODULES = ("torch", "numpy", "yaml", "rich", "typer", "psutil", "jinja2")

# Parses on any Python, since it is what tells that the node's is too old.
_BOOTSTRAP = """
import sys
def end(text):
    sys.stdout.write('MEGAMOE-NODE {"kind": "error", "text": "%s"}\\n' % text)
    sys.exit(1)
if sys.version_info < (3, 11):
    end('python is %d.%d, 3.11 or newer is needed: name one as python in nodes.yaml' % tuple(sys.version_info[:2]))
import json, types
line = open(0, 'rb', buffering=0, closefd=False).readline()
if not line.endswith(b'\\n'):
    end('nothing arrives through the exec prefix: it must pass standard input on (docker exec -i)')
order = json.loads(line)
package = sys.modules['harness'] = types.ModuleType('harness')
package.__path__ = []
for name, text in order['modules']:
    module = sys.modules['harness.' + name] = types.ModuleType('harness.' + name)
    setattr(package, name, module)
    exec(compile(text, 'harness/%s.py, sent' % name, 'exec'), module.__dict__)
sys.exit(module.main(order['job']))
"""


class ConnectionLost(Exception):
    """The line to the node broke; the text is what ssh said."""


class Session:
    """The agent on the node, started and spoken to over one ssh connection."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the session)
        self._incoming = b""
        self._heard = self._sent = time.monotonic()
        try:
            self._ssh = subprocess.Popen(
                node.inside(node.python, "-u", "-c", _BOOTSTRAP),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C here must not cut the line over which the stop goes
            )
        except FileNotFoundError as error:
            raise NodeError("ssh is not on PATH here: install it (Debian: openssh-client)") from error

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without its standard input the agent ends."""
        if self._ssh.stdin is not None:
            self._ssh.stdin.close()
        try:
            self._ssh.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        self._errors.close()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _write(self, data: bytes) -> None:
        self._sent = time.monotonic()
        try:
            while data and self._ssh.stdin is not None:
                data = data[self._ssh.stdin.write(data) :]
        except BrokenPipeError as error:
            raise ConnectionLost(self.errors()) from error

    def give_up(self, why: str) -> ConnectionLost:
        """Cut a line whose other end does not answer."""
        self._ssh.kill()
        return ConnectionLost(why)

    def send(self, kind: str, **fields: Any) -> None:
        self._write(MARK.encode() + json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def messages(self, seconds: float) -> list[dict[str, Any]]:
        """What has arrived, after ``seconds`` at most. Raises ConnectionLost."""
        assert self._ssh.stdout is not None
        if time.monotonic() - self._sent > BEAT_S:
            self.send("beat")
        ready, _, _ = select.select([self._ssh.stdout], [], [], seconds)
        if not ready:
            if time.monotonic() - self._heard > SILENCE_S:
                raise self.give_up(f"nothing was heard for {SILENCE_S:g} s")
            return []
        data = self._ssh.stdout.read(1 << 16)
        if not data:
            raise ConnectionLost(self.errors())
        self._heard = time.monotonic()
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]  # what a login shell prints has no mark
        found = [json.loads(text.removeprefix(MARK)) for text in texts if text.startswith(MARK)]
        for message in found:
            if message["kind"] == "error":
                raise NodeError(self._explain_error(message))
        return found

    def _explain_error(self, message: Mapping[str, Any]) -> str:
        text, number = message["text"], message.get("errno")
        if number == 28:
            text = (
                f"no space left for {self.node.folder}: make room there, or name a folder on another disk in nodes.yaml"
            )
        elif number in (13, 30):
            text = (
                f"{text}: the user inside the exec prefix must be able to write {self.node.folder} (docker exec --user)"
            )
        elif number == 2:
            there = f"{self.node.folder}{self.node.inside_words}"
            text = f"{there} is another folder than the one outside: mount that under the same path (docker run -v)"
        elif number is not None:
            text = f"the run could not be looked after ({text})"
        return f"{self.node.words}: {text}"

    def wait_for(self, kind: str, seconds: float) -> dict[str, Any]:
        """The next message of ``kind``. Raises ConnectionLost, or NodeError after ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._heard = time.monotonic()  # the agent sends no sign of life before a run
            for message in self.messages(0.5):
                if message["kind"] == kind:
                    return message
        raise NodeError(f"{self.node.words}: no answer in {seconds:g} s; is it stuck (disk, exec prefix)?")

    def greet(self) -> dict[str, Any]:
        """Start the agent and hear what it finds. Raises NodeError for whatever keeps it from running."""
        folder = Path(__file__).resolve().parent
        modules = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in SENT_MODULES]
        order = {"modules": modules, "job": {"modules": NEEDED_MODULES}}
        try:
            self._write(json.dumps(order).encode() + b"\n")
            return self.wait_for("hello", HELLO_SECONDS)
        except ConnectionLost as error:
            raise NodeError(self._explain_start()) from error

    def _explain_start(self) -> str:
        code = self._ssh.wait()
        errors = self.errors()
        node = self.node
        python, inside = node.python, node.inside_words
        last = (errors.strip().splitlines() or ["nothing was printed"])[-1].strip()
        if code == 255:
            return explain_ssh(node, errors)
        if code == NO_FOLDER_CODE:
            return (
                f"{node.words}: there is no {node.folder}{inside}: mount it there under the same path (docker run -v)"
            )
        if code in (126, 127):
            names = "python and exec_prefix" if node.exec_prefix else "python"
            return f"{node.words}: {python} cannot be started{inside} ({last}); check {names} in nodes.yaml"
        return f"{node.words}: {python} ended with {code}{inside} ({last}); try the same by hand"


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of ending at once: the other side must be told first."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def write_origin(node: Node, run: str, folder: Path) -> None:
    """Says in a local run folder where its results come from, for `fetch`."""
    values = {"node": node.name, "host": node.host, "run": run}
    (folder / ORIGIN_FILE).write_text(json.dumps(values, indent=1) + "\n")


class Follower:
    """Shows and keeps what the run on the node says, until it ends."""

    def __init__(self, node: Node, session: Session, runs_folder: Path, say: Callable[[str], None]) -> None:
        self.folder: Path | None = None
        self.run = ""
        self.last_line = ""
        self._node_folder = ""
        self._node = node
        self._session = session
        self._runs_folder = runs_folder
        self._say = say
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._console = ""

    def follow(self, interrupts: Interrupts) -> dict[str, Any]:
        """The agent's last word. Raises ConnectionLost, also when the node does not stop as told."""
        stop_asked: float | None = None
        while True:
            if interrupts.count and stop_asked is None:
                stop_asked = time.monotonic()
                self._session.send("stop")
                self._say(f"stopping the run on {self._node.words} … (once more: leave it to end by itself)")
            if stop_asked is not None and (interrupts.count > 1 or time.monotonic() - stop_asked > STOP_SECONDS):
                raise self._session.give_up("it did not confirm the stop")
            for message in self._session.messages(0.2):
                if message["kind"] == "end":
                    self._show("\n" * bool(self._console))
                    return message
                self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "run":
            self.run, self._node_folder = message["name"], message["folder"]
            self.folder = fresh_folder(self._runs_folder, self.run)
            write_origin(self._node, self.run, self.folder)
            self._say(f"run {self.run} on {self._node.words}; results and logs: {self.folder}")
        elif message["kind"] == "log":
            data = base64.b64decode(message["data"])
            if message["path"] == "console.log":
                self._show(self._decoder.decode(data))
            elif self.folder is not None:
                self._add(self.folder, message["path"], data)

    def _add(self, folder: Path, name: str, data: bytes) -> None:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise NodeError(f"{self._node.words}: sent a log called {name!r}; is its copy of the harness sound?")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def _show(self, text: str) -> None:
        *lines, self._console = (self._console + text).split("\n")
        for line in lines:
            self.last_line = line.strip() or self.last_line
            self._say(self._for_here(line))

    def _for_here(self, line: str) -> str:
        """The paths and commands that the reader can use on this side."""
        if self.folder is not None:
            line = line.replace(self._node_folder, str(self.folder))
        there = f"python -m harness run --node {self._node.name}{self._node.file_option} "
        return line.replace("python -m harness run ", there)

    @property
    def fetch_command(self) -> str:
        """Brings what there is of this run to where its folder here is, later and by hand."""
        runs = "" if self._runs_folder == DEFAULT_RUNS_FOLDER else f" --runs-dir {shlex.quote(str(self._runs_folder))}"
        return f"python -m harness fetch {self._node.name} {self.run}{self._node.file_option}{runs}"


def _check_hello(node: Node, hello: Mapping[str, Any]) -> None:
    if hello["missing"]:
        raise NodeError(
            f"{node.words}: {node.python} ({hello['python']}) has no {', '.join(hello['missing'])}: install it, "
            "or name another python in nodes.yaml"
        )
    if hello["busy"] is not None:
        raise NodeError(
            f"{node.words}: {node.folder} is in use ({hello['busy'] or 'a run is starting'}); wait for its end, "
            "or name another folder in nodes.yaml"
        )


def _check_copy(node: Node, answer: Mapping[str, Any]) -> None:
    if answer["num_differences"]:
        shown = "; ".join(answer["differences"])
        more = answer["num_differences"] - len(answer["differences"])
        cause = "is another folder mounted there" if node.exec_prefix else "does somebody else write there"
        raise NodeError(
            f"{node.words}: {node.folder}{node.inside_words} is not what was just copied: {shown}"
            + f" and {more} more" * bool(more)
            + f"; {cause}? Nothing was run"
        )


def _environment(node: Node, sent: Snapshot) -> dict[str, str]:
    environment = {"MEGAMOE_COMMIT": sent.commit}
    if node.gpus is not None:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which nvidia-smi counts
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.gpus))
    return environment


def _copy_and_verify(node: Node, session: Session, root: Path, say: Callable[[str], None]) -> Snapshot:
    with snapshot(root) as sent:
        session.send("lock", note=f"copied to and run since {time.strftime('%Y-%m-%d %H:%M:%S%z')}")
        push(node, sent)
        session.send("verify", manifest=dict(sent.manifest))
        _check_copy(node, session.wait_for("verified", VERIFY_SECONDS))
    say(f"{node.words}: {len(sent.manifest)} files of {sent.commit} copied and verified in {node.folder}")
    return sent


def _finish(node: Node, end: Mapping[str, Any], follower: Follower, say: Callable[[str], None]) -> int:
    """Fetch the results and judge how the harness ended."""
    if follower.folder is not None:
        pull(node, follower.run, follower.folder)
    for text in end["left_by_harness"]:
        say(f"{node.words}: ended after the harness: {text}")
    code = int(end["exit_code"])
    is_full = end["free_bytes"] < MIN_FREE_BYTES or "No space left" in end["trouble"]
    if code in (0, 2, 3) or (code == 1 and not is_full and not end["trouble"]):
        return code
    if is_full:
        say(f"{node.words}: no space left for {node.folder}: make room there, or name a folder on another disk")
    elif end["trouble"]:
        say(f"{node.words}: the run's log or state could not be kept ({end['trouble']}); look at the disk there")
    else:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        say(f"{node.words}: the harness there {how}; its last line: {follower.last_line or 'none'}")
    return 1


def run_on_node(node: Node, arguments: Sequence[str], root: Path, runs_folder: Path, say: Callable[[str], None]) -> int:
    """``python -m harness run`` with ``arguments`` on the node, on a copy of the checkout ``root``.

    Returns the exit code of that call; 1 when the line broke, or something went wrong after the run had begun. Results
    come to ``runs_folder``/<time of the node>. Raises NodeError when nothing was run.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # until there is a run to stop: end like Ctrl-C, tidily
        signal.signal(number, signal.default_int_handler)
    probe(node, create=True)
    with Session(node) as session:
        hello = session.greet()
        _check_hello(node, hello)
        follower = Follower(node, session, runs_folder, say)
        try:
            sent = _copy_and_verify(node, session, root, say)
            interrupts = Interrupts()
            order = {"arguments": list(arguments), "manifest": sent.hash, "environment": _environment(node, sent)}
            session.send("run", **order)
            return _finish(node, follower.follow(interrupts), follower, say)
        except NodeError as error:
            if not follower.run:
                raise
            say(f"{error} (what there is of the run: {follower.fetch_command})")
            return 1
        except ConnectionLost as error:
            said = " ".join(str(error).split()) or "ssh ended"
            if not follower.run:
                raise NodeError(f"{node.words}: the connection broke ({said}); try again") from error
            bound = hello["silence_s"] + hello["last_step_s"]
            say(
                f"{node.words}: the connection broke ({said}). The step that runs there is the last; after at most "
                f"{bound:.0f} s nothing runs there. Then: {follower.fetch_command}"
            )
            return 1
