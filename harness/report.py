"""``report.html`` of a run: one file that needs nothing else, written from run.json, results.jsonl and the logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.display import count_words, phase_line, printable
from harness.earlier import EarlierRun, read_run, step_name
from harness.hang import HANG_FOLDER, SUMMARY_TEXT
from harness.jsonlines import read_sound_lines
from harness.pictures import legend_picture, map_picture
from harness.record import badness
from harness.results import FAILING, RESULTS_FILE, STATUSES, log_tails

REPORT_FILE = "report.html"
TEMPLATES = Path(__file__).resolve().parent / "templates"
_LONG_LOG = (400, 1 << 16)
_SHORT_LOG = (30, 1 << 13)
"""Lines and bytes of each log's end: of a step that failed, and of any other."""
_FIGURES_SHOWN = 40
_WORDS_SHOWN = 400
_PICTURE_EDGE = 160
_ALLOWED = {"bound": "the bound", "norm": "the mean that the norm allows"}
_MEASURES = {"norm": "; a norm: parts may be beyond it", "differ": "; colours count elements that differ"}


@dataclass(frozen=True)
class ErrorMap:
    """A picture and what it shows. ``worst``: elements in words, the worst first."""

    picture: str
    width: int
    height: int
    about: str
    worst: tuple[str, ...]


@dataclass(frozen=True)
class ViewRow:
    """What came of one view in a step, or in all steps of a phase."""

    name: str
    compared: int
    wrong: int
    error: str
    step: str
    map: ErrorMap | None


@dataclass(frozen=True)
class StepBlock:
    """One step as the page shows it. ``verdict``: of its hang bundle, or empty."""

    name: str
    phase: int
    title: str
    column: str
    status: str
    css: str
    note: str
    seconds: float
    limit_s: float
    peak_mib: int
    verdict: str
    reasons: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    views: tuple[ViewRow, ...]
    logs: tuple[tuple[str, str], ...]

    @property
    def is_failing(self) -> bool:
        return self.status in FAILING


@dataclass(frozen=True)
class PhaseBlock:
    """The steps of one phase, by column of the table."""

    number: int
    name: str
    line: str
    cells: Mapping[str, StepBlock]
    views: tuple[ViewRow, ...]


def number_of(value: object) -> float:
    """Of results.jsonl, where nan and inf are text."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0


def _short(value: object) -> str:
    return f"{number_of(value):.3g}"


def _times(value: float) -> str:
    return f"{value:,.0f} times" if value >= 100 else f"{value:.3g} times"


def _column_words(line: Mapping[str, Any]) -> str:
    ranks = int(number_of(line.get("ranks")))
    group = "" if line.get("group") == "single" else f" {line.get('group')}"
    return f"{line.get('target')}, {ranks} rank{'s' * (ranks != 1)}{group}"


def _error_words(total: Mapping[str, Any]) -> str:
    """Of the comparison nearest to its bound, or furthest beyond it: the map's. A view may have several bounds, so that
    its largest error alone says little. Without a map: the largest."""
    found = total.get("map")
    if not number_of(total.get("max_error")):
        return "0" if total.get("wrong") == 0 else _short(total.get("max_error"))
    bound = number_of(found.get("bound")) if found else 0.0
    if not found or not bound:
        return _short(total.get("max_error"))
    return f"{_short(found.get('max_error', total.get('max_error')))} (bound {bound:.3g})"


def _error_map(found: Mapping[str, Any] | None) -> ErrorMap | None:
    if not found:
        return None
    cells, unit = found["cells"], str(found["unit"])
    height, width = len(cells), len(cells[0])
    size = f"{found['rows']} rows × {found['columns']} columns"
    where = f"case {found.get('case')}, rank {found.get('rank')}, against {found.get('against')}"
    worst = []
    for item in found["worst"]:
        error = f", {_times(number_of(item.get('error')))} {_ALLOWED[unit]}" if unit in _ALLOWED else ""
        worst.append(f"{item['where']}: got {item.get('got')}, expected {item.get('expected')}{error}")
    scale = max(1, _PICTURE_EDGE // max(width, height))
    return ErrorMap(
        picture=map_picture(cells, unit),
        width=width * scale,
        height=height * scale,
        about=f"{where}; {size}{_MEASURES.get(unit, '')}",
        worst=tuple(printable(text)[:_WORDS_SHOWN] for text in worst),
    )


def _view_rows(line: Mapping[str, Any]) -> tuple[ViewRow, ...]:
    return tuple(
        ViewRow(
            name=str(name),
            compared=int(number_of(total.get("compared"))),
            wrong=int(number_of(total.get("wrong"))),
            error=_error_words(total),
            step=step_name(line),
            map=_error_map(total.get("map")),
        )
        for name, total in (line.get("views") or {}).items()
    )


def _badness(line: Mapping[str, Any], view: str) -> tuple[bool, float]:
    total = line["views"][view]
    found = total.get("map") or {}
    error = number_of(found.get("max_error", total.get("max_error")))
    return badness(int(number_of(total.get("wrong"))) == 0, error, number_of(found.get("bound")))


def _phase_views(lines: Sequence[Mapping[str, Any]]) -> tuple[ViewRow, ...]:
    """Each view over all steps of a phase: sums, and the map of the step that is worst."""
    names = dict.fromkeys(name for line in lines for name in line.get("views") or {})
    rows = []
    for name in names:
        having = [line for line in lines if name in (line.get("views") or {})]
        worst = max(having, key=lambda line: _badness(line, name))
        (shown,) = [row for row in _view_rows(worst) if row.name == name]
        totals = [line["views"][name] for line in having]
        compared = sum(int(number_of(total.get("compared"))) for total in totals)
        wrong = sum(int(number_of(total.get("wrong"))) for total in totals)
        rows.append(ViewRow(name, compared, wrong, shown.error, shown.step, shown.map))
    return tuple(rows)


def _logs(run_folder: Path, line: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What explains a hang, and logs: from the step's folder below this one (the line has it as the machine of the run
    names it), else what the line has."""
    parts = Path(str(line.get("folder"))).parts
    below = parts[parts.index(run_folder.name) + 1 :] if run_folder.name in parts else (step_name(line),)
    folder = run_folder.joinpath(*below)
    lines, size = _LONG_LOG if line.get("status") in FAILING else _SHORT_LOG
    found = log_tails(folder, max_lines=lines, max_bytes=size) or line.get("log_tails") or {}
    explained = folder / HANG_FOLDER / SUMMARY_TEXT
    if explained.is_file():
        with explained.open("rb") as file:
            found = {f"{HANG_FOLDER}/{SUMMARY_TEXT}": file.read(_LONG_LOG[1]).decode(errors="replace"), **found}
    return tuple((str(name), printable(str(text))) for name, text in found.items())


def _step_facts(line: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    skipped = line.get("skipped_cases") or {}
    figures = [f"{f.get('name')} {f.get('value')} {f.get('unit') or ''}".rstrip() for f in line.get("figures") or ()]
    more = f", and {len(figures) - _FIGURES_SHOWN} more" if len(figures) > _FIGURES_SHOWN else ""
    facts = {
        "see it again": line.get("again"),
        "attempts": ", ".join(line.get("attempts") or ()),
        "failed cases": ", ".join(line.get("failed_cases") or ()),
        "cases that do not apply": "; ".join(f"{case}: {why}" for case, why in skipped.items()),
        "figures": ", ".join(figures[:_FIGURES_SHOWN]) + more,
        "dumps": ", ".join(line.get("dumps") or ()),
        "folder": line.get("folder"),
    }
    return tuple((name, printable(str(value))) for name, value in facts.items() if value)


def _step_block(run_folder: Path, line: Mapping[str, Any]) -> StepBlock:
    status = str(line.get("status"))
    kept = line.get("kept_from")
    return StepBlock(
        name=step_name(line),
        phase=int(number_of(line.get("phase"))),
        title=f"phase {line.get('phase')} {line.get('name')}, {_column_words(line)}"
        + " (gate)" * bool(line.get("is_gate")),
        column=_column_words(line),
        status=status,
        css="kept" if kept else status.replace(" ", "-") if status in STATUSES else "failed",
        note=f"kept from run {kept}" if kept else "gate" if line.get("is_gate") else "",
        seconds=number_of(line.get("seconds")),
        limit_s=number_of(line.get("limit_s")),
        peak_mib=round(number_of(line.get("peak_pss_bytes")) / 2**20),
        verdict=printable(str((line.get("outcome") or {}).get("explanation") or "")),
        reasons=tuple(printable(str(reason)) for reason in line.get("reasons") or ()),
        facts=_step_facts(line),
        views=_view_rows(line),
        logs=_logs(run_folder, line),
    )


def _phase_blocks(run: EarlierRun) -> list[PhaseBlock]:
    lines = list(run.lines.values())
    blocks = []
    for number in dict.fromkeys(line.get("phase") for line in lines):
        own = [line for line in lines if line.get("phase") == number]
        steps = [_step_block(run.folder, line) for line in own]
        cells = {step.column: step for step in steps}
        name = str(own[0].get("name"))
        blocks.append(PhaseBlock(steps[0].phase, name, phase_words(own), cells, _phase_views(own)))
    return blocks


def phase_words(lines: Sequence[Mapping[str, Any]]) -> str:
    """The line of the terminal's summary for one phase, from results.jsonl."""
    return phase_line(
        f"{lines[0].get('phase')} {lines[0].get('name')}",
        [str(line.get("status")) for line in lines],
        num_kept=sum(bool(line.get("kept_from")) for line in lines),
        seconds=sum(number_of(line.get("seconds")) for line in lines),
        peak_bytes=int(max(number_of(line.get("peak_pss_bytes")) for line in lines)),
    )


def summary_lines(run: EarlierRun) -> list[str]:
    """A line a phase, and the count."""
    lines = list(run.lines.values())
    numbers = dict.fromkeys(line.get("phase") for line in lines)
    words = [phase_words([line for line in lines if line.get("phase") == number]) for number in numbers]
    return [*words, _count(lines)]


def _count(lines: Sequence[Mapping[str, Any]]) -> str:
    return count_words([str(line.get("status")) for line in lines], sum(bool(line.get("kept_from")) for line in lines))


def _reasons(
    blocks: Sequence[PhaseBlock], statuses: Sequence[str]
) -> list[tuple[str, tuple[str, ...], list[StepBlock]]]:
    """(status, its reasons, the steps that they hold for), each once."""
    found: dict[tuple[str, tuple[str, ...]], list[StepBlock]] = {}
    for block in blocks:
        for step in block.cells.values():
            if step.status in statuses:
                found.setdefault((step.status, step.reasons), []).append(step)
    return [(status, reasons, steps) for (status, reasons), steps in found.items()]


def _run_facts(run: EarlierRun) -> list[tuple[str, str]]:
    facts, machine = run.facts, run.facts.get("machine") or {}
    gpus = [
        f"{gpu.get('name')} ({'.'.join(map(str, gpu.get('capability') or ()))})" for gpu in machine.get("gpus") or ()
    ]
    memory = f"{number_of(machine.get('memory_bytes')) / 2**30:.0f} GiB"
    packages = (facts.get("toolchain") or {}).get("packages") or {}
    first_lines = {
        name: str((facts.get("toolchain") or {}).get(name) or "").strip() for name in ("c++", "nvcc", "driver")
    }
    rows = {
        "command": " ".join(map(str, facts.get("command") or ())),
        "started": facts.get("started"),
        "finished": facts.get("finished") or "never: the run was ended from outside",
        "exit code": facts.get("exit_code"),
        "target": f"{facts.get('target')} ({facts.get('target_reason')})",
        "commit": f"{facts.get('commit')}" + " (with uncommitted changes)" * str(facts.get("commit")).endswith("+"),
        "machine": f"{machine.get('hostname')}, {machine.get('num_cores')} cores, {memory}",
        "GPUs": ", ".join(gpus) or f"none ({machine.get('problem') or 'torch sees none'})",
        "Python": machine.get("python_version"),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version != "absent"),
        **{name: text.splitlines()[0] for name, text in first_lines.items() if text},
        "folder": run.folder,
    }
    return [(name, printable(str(value))) for name, value in rows.items() if value not in (None, "")]


def _notes(run: EarlierRun) -> list[str]:
    """What pre- and post-flight had to say."""
    before, after = run.facts.get("pre_flight") or {}, run.facts.get("post_flight") or {}
    said = {
        "pre-flight": before.get("warnings"),
        "left behind": after.get("leftovers"),
        "post-flight": after.get("notes"),
    }
    return [printable(f"{label}: {text}") for label, texts in said.items() for text in texts or ()]


def render(run: EarlierRun) -> str:
    """The page. Whatever comes from files is escaped; the page loads nothing."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    blocks = _phase_blocks(run)
    lines = list(run.lines.values())
    steps = [step for block in blocks for step in block.cells.values()]
    builds = [line for line in read_sound_lines(run.folder / RESULTS_FILE) if line.get("kind") == "build"]
    bad_builds = any(build.get("status") != "passed" for build in builds)
    is_whole = run.facts.get("exit_code") is not None
    good = is_whole and not bad_builds and all(step.status in ("passed", "skipped") for step in steps)
    return environment.get_template("report.html.j2").render(
        name=run.folder.name,
        good=good,
        verdict="passed" if good else "failed" if is_whole else "not finished",
        count=_count(lines),
        facts=_run_facts(run),
        notes=_notes(run),
        builds=builds,
        columns=list(dict.fromkeys(step.column for step in steps)),
        phases=blocks,
        steps=steps,
        longest_s=max([step.limit_s for step in steps if step.seconds] or [1.0]),
        problems=_reasons(blocks, FAILING),
        skips=_reasons(blocks, ("blocked", "skipped")),
        legend=legend_picture(),
    )


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` into a run's folder. Raises BadRequest where the folder is no run's."""
    path = folder / REPORT_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(read_run(folder)), encoding="utf-8", errors="replace")
    temporary.replace(path)
    return path
