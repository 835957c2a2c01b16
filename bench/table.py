"""``python -m bench table FILE.json ...``: this checkout beside its peer, in one short table, from what runs have left.

A file is written again after every row, so that a run cut short has its rows here too. A ratio is the layer's time over
that of the peer (deep_gemm) in the same row; the last lines say which of `MUSTS` hold.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.report import Row, contender_name

OURS, PEER = "megamoe", "deep_gemm"
MOST_TIMES_PEER = 1.05


@dataclass(frozen=True)
class Must:
    """A figure that issue 3 asks for, of sustained calls with deepseek-v3 on two GPUs."""

    words: str
    accumulate: str
    tokens: int
    tflops: float = 0.0
    us: float = float("inf")

    def holds(self, row: Row) -> bool:
        return (row.tflops or 0.0) >= self.tflops and (row.us or float("inf")) <= self.us


MUSTS = (
    Must("at least 850 TFLOP/s", "fp32", 8192, tflops=850.0),
    Must("at least 900 TFLOP/s", "fast", 8192, tflops=900.0),
    Must("at most 430 us", "fp32", 128, us=430.0),
    Must("at most 430 us", "fast", 128, us=430.0),
)


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of several files.

    Raises:
        ValueError: a file that no run of the benchmark has written; names it.
    """
    known = {field.name for field in fields(Row)}
    rows = []
    for path in paths:
        try:
            found = json.loads(path.read_text())["rows"]
            rows += [Row(**{name: value for name, value in row.items() if name in known}) for row in found]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a file of python -m bench moe: {error!r}") from error
    return rows


def peer_table(rows: Sequence[Row]) -> list[str]:
    """A line for each shape, routing, regime and token count: microseconds, TFLOP/s and the ratio to the peer."""
    timed = [row for row in rows if row.us is not None and row.skipped is None]
    names = list(dict.fromkeys(contender_name(row) for row in timed))
    groups: dict[tuple[str, str, str, int], dict[str, Row]] = {}
    for row in timed:
        groups.setdefault((row.shape, row.routing, row.regime, row.tokens), {})[contender_name(row)] = row
    lines = [" | ".join([f"{'us and TFLOP/s a rank':36}", *names, "ratios to the peer"])]
    for (shape, routing, regime, tokens), found in groups.items():
        cells = [(_cell(found[name]) if name in found else "-").rjust(len(name)) for name in names]
        peer = next((row.us for row in found.values() if row.contender.startswith(PEER)), None)
        ratios = [
            f"{row.us / peer:.3f}{'  SLOWER' if row.us / peer > MOST_TIMES_PEER else ''}"
            for row in found.values()
            if peer and row.us and row.contender.startswith(OURS)
        ]
        lines.append(f"{shape:11} {routing[:8]:8} {regime:9} {tokens:5d} | {' | '.join([*cells, '  '.join(ratios)])}")
    skipped = {(contender_name(row), row.skipped) for row in rows if row.skipped is not None}
    return lines + [f"skipped: {name}: {reason}" for name, reason in sorted(skipped)]


def _cell(row: Row) -> str:
    return f"{row.us:8.1f} {row.tflops:5.0f}"


def must_lines(rows: Sequence[Row]) -> list[str]:
    """Whether each of MUSTS holds, or that its row is not there."""
    lines = []
    for must in MUSTS:
        of_row = ("deepseek-v3", "balanced", "sustained", must.tokens, must.accumulate, OURS)
        found = [
            row
            for row in rows
            if (row.shape, row.routing, row.regime, row.tokens, row.accumulate, row.contender) == of_row
            and row.us is not None
        ]
        what = f"7168/2048 top-8, T = {must.tokens}, {must.accumulate}, sustained: {must.words}"
        if not found:
            lines.append(f"NOT MEASURED  {what}")
            continue
        row = found[-1]
        lines.append(f"{'holds' if must.holds(row) else 'MISSED':13} {what}: {_cell(row).strip()}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 printed, 2 a bad call."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        rows = read_rows(map(Path, arguments))
    except ValueError as error:
        print(f"bench table: {error}", file=sys.stderr)
        return 2
    print("\n".join([*peer_table(rows), *must_lines(rows)]))
    return 0
