"""Runs as their files tell them, and what the last one left undone, for ``--rerun failed``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.jsonlines import read_sound_lines
from harness.keys import run_order
from harness.plan import BadRequest, Request, Rerun
from harness.results import FAILING, RESULTS_FILE, RUN_FILE, STOPPED


@dataclass(frozen=True)
class EarlierRun:
    """A run as its files tell it. ``lines``: of results.jsonl, the steps by their names."""

    folder: Path
    facts: Mapping[str, Any]
    lines: Mapping[str, Mapping[str, Any]]


_FACTS: Mapping[str, type] = {"steps": list, "request": dict, "command": list, "machine": dict, "toolchain": dict}
_FACTS = {**_FACTS, "pre_flight": dict, "post_flight": dict}
_STEP: Mapping[str, type] = {
    **dict.fromkeys(("phase", "ranks"), int),
    **dict.fromkeys(("name", "target", "group", "status", "again", "key", "kept_from"), str),
    **dict.fromkeys(("reasons", "failed_cases", "figures", "dumps", "attempts"), list),
    **dict.fromkeys(("skipped_cases", "views", "log_tails", "outcome"), dict),
}


def step_name(line: Mapping[str, Any]) -> str:
    """`Step.name` of a line of results.jsonl."""
    return f"phase{line.get('phase')}-{line.get('target')}-{line.get('ranks')}-{line.get('group')}"


def find_run(runs_folder: Path) -> Path:
    """The folder of the last run of steps (a build alone is none). Raises BadRequest where there is none."""
    folders = [path.parent for path in runs_folder.glob(f"*/{RUN_FILE}")]
    if not folders:
        raise BadRequest(f"{runs_folder}: no run is there (a folder with {RUN_FILE}); --runs-dir names another folder")
    return max(folders, key=lambda folder: run_order(folder.name))


def read_run(folder: Path) -> EarlierRun:
    """Raises BadRequest for a folder that is no run's."""
    try:
        facts = json.loads((folder / RUN_FILE).read_text())
    except FileNotFoundError as error:
        what = f"holds no {RUN_FILE}, so it is no run" if folder.is_dir() else "no such run"
        raise BadRequest(f"{folder}: {what}; left out, it is the last run") from error
    except (OSError, ValueError) as error:
        raise BadRequest(f"{folder}: {RUN_FILE} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise BadRequest(f"{folder}: {RUN_FILE} does not hold an object")
    lines = [line for line in read_sound_lines(folder / RESULTS_FILE) if line.get("kind") == "step"]
    for name, values, kinds in [(RUN_FILE, facts, _FACTS), *((RESULTS_FILE, line, _STEP) for line in lines)]:
        strange = [field for field, kind in kinds.items() if not isinstance(values.get(field), (kind, type(None)))]
        if strange:
            raise BadRequest(f"{folder}: {name} has a strange {', '.join(strange)}: written by another version?")
    return EarlierRun(folder, facts, {step_name(line): line for line in lines})


def left_undone(run: EarlierRun) -> dict[str, Rerun]:
    """By step name: what failed, timed out, was flaky or blocked, or never came to run.

    A flaky step must be tried as often again: one pass would not tell.
    """
    undone = {}
    for name, line in run.lines.items():
        was_stopped = any(str(reason).startswith(STOPPED) for reason in line.get("reasons") or ())
        if line.get("status") in (*FAILING, "blocked") or was_stopped:
            cases = line.get("cases")
            named = tuple(map(str, cases)) if isinstance(cases, list) else None
            undone[name] = Rerun(named, max(1, len(line.get("attempts") or ())))
    for name in run.facts.get("steps") or ():
        if name not in run.lines:  # the harness itself was killed
            undone[str(name)] = Rerun(None, 1)
    return undone


def narrow_to_undone(request: Request, runs_folder: Path) -> Request:
    """The request for what the last run left undone, as that run had it; options given now narrow it further.

    Raises BadRequest where there is no last run, nothing is left undone, or the target is another.
    """
    run = read_run(find_run(runs_folder))
    undone = left_undone(run)
    if not undone:
        raise BadRequest(f"--rerun: nothing failed in the last run, {run.folder}")
    target = str(run.facts.get("target"))
    if request.target not in ("best", target):
        raise BadRequest(f"--rerun: the last run, {run.folder}, was on target {target}, not {request.target}")
    asked = run.facts.get("request")
    before: Mapping[str, Any] = asked if isinstance(asked, dict) else {}

    def now_or_before(name: str) -> Any:
        now, then = getattr(request, name), before.get(name)
        return now if now is not None else tuple(then) if then is not None else None

    return replace(request, target=target, ranks=now_or_before("ranks"), groups=now_or_before("groups"), only=undone)
