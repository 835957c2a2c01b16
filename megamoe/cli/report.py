"""What a run prints: where the layer came from, the error, the routes and the times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from megamoe.reference import Comparison

_WIDTH = 120
_INDENT = " " * 10


@dataclass
class StageClock:
    """Seconds spent under each name, in order of first use."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


def slowest(clocks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The longest time of each stage over the processes of a run."""
    return {name: max(seconds[name] for seconds in clocks if name in seconds) for clock in clocks for name in clock}


def format_facts(facts: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name:<{len(_INDENT)}}{value}" for name, value in facts]


def format_shards(opened: Sequence[Sequence[str]], num_shards: int) -> list[str]:
    """How many shards each process opened (one entry where all ranks are in one process)."""
    counts = ", ".join(
        f"{len(shards)}" if len(opened) == 1 else f"rank {rank}: {len(shards)}" for rank, shards in enumerate(opened)
    )
    return format_facts([("shards", f"{counts} of {num_shards} opened")])


def format_error(comparison: Comparison) -> str:
    if comparison.num_elements == 0:
        return "no tokens, nothing to compare"
    row = "" if comparison.max_row_error is None else f", worst row {comparison.max_row_error:.2e}"
    row_bound = "" if comparison.row_bound is None else f" (bound {comparison.row_bound:.0e})"
    verdict = "ok" if comparison.ok else f"FAILED: {comparison.message}"
    whole = f"y against the oracle, norm-wise {comparison.max_error:.2e} (bound {comparison.bound:.0e})"
    return f"{whole}{row}{row_bound}: {verdict}"


def format_routes(histogram: Tensor) -> list[str]:
    """Routes of each owner and expert. ``histogram``: int64 [num_ranks, num_experts], routes from each source rank."""
    num_ranks, num_experts = histogram.shape
    lines = []
    for owner, block in enumerate(histogram.view(num_ranks, num_ranks, -1).unbind(1)):
        per_expert = block.sum(0).tolist()
        first = owner * (num_experts // num_ranks)
        sources = " + ".join(str(count) for count in block.sum(1).tolist())
        used = sum(count > 0 for count in per_expert)
        title = f"rank {owner} owns experts {first} to {first + len(per_expert) - 1}: "
        title += f"{sum(per_expert)} routes (from ranks {sources}) to {used} experts"
        lines += format_facts([("routes" if owner == 0 else "", title)])
        lines += _wrap([f"{first + local}: {count}" for local, count in enumerate(per_expert) if count])
    return lines


def format_times(name: str, seconds: Mapping[str, float]) -> list[str]:
    cells = [f"{stage} {value:.4f} s" if value < 1 else f"{stage} {value:.2f} s" for stage, value in seconds.items()]
    return format_facts([(name, ", ".join(cells))])


def _wrap(cells: Sequence[str]) -> list[str]:
    width = max((len(cell) for cell in cells), default=0) + 2
    per_line = max(1, (_WIDTH - len(_INDENT) - 2) // width)
    rows = [cells[start : start + per_line] for start in range(0, len(cells), per_line)]
    return [f"{_INDENT}  " + "".join(cell.rjust(width) for cell in row) for row in rows]
