"""A throw-away project for tests of the harness: phase folders with small scripts, and a target that builds nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness import processes
from harness.keys import run_order

REPOSITORY = Path(__file__).resolve().parent.parent

# Every script begins with this: arguments, and functions that write the record (rank 0 only).
PRELUDE = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
for name in ("target", "ranks", "group", "cases", "record"):
    parser.add_argument("--" + name, required=True)
arguments = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
record = open(arguments.record, "a", buffering=1) if rank == 0 else None

def write(kind, **fields):
    if record is not None:
        record.write(json.dumps({"kind": kind, **fields}) + "\\n")

def case(name, ok=True, **fields):
    write("case", case=name, ok=ok, seconds=0.1, **fields)

def view(name, compared=10, wrong=0, ok=True, case="small", **fields):
    write("view", case=case, view=name, compared=compared, wrong=wrong, max_error=0.5, bound=1.0, ok=ok, **fields)

def finish(ok=True):
    write("end", ok=ok)

def pass_all():
    case("small")
    view("x")
    finish()

def daemon(seconds=1000, ignore=()):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in ignore:
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 64)
        time.sleep(seconds)
        os._exit(0)
    os.wait()
"""

PASSING = "pass_all()"


@dataclass(frozen=True)
class HarnessCall:
    """A finished ``python -m harness`` call."""

    code: int
    output: str
    run_folders: tuple[Path, ...]
    """Of the runs there were when it ended, newest last."""

    @property
    def run_folder(self) -> Path:
        return self.run_folders[-1]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / "results.jsonl").read_text().splitlines()]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] == "step"]

    def statuses(self) -> dict[str, str]:
        return {f"{s['phase']}-{s['ranks']}-{s['group']}": s["status"] for s in self.steps()}


class Project:
    """Phase folders below one root, and calls of the harness on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs_folder = root / "runs"
        self.write_target("def build_all(max_ranks):\n    pass\n")

    def write_target(self, text: str, name: str = "host") -> None:
        folder = self.root / "megamoe" / "targets"
        folder.mkdir(parents=True, exist_ok=True)
        (self.root / "megamoe" / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / f"{name}.py").write_text(text)

    def phase(self, number: int, body: str, **fields: Any) -> Path:
        """Phase ``number`` with a script of ``body``; returns the path of its spec.yaml."""
        folder = self.root / "phases" / f"phase{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "script.py").write_text(PRELUDE + textwrap.dedent(body))
        spec = {
            "name": f"toy{number}",
            "stage": "interface",
            "holds": "A sentence.",
            "requires": [],
            "script": "script.py",
            "targets": {"host": {"ranks": {1: ["single"]}}},
            "cases": ["small"],
            "seconds": 60,
            "views": ["x"],
        } | fields
        path = folder / "spec.yaml"
        path.write_text(yaml.safe_dump(spec))
        return path

    def command(self, *arguments: str) -> list[str]:
        places = ["--runs-dir", str(self.runs_folder)]
        if arguments[0] in ("run", "plan", "build"):
            places += ["--phases-root", str(self.root / "phases")]
        return [sys.executable, "-m", "harness", *arguments, *places]

    def environment(self) -> dict[str, str]:
        """Without GPUs, so that a call answers the same on every machine."""
        return {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.root,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *arguments: str) -> HarnessCall:
        with self.start(*arguments) as process:
            output, _ = process.communicate(timeout=120)
        folders = sorted(self.runs_folder.glob("*"), key=lambda folder: run_order(folder.name))
        return HarnessCall(process.returncode, output, tuple(folders))


def processes_in(folder: Path) -> list[str]:
    """All living processes whose environment names a run folder below ``folder``, whoever their parents are."""
    needle = f"MEGAMOE_RUN_DIR={folder}".encode()
    found = []
    for process in processes.all_processes().values():
        try:
            environment = (processes.PROC / str(process.pid) / "environ").read_bytes()
        except OSError:
            continue
        if needle in environment and not process.is_dead:
            found.append(processes.describe(process))
    return found


def wait_until_gone(folder: Path, seconds: float) -> list[str]:
    """The processes still there after ``seconds``, as soon as there are none: []."""
    deadline = time.monotonic() + seconds
    while (found := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
