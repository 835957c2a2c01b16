"""Results of a run and the files they go to: results.jsonl (the truth), run.json, junit.xml."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness.outcome import Outcome
from harness.plan import Step
from harness.rank import write_whole
from harness.record import ViewTotal
from harness.supervisor import LAUNCHER_LOG

STATUSES = ("passed", "failed", "timed out", "blocked", "skipped", "flaky")
FAILING = ("failed", "timed out", "flaky")
RESULTS_FILE = "results.jsonl"
RUN_FILE = "run.json"
STOPPED = "the run was stopped"
LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class StepResult:
    """What came of one step. With ``--repeat K`` its figures, views and logs are those of the first attempt that did
    not pass (or the last), and ``attempts`` has the status of each. Durations in seconds, memory in bytes."""

    step: Step
    status: str
    reasons: tuple[str, ...] = ()
    failed_cases: tuple[str, ...] = ()
    num_cases: int = 0
    skipped_cases: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, ViewTotal] = field(default_factory=dict)
    figures: tuple[Mapping[str, Any], ...] = ()
    dumps: tuple[str, ...] = ()
    outcome: Outcome | None = None
    attempts: tuple[str, ...] = ()
    folder: Path | None = None
    log_tails: Mapping[str, str] = field(default_factory=dict)
    again: str = ""
    key: str = ""
    """See keys.py; empty where sources changed while the step ran."""

    @property
    def is_failing(self) -> bool:
        return self.status in FAILING

    @property
    def seconds(self) -> float:
        return self.outcome.seconds if self.outcome is not None else 0.0

    @property
    def peak_pss_bytes(self) -> int:
        return self.outcome.peak_pss_bytes if self.outcome is not None else 0

    def failure_text(self) -> str:
        """Everything that is known about why, log tails included."""
        parts = [*self.reasons, f"see it again: {self.again}" * bool(self.again)]
        if self.folder is not None:
            parts.append(f"logs: {self.folder}")
        parts += [f"--- last lines of {name}\n{text}" for name, text in self.log_tails.items()]
        return "\n".join(part for part in parts if part)


@dataclass(frozen=True)
class BuildResult:
    """What came of building one target, before the steps."""

    target: str
    status: str
    seconds: float
    reasons: tuple[str, ...] = ()
    log_tail: str = ""


def fresh_folder(runs_folder: Path, name: str) -> Path:
    """``runs_folder/name``, made; with a number where a run of that name is here already."""
    for number in range(1, 1000):
        folder = runs_folder.resolve() / (name if number == 1 else f"{name}.{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(f"{runs_folder}: 999 runs are called {name}")


def log_tails(folder: Path, *, max_lines: int = LOG_TAIL_LINES, max_bytes: int = LOG_TAIL_BYTES) -> dict[str, str]:
    """The last lines of the launcher's and of every rank's log; empty logs are left out."""
    of_ranks = [path for path in folder.glob("rank*.log") if re.fullmatch(r"rank[0-9]+", path.stem)]
    paths = [folder / LAUNCHER_LOG, *sorted(of_ranks, key=lambda path: int(path.stem[4:]))]
    tails = {path.name: _last_lines(path, max_lines, max_bytes) for path in paths if path.is_file()}
    return {name: tail for name, tail in tails.items() if tail}


def _last_lines(path: Path, max_lines: int, max_bytes: int) -> str:
    """Reads the end only: a rank that hangs in a loop may have written gigabytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-max_lines:])


def command_to_repeat(step: Step, failed_cases: Sequence[str], seconds: float | None, phases_root: Path | None) -> str:
    """The command that runs this step alone, with only the failed cases when single cases failed."""
    words = ["python", "-m", "harness", "run", "--phases", str(step.spec.number), "--target", step.target]
    words += ["--ranks", str(step.num_ranks)]
    if step.group != "single":
        words += ["--groups", step.group]
    if cases := failed_cases or step.cases:
        words += ["--cases", ",".join(cases)]
    if seconds is not None:
        words += ["--seconds", f"{seconds:g}"]
    if phases_root is not None:
        words += ["--phases-root", str(phases_root)]
    return shlex.join([*words, "--no-gates"])


def exit_code(results: Sequence[StepResult], builds: Sequence[BuildResult], leftovers: Sequence[str]) -> int:
    """0 all asked-for steps passed, 1 something failed, 3 nothing failed but something asked for was skipped."""
    failed = any(result.is_failing or result.status == "blocked" for result in results)
    if failed or leftovers or any(build.status != "passed" for build in builds):
        return 1
    return 3 if any(result.status == "skipped" and not result.step.is_gate for result in results) else 0


def _plain(value: Any) -> Any:
    """For strict JSON: paths and non-finite numbers as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def kept_words(step: Step) -> str:
    """For a step with ``kept_from``."""
    return f"kept from run {step.kept_from}"


def step_line(result: StepResult) -> dict[str, Any]:
    """One line of results.jsonl for a step."""
    step, outcome = result.step, result.outcome
    line = {
        "kind": "step",
        "phase": step.spec.number,
        "name": step.spec.name,
        "stage": step.spec.stage,
        "target": step.target,
        "ranks": step.num_ranks,
        "group": step.group,
        "cases": step.cases or "all",
        "is_gate": step.is_gate,
        "status": result.status,
        "reasons": result.reasons,
        "seconds": round(result.seconds, 3),
        "limit_s": step.seconds,
        "peak_pss_bytes": result.peak_pss_bytes,
        "num_cases": result.num_cases,
        "failed_cases": result.failed_cases,
        "skipped_cases": result.skipped_cases,
        "views": {name: dataclasses.asdict(total) for name, total in result.views.items()},
        "figures": result.figures,
        "dumps": result.dumps,
        "attempts": result.attempts,
        "outcome": dataclasses.asdict(outcome) if outcome is not None else None,
        "folder": result.folder,
        "log_tails": result.log_tails,
        "again": result.again,
        "key": result.key,
        "kept_from": step.kept_from,
    }
    return dict(_plain(line))


def build_line(build: BuildResult) -> dict[str, Any]:
    return {"kind": "build", **dict(_plain(build))}


def flight_line(kind: str, flight: Any) -> dict[str, Any]:
    """``pre_flight`` or ``post_flight`` (harness/flight.py), which stand in run.json too."""
    return {"kind": kind, **dict(_plain(flight))}


def append_line(folder: Path, line: Mapping[str, Any]) -> None:
    """Add one line to results.jsonl, in one write, so that a killed run leaves whole lines."""
    with (folder / RESULTS_FILE).open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def write_run_file(folder: Path, values: Mapping[str, Any]) -> None:
    """run.json: what was asked, the machine, the commit, pre- and post-flight, the exit code."""
    write_whole(folder / RUN_FILE, json.dumps(_plain(values), indent=1, allow_nan=False) + "\n")


def _xml_text(text: str) -> str:
    """Without the control characters that XML forbids (a log may hold any byte)."""
    return re.sub(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]", "?", text)


def write_junit(folder: Path, results: Sequence[StepResult]) -> None:
    """junit.xml: a suite a phase, a case a step; blocked steps count as skipped there, with their reason."""
    root = ElementTree.Element("testsuites")
    for number in dict.fromkeys(result.step.spec.number for result in results):
        of_phase = [result for result in results if result.step.spec.number == number]
        suite = ElementTree.SubElement(root, "testsuite", name=f"phase{number} {of_phase[0].step.spec.name}")
        suite.set("tests", str(len(of_phase)))
        suite.set("failures", str(sum(result.is_failing for result in of_phase)))
        suite.set("skipped", str(sum(result.status in ("skipped", "blocked") for result in of_phase)))
        suite.set("time", f"{sum(result.seconds for result in of_phase):.3f}")
        for result in of_phase:
            step = result.step
            case = ElementTree.SubElement(suite, "testcase", classname=f"phase{number}", name=step.name)
            case.set("time", f"{result.seconds:.3f}")
            reason = _xml_text("; ".join(result.reasons))
            if result.is_failing:
                failure = ElementTree.SubElement(case, "failure", type=result.status, message=reason)
                failure.text = _xml_text(result.failure_text())
            elif step.kept_from:
                ElementTree.SubElement(case, "system-out").text = kept_words(step)
            elif result.status in ("skipped", "blocked"):
                ElementTree.SubElement(case, "skipped", message=f"{result.status}: {reason}")
    tree = ElementTree.ElementTree(root)
    ElementTree.indent(tree)
    tree.write(folder / "junit.xml", encoding="utf-8", xml_declaration=True)
