"""What a run shows: a live table on a terminal, plain lines elsewhere. Both end with the same summary."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.plan import Plan, Step
from harness.rank import log_file
from harness.results import FAILING, STATUSES, BuildResult, StepResult, kept_words

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "timed out": "bold red",
    "flaky": "bold magenta",
    "blocked": "yellow",
    "skipped": "cyan",
    "running": "bold",
}
PLAIN_TAIL_LINES = 12
PLAIN_TAILS = 3


class Display(Protocol):
    """What the runner tells while it goes."""

    def say(self, text: str) -> None: ...
    def begin(self, plan: Plan) -> None: ...
    def running(self, step: Step, attempt: int, elapsed_s: float) -> None: ...
    def finished(self, result: StepResult) -> None: ...
    def end(self) -> None: ...


def _ranks_words(step: Step) -> str:
    if step.group == "single":
        return "1 rank"
    return f"{step.num_ranks} ranks {step.group}" if step.num_ranks > 1 else f"1 rank {step.group}"


def step_words(step: Step) -> str:
    """``phase 3 l1_gemm, host, 8 ranks virtual``."""
    return f"phase {step.spec.number} {step.spec.name}, {step.target}, {_ranks_words(step)}" + " (gate)" * step.is_gate


def _figures_words(result: StepResult) -> str:
    if result.step.kept_from:
        return kept_words(result.step)
    if result.outcome is None:
        return ""
    return f"{result.seconds:.1f} s, {result.num_cases} cases, peak {result.peak_pss_bytes / 2**20:.0f} MiB"


def _one_line(text: str, width: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def printable(text: str) -> str:
    """Without characters that control: what a step logged must not clear, recolour or turn around (as U+202E does) the
    terminal of who reads it."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t" else c for c in text
    )


class PlainDisplay:
    """One line a step as it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def begin(self, plan: Plan) -> None:
        num_skipped = sum(bool(step.skip_reason) for step in plan.steps)
        num_kept = sum(bool(step.kept_from) for step in plan.steps)
        parts = [f"{len(plan.steps)} steps"]
        parts += [f"{num_skipped} of them cannot run here"] * bool(num_skipped)
        parts += [f"{num_kept} of them passed before and are kept"] * bool(num_kept)
        phases = ", ".join(map(str, plan.phases))
        self.say(f"target {plan.target} ({plan.target_reason}); phases {phases}; {', '.join(parts)}")

    def running(self, step: Step, attempt: int, elapsed_s: float) -> None:
        """Nothing: a log needs no clock."""

    def finished(self, result: StepResult) -> None:
        words = [f"{result.status:9}", step_words(result.step), _figures_words(result)]
        if result.reasons:
            words.append(_one_line("; ".join(result.reasons), 160))
        self.say("  ".join(word for word in words if word))

    def end(self) -> None:
        """Nothing is held open."""


class LiveDisplay:
    """A table of all steps that follows the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, tuple[Step, str, str]] = {}
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4)

    def say(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def begin(self, plan: Plan) -> None:
        self.say(f"target {plan.target} ({plan.target_reason})")
        self._rows = {step.name: (step, "", "") for step in plan.steps}
        self._live.start()

    def running(self, step: Step, attempt: int, elapsed_s: float) -> None:
        repeat = f", run {attempt} of {step.repeat}" * (step.repeat > 1)
        self._rows[step.name] = (step, "running", f"{elapsed_s:.0f} of {step.seconds:g} s{repeat}")

    def finished(self, result: StepResult) -> None:
        words = _figures_words(result) if not result.reasons else _one_line("; ".join(result.reasons), 80)
        self._rows[result.step.name] = (result.step, result.status, words)

    def end(self) -> None:
        if self._live.is_started:
            self._live.refresh()
            self._live.stop()

    def _visible(self) -> list[tuple[Step, str, str]]:
        """All rows where they fit, else the ones around the last that has begun."""
        rows = list(self._rows.values())
        room = max(5, self._console.height - 6)
        begun = max((i for i, row in enumerate(rows) if row[1]), default=0)
        first = max(0, min(begun - room // 2, len(rows) - room))
        return rows[first : first + room]

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("phase", "ranks", "status", ""):
            table.add_column(heading, no_wrap=heading != "")
        for step, status, words in self._visible():
            name = f"{step.spec.number} {step.spec.name}" + " (gate)" * step.is_gate
            table.add_row(name, _ranks_words(step), Text(status, STYLES.get(status, "")), Text(words))
        return table


def make_display(console: Console, *, plain: bool) -> Display:
    return PlainDisplay(console) if plain or not console.is_terminal else LiveDisplay(console)


def plan_table(plan: Plan) -> Table:
    """The plan as ``harness plan`` prints it."""
    table = Table(box=None, pad_edge=False)
    for heading in ("phase", "target", "ranks", "limit", "note"):
        table.add_column(heading)
    for step in plan.steps:
        notes = ["gate"] * step.is_gate + [kept_words(step)] * bool(step.kept_from)
        note = f"skipped: {step.skip_reason}" if step.skip_reason else ", ".join(notes)
        phase = f"{step.spec.number} {step.spec.name}"
        table.add_row(phase, step.target, _ranks_words(step), f"{step.seconds:g} s", Text(note))
    return table


def count_words(statuses: Sequence[str], num_kept: int) -> str:
    """``20 passed, 3 failed (1 timed out, 1 flaky), 3 blocked``. Failed counts whatever failed in any way; passed and
    failed are always there, the rest where there is some."""
    counts = {status: statuses.count(status) for status in STATUSES}
    kinds = ", ".join(f"{counts[status]} {status}" for status in ("timed out", "flaky") if counts[status])
    kept = f" ({num_kept} kept from earlier runs)" * bool(num_kept)
    failed = f"{sum(counts[s] for s in FAILING)} failed" + f" ({kinds})" * bool(kinds)
    parts = [f"{counts['passed']} passed{kept}", failed]
    parts += [f"{counts[status]} {status}" for status in ("blocked", "skipped") if counts[status]]
    return ", ".join(parts)


def phase_line(phase: str, statuses: Sequence[str], *, num_kept: int, seconds: float, peak_bytes: int) -> str:
    """``phase 3 l1_gemm: 5 passed, 0 failed; 40.1 s, peak 300 MiB a step``."""
    figures = f"{seconds:.1f} s, peak {peak_bytes / 2**20:.0f} MiB a step"
    return f"phase {phase}: {count_words(statuses, num_kept)}; {figures}"


def _count_words(results: Sequence[StepResult]) -> str:
    return count_words([result.status for result in results], sum(bool(result.step.kept_from) for result in results))


def _phase_line(results: Sequence[StepResult]) -> str:
    spec = results[0].step.spec
    return phase_line(
        f"{spec.number} {spec.name}",
        [result.status for result in results],
        num_kept=sum(bool(result.step.kept_from) for result in results),
        seconds=sum(result.seconds for result in results),
        peak_bytes=max(result.peak_pss_bytes for result in results),
    )


def _show_failure(display: Display, result: StepResult, with_tail: bool) -> None:
    status = result.status.upper()
    reason = _one_line("; ".join(result.reasons))
    display.say(f"{status} {step_words(result.step)}: {reason} | logs: {result.folder} | see it again: {result.again}")
    if with_tail and result.log_tails:
        broken = result.outcome.broken_ranks if result.outcome is not None else ()
        names = [log_file(Path(), rank).name for rank in broken] + list(result.log_tails)
        name = next(name for name in names if name in result.log_tails)
        lines = result.log_tails[name].splitlines()[-PLAIN_TAIL_LINES:]
        display.say("\n".join(f"    {name}: {line}" for line in lines))


def show_summary(
    display: Display,
    results: Sequence[StepResult],
    builds: Sequence[BuildResult],
    leftovers: Sequence[str],
    folder: Path,
) -> None:
    """A line a phase, a line a failure, skips by reason, and a closing count."""
    for number in dict.fromkeys(result.step.spec.number for result in results):
        display.say(_phase_line([result for result in results if result.step.spec.number == number]))
    for build in builds:
        if build.status != "passed":
            display.say(f"BUILD of target {build.target} {build.status}: {'; '.join(build.reasons)}\n{build.log_tail}")
    failing = [result for result in results if result.is_failing]
    for index, result in enumerate(failing):
        _show_failure(display, result, with_tail=isinstance(display, PlainDisplay) and index < PLAIN_TAILS)
    for status in ("blocked", "skipped"):
        reasons = [reason for result in results if result.status == status for reason in result.reasons]
        for reason in dict.fromkeys(reasons):
            display.say(f"{status} {reasons.count(reason)}: {reason}")
    for text in leftovers:
        display.say(f"LEFT BEHIND: {text}")
    display.say(f"results: {folder} (report.html)")
    display.say(_count_words(results))
