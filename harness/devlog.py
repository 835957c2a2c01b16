"""An entry of DEVLOG.md from a run's results and git, and a check that a draft's figures come from results.

What only a person knows is left as ``<...>``.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.display import printable
from harness.earlier import EarlierRun, read_run
from harness.git import GitError, run_git
from harness.jsonlines import read_sound_lines
from harness.plan import BadRequest
from harness.report import TEMPLATES, number_of, phase_words, summary_lines
from harness.results import FAILING, RESULTS_FILE, RUN_FILE

DEVLOG_FILE = "DEVLOG.md"
MARK = "[no result]"


@dataclass(frozen=True)
class Change:
    """Files of one folder that differ from the parent, in words: ``plan.py``, ``keys.py (new)``."""

    folder: str
    files: tuple[str, ...]


def _git(checkout: Path, *arguments: str) -> str:
    """What git prints. Raises BadRequest where it fails."""
    try:
        return run_git(checkout, *arguments)
    except GitError as error:
        raise BadRequest(str(error)) from error


def find_parent(checkout: Path) -> str:
    """The commit that this work began from: the last one that changed DEVLOG.md, else the first one there is."""
    last = _git(checkout, "log", "-1", "--format=%H", "--", DEVLOG_FILE).strip()
    return last or _git(checkout, "rev-list", "--max-parents=0", "HEAD").split()[-1]


_STATES = {"A": " (new)", "D": " (gone)"}


def changes_since(checkout: Path, parent: str) -> list[Change]:
    """What differs from ``parent``, committed or not, new files that git does not ignore among it."""
    found: dict[str, str] = {}
    fields = _git(checkout, "diff", "--name-status", "--no-renames", "-z", parent).split("\0")
    for state, name in zip(fields[0::2], fields[1::2], strict=False):
        found[name] = _STATES.get(state, "")
    untracked = _git(checkout, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    found |= {name: _STATES["A"] for name in untracked if name}
    folders: dict[str, list[str]] = {}
    for name in sorted(found):
        folder, _, file = name.rpartition("/")
        if name != DEVLOG_FILE:
            folders.setdefault(folder or ".", []).append(file + found[name])
    return [Change(folder, tuple(files)) for folder, files in folders.items()]


def _phase_rows(run: EarlierRun) -> list[tuple[str, str]]:
    """(what was run, what came of it) of each phase."""
    lines = list(run.lines.values())
    rows = []
    for number in dict.fromkeys(line.get("phase") for line in lines):
        own = [line for line in lines if line.get("phase") == number]
        of_ranks: dict[Any, list[str]] = {}
        for line in own:
            of_ranks.setdefault(line.get("ranks"), []).append(str(line.get("group")))
        ranks = ", ".join(
            f"{n} ({' and '.join(groups)})" if groups != ["single"] else f"{n}" for n, groups in of_ranks.items()
        )
        name, _, came = phase_words(own).partition(": ")
        rows.append((f"{name}, {own[0].get('target')}, ranks {ranks}", came))
    return rows


def _largest_errors(run: EarlierRun) -> list[str]:
    """For each view with an error: the comparison that is closest to its bound, or furthest beyond it."""
    worst: dict[str, tuple[float, str]] = {}
    for line in run.lines.values():
        for view, total in (line.get("views") or {}).items():
            found = total.get("map") or {}
            error, bound = number_of(found.get("max_error")), number_of(found.get("bound"))
            if bound and error / bound > worst.get(view, (0.0, ""))[0]:
                words = f"{view} {error:.3g} (bound {bound:.3g}, phase {line.get('phase')}, {found.get('case')})"
                worst[view] = (error / bound, words)
    return [words for _, words in worst.values()]


def _problems(run: EarlierRun) -> list[str]:
    problems = []
    for name, line in run.lines.items():
        if line.get("status") in (*FAILING, "blocked", "skipped"):
            reason = " ".join("; ".join(map(str, line.get("reasons") or ())).split())
            problems.append(f"{name} {line.get('status')}: {reason[:300]}")
    return problems


def _machine_words(run: EarlierRun) -> str:
    machine: Mapping[str, Any] = run.facts.get("machine") or {}
    gpus = [str(gpu.get("name")) for gpu in machine.get("gpus") or ()]
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    memory = number_of(machine.get("memory_bytes")) / 2**30
    parts = [f"{machine.get('hostname')}: {machine.get('num_cores')} cores, {memory:.0f} GiB", *counted]
    return ", ".join([*parts, f"Python {machine.get('python_version')}", f"torch {machine.get('torch_version')}"])


def write_entry(run: EarlierRun, checkout: Path) -> str:
    """The entry as Markdown. Raises BadRequest where ``checkout`` is no git checkout."""
    parent = find_parent(checkout)
    environment = Environment(  # Markdown: nothing to escape
        loader=FileSystemLoader(TEMPLATES), autoescape=False, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("devlog.md.j2").render(
        now=time.strftime("%Y-%m-%d %H:%M"),
        parent=_git(checkout, "log", "-1", "--format=%h (%s)", parent).strip(),
        commits=_git(checkout, "log", "--reverse", "--format=%h %s", f"{parent}..HEAD").splitlines(),
        changes=changes_since(checkout, parent),
        run=run.folder.name,
        commit=run.facts.get("commit"),
        machine=_machine_words(run),
        command=" ".join(map(str, run.facts.get("command") or ())),
        count=summary_lines(run)[-1],
        rows=_phase_rows(run),
        errors=_largest_errors(run),
        problems=[printable(text) for text in _problems(run)],
    )


# --- figures of a draft ------------------------------------------------------------------------------------------

_NO_FIGURE = re.compile(
    r"`[^`]*`"  # code
    r"|\d{4}-\d\d-\d\d(?:T[\d:.-]+)?|\b\d\d?:\d\d(?::\d\d)?\b"  # dates and times
    r"|\b(?:issues?|items?|phases?|Python|torch|CUDA|NVRTC|driver|g\+\+|T =)\s+\d[\d.]*(?:(?:,| and| to)\s+\d[\d.]*)*",
    re.IGNORECASE,
)
_FIGURE = re.compile(r"(?<![\w.,#/-])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w/]|\.\d)")
_LEFT_OUT = ("cells", "worst", "log_tails", "log_tail", "key", "environment")
"""Of results: so many numbers that any figure would be among them."""


@dataclass(frozen=True)
class Unheld:
    """A figure that no result holds. ``line`` counts from 1."""

    line: int
    figure: str
    text: str


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(text.replace(",", "")) for text in _FIGURE.findall(value))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _LEFT_OUT:
                yield from _numbers(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _numbers(item)


def held_figures(folders: Sequence[Path]) -> list[float]:
    """Every number that results hold, counts and sums of the summary among them, bytes in MiB and GiB too; sorted.

    folders: of runs, and of others that hold JSON files, such as what ``python -m bench`` leaves.
    """
    held: set[float] = set()
    for folder in folders:
        for path in folder.glob("*.json"):
            with suppress(OSError, ValueError, RecursionError):  # a file that was being written when its run ended
                held.update(_numbers(json.loads(path.read_text())))
        held.update(_numbers(read_sound_lines(folder / RESULTS_FILE)))
        if (folder / RUN_FILE).is_file():
            run = read_run(folder)
            held.update(_numbers(summary_lines(run)))
            held.add(sum(number_of(line.get("seconds")) for line in run.lines.values()))
    held.update([value / 2**power for value in held if value >= 2**20 for power in (20, 30)])
    return sorted(value for value in held if math.isfinite(value))


def _is_held(figure: str, held: Sequence[float]) -> bool:
    """Whether a number rounds to the figure as it is written."""
    text = figure.replace(",", "")
    mantissa, _, exponent = text.partition("e")
    decimals = len(mantissa.partition(".")[2])
    half = 0.5 * 10.0 ** (int(exponent or 0) - decimals)
    value = float(text)
    return any(abs(known - value) <= half * (1 + 1e-9) for known in held)


def check_draft(draft: str, held: Sequence[float]) -> tuple[str, list[Unheld]]:
    """The draft with ``[no result]`` behind each figure that no result holds, and those figures.

    Code, dates, times and numbers of issues, items and versions are not figures; headings have none.
    """
    marked, unheld, in_code = [], [], False
    for number, line in enumerate(draft.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if in_code or line.startswith(("#", "    ", "```")):
            marked.append(line)
            continue
        hidden = _NO_FIGURE.sub(lambda match: "\0" * len(match[0]), line)
        parts, end = [], 0
        for match in _FIGURE.finditer(hidden):
            if not _is_held(match[0], held):
                parts += [line[end : match.end()], MARK]
                end = match.end()
                unheld.append(Unheld(number, match[0], line.strip()))
        marked.append("".join([*parts, line[end:]]))
    return "\n".join(marked) + "\n", unheld
