"""Judges a step by what its script recorded and by how it ended.

The script (rank 0) writes one JSON object a line, as it goes:

- ``{"kind": "case", "case", "ok", "seconds", "message"}``, with ``"skipped": reason`` for one that does not apply here;
- ``{"kind": "view", "case", "view", "compared", "wrong", "max_error", "bound", "ok"}``, with ``"expect_empty": true``
  where comparing nothing is meant, and ``"map"`` where it was the worst so far (phases/support/error_maps.py);
- ``{"kind": "figure", "name", "value", "unit"}``; ``{"kind": "dump", "path"}``; last ``{"kind": "end", "ok"}``.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.jsonlines import read_json_lines
from harness.outcome import Outcome
from harness.plan import Step
from harness.rank import DUMP_SUFFIX

RECORD_FILE = "record.jsonl"
MAX_MAP_EDGE = 64


def _is_text(value: object) -> bool:
    """Without the lone surrogates that JSON allows and no file takes."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: object) -> bool:
    """That fits a float: JSON's integers have no end."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_map(value: object) -> bool:
    """An error map that a report can draw: a rectangle of at most 64 x 64 numbers, and elements in words."""
    if not isinstance(value, dict) or not all(_is_count(value.get(side)) for side in ("rows", "columns")):
        return False
    cells, worst = value.get("cells"), value.get("worst")
    if not isinstance(cells, list) or not isinstance(worst, list) or not 0 < len(cells) <= MAX_MAP_EDGE:
        return False
    if not all(
        isinstance(line, list) and 0 < len(line) <= MAX_MAP_EDGE and len(line) == len(cells[0]) for line in cells
    ):
        return False
    return (
        all(_is_number(cell) and math.isfinite(cell) for line in cells for cell in line)
        and all(isinstance(item, dict) and _is_text(item.get("where")) for item in worst)
        and _is_text(value.get("unit"))
    )


_Fields = Mapping[str, Callable[[object], bool]]
_FIELDS: Mapping[str, _Fields] = {
    "case": {"case": _is_text, "ok": _is_flag},
    "view": {"case": _is_text, "view": _is_text, "compared": _is_count, "wrong": _is_count, "ok": _is_flag},
    "figure": {"name": _is_text, "value": _is_number},
    "dump": {"path": _is_text},
    "end": {"ok": _is_flag},
}
_OPTIONAL: _Fields = {
    "message": _is_text,
    "skipped": _is_text,
    "seconds": _is_number,
    "max_error": _is_number,
    "bound": _is_number,
    "expect_empty": _is_flag,
    "map": _is_map,
}
"""May be null too."""


@dataclass(frozen=True)
class ViewTotal:
    """All checks of one view in a step, added up."""

    compared: int
    wrong: int
    max_error: float
    num_checks: int
    map: Mapping[str, Any] | None = None
    """Of the worst comparison that has one: its error map with the case, what it was compared with, the bound."""


@dataclass(frozen=True)
class Verdict:
    """``passed``, ``failed``, ``timed out`` or ``skipped``, why, and what the record holds.

    ``reasons`` is empty exactly for passed. ``failed_cases`` is empty when no single case is to blame.
    """

    status: str
    reasons: tuple[str, ...]
    failed_cases: tuple[str, ...]
    num_cases: int
    skipped_cases: Mapping[str, str]
    views: Mapping[str, ViewTotal]
    figures: tuple[Mapping[str, Any], ...]
    dumps: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """A step's record by kind of line. ``problem`` says what in the file could not be read."""

    cases: tuple[Mapping[str, Any], ...]
    views: tuple[Mapping[str, Any], ...]
    figures: tuple[Mapping[str, Any], ...]
    dumps: tuple[str, ...]
    end_ok: bool | None
    problem: str = ""


def _problem_of(line: Mapping[str, Any]) -> str:
    kind = str(line.get("kind"))
    if kind not in _FIELDS:
        return f"record line of unknown kind {kind[:60]!a}; there are {', '.join(_FIELDS)}"
    missing = [field for field in _FIELDS[kind] if field not in line]
    if missing:
        return f"record line of kind {kind} without {', '.join(missing)}: {dict(line)!a}"
    strange = [field for field, is_right in _FIELDS[kind].items() if not is_right(line[field])]
    strange += [f for f, is_right in _OPTIONAL.items() if line.get(f) is not None and not is_right(line[f])]
    return f"record line of kind {kind} with a strange {', '.join(strange)}: {dict(line)!a}"[:400] if strange else ""


def read_record(path: Path) -> Record:
    """What the script wrote, as far as it came."""
    try:
        lines = read_json_lines(path)
    except ValueError as error:
        return Record((), (), (), (), None, problem=str(error))
    problem = next((text for line in lines if (text := _problem_of(line))), "")
    if problem:
        return Record((), (), (), (), None, problem=problem)

    def of(kind: str) -> tuple[Mapping[str, Any], ...]:
        return tuple(line for line in lines if line["kind"] == kind)

    end_ok = bool(lines[-1]["ok"]) if lines and lines[-1]["kind"] == "end" else None
    dumps = tuple(str(line["path"]) for line in of("dump"))
    return Record(of("case"), of("view"), of("figure"), dumps, end_ok)


def _total(checks: Sequence[Mapping[str, Any]]) -> ViewTotal:
    errors = [float(check.get("max_error") or 0.0) for check in checks]
    return ViewTotal(
        compared=sum(int(check["compared"]) for check in checks),
        wrong=sum(int(check["wrong"]) for check in checks),
        max_error=math.nan if any(math.isnan(e) for e in errors) else max(errors, default=0.0),
        num_checks=len(checks),
        map=_worst_map(checks),
    )


def badness(ok: bool, error: float, bound: float) -> tuple[bool, float]:
    """By which comparisons of a view are ordered: a failure is worse than any pass, then by the error in its bound."""
    return not ok, math.inf if math.isnan(error) else error / bound if bound else error


def _worst_map(checks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    mapped = [check for check in checks if check.get("map")]
    if not mapped:
        return None
    worst = max(
        mapped,
        key=lambda check: badness(check["ok"], float(check.get("max_error") or 0.0), float(check.get("bound") or 0.0)),
    )
    about = {name: worst.get(name) for name in ("case", "against", "max_error", "bound", "ok")}
    return {**worst["map"], **about}


def _ending_reasons(outcome: Outcome) -> list[str]:
    reasons = []
    if outcome.message:
        reasons.append(outcome.message)
    if outcome.end == "exited" and outcome.exit_code != 0:
        first = f"; rank {outcome.broken_ranks[0]} ended first" if outcome.broken_ranks else ""
        reasons.append(f"exit code {outcome.exit_code}{first}")
    if outcome.bundle and (outcome.end != "exited" or outcome.exit_code != 0):
        reasons.append(f"hang bundle {outcome.bundle}: {outcome.explanation}")
    if outcome.left_behind:
        reasons.append("left behind, and ended by the harness: " + "; ".join(outcome.left_behind))
    if outcome.survivors:
        reasons.append("COULD NOT BE ENDED: " + "; ".join(outcome.survivors))
    if outcome.removed_files and outcome.end == "exited":
        reasons.append("left files behind, removed by the harness: " + ", ".join(outcome.removed_files))
    if outcome.held_memfds:
        reasons.append("its shared memory is still held: " + "; ".join(outcome.held_memfds))
    return reasons


def _saved_views_reasons(record: Record) -> list[str]:
    """What to call to see which view of the first failure is wrong."""
    saved = [Path(path).parent for path in record.dumps if Path(path).suffix == DUMP_SUFFIX]
    return [f"more: python -m megamoe.cli diff {shlex.quote(str(folder))} --oracle" for folder in saved[:1]]


def _is_of_case(line: Mapping[str, Any], case: str) -> bool:
    """Whether a line belongs to a listed case: by its name, or as a variant ``case[...]`` or ``case/...``."""
    name = str(line["case"])
    return name == case or name.startswith((case + "[", case + "/"))


def _failed_case_reasons(record: Record) -> list[str]:
    return [f"case {line['case']}: {line.get('message') or 'failed'}" for line in record.cases if not line["ok"]]


def _missing_case_reasons(step: Step, record: Record) -> list[str]:
    wanted = step.cases if step.cases is not None else step.spec.cases
    missing = [case for case in wanted if not any(_is_of_case(line, case) for line in record.cases)]
    return [f"case {case} was not run" for case in missing]


def _view_reasons(step: Step, record: Record) -> list[str]:
    reasons = []
    for check in record.views:
        where = f"case {check['case']}, view {check['view']}"
        if not check["ok"]:
            error, bound = check.get("max_error"), check.get("bound")
            reasons.append(
                f"{where}: {check['wrong']} of {check['compared']} elements wrong, max error {error}, bound {bound}"
            )
        elif check["compared"] == 0 and not check.get("expect_empty"):
            reasons.append(f"{where}: compared 0 elements (a check that means to says expect_empty)")
    for view in step.spec.views:
        checks = [check for check in record.views if check["view"] == view]
        is_narrowed = step.cases is not None  # to some cases, which need not touch every view
        if is_narrowed and all(check.get("expect_empty") for check in checks):
            continue
        if sum(check["compared"] for check in checks) == 0:
            reasons.append(f"view {view}: compared 0 elements in the whole step")
    return reasons


def _end_reasons(record: Record) -> list[str]:
    if record.problem:
        return [record.problem]
    if record.end_ok is None:
        return ["the record has no end: the script stopped early"]
    return [] if record.end_ok else ["the record ends with ok: false"]


def _all_skipped(record: Record) -> str:
    """The reason when every case said that it does not apply here."""
    if record.cases and all(line.get("skipped") for line in record.cases):
        return "; ".join(sorted({str(line["skipped"]) for line in record.cases}))
    return ""


def judge(step: Step, outcome: Outcome, record: Record) -> Verdict:
    """Passed iff the command ended with 0 and left nothing, the record ends with ok and has no failed line, every
    asked-for case was run, and every view listed in spec.yaml was compared."""
    reasons = _ending_reasons(outcome)
    if outcome.end == "exited":
        reasons += _failed_case_reasons(record) + _view_reasons(step, record)
        reasons += _missing_case_reasons(step, record) + _end_reasons(record)
    else:
        done = [str(line["case"]) for line in record.cases]
        reasons.append(f"{len(done)} cases were done" + (f", the last was {done[-1]}" if done else ""))
        reasons += _failed_case_reasons(record)
    if reasons:
        position = len(_ending_reasons(outcome))
        reasons[position:position] = _saved_views_reasons(record)
    status = "timed out" if outcome.end == "timed out" else "failed" if reasons else "passed"
    skipped = _all_skipped(record)
    if skipped and not _ending_reasons(outcome) and not _end_reasons(record) and outcome.end == "exited":
        status, reasons = "skipped", [skipped]
    bad = [line for line in (*record.cases, *record.views) if not line["ok"]]
    failed_cases = [case for case in step.spec.cases if any(_is_of_case(line, case) for line in bad)]
    return Verdict(
        status=status,
        reasons=tuple(reasons),
        failed_cases=tuple(failed_cases),
        num_cases=len(record.cases),
        skipped_cases={str(line["case"]): str(line["skipped"]) for line in record.cases if line.get("skipped")},
        views={
            name: _total([check for check in record.views if check["view"] == name])
            for name in dict.fromkeys(str(check["view"]) for check in record.views)
        },
        figures=record.figures,
        dumps=record.dumps,
    )
