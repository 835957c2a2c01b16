"""Rows of a benchmark: the table on the terminal, the JSON file and the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.floors import Floor, Load, Machine
from bench.shapes import Shape
from bench.timing import Timing


@dataclass(frozen=True)
class Row:
    """One figure, or the reason why there is none (``skipped``).

    Attributes:
        tflops: of each rank's own routes, 6 * tokens * topk * hidden * intermediate, over the time.
        weights_gb_s: bytes of the experts that received a route, on the busiest GPU, over the time.
        floor_us: the least time the machine allows; ``binds`` says by what.
        floor_percent: the floor over the time.
        y_error: norm-wise difference of y from the first contender's, on the same fp8 tokens; None: it is the first.
    """

    contender: str
    accumulate: str
    combine: str
    shape: str
    hidden: int
    intermediate: int
    topk: int
    ranks: int
    gpus: int
    group: str
    experts_per_rank: int
    routing: str
    tokens: int
    regime: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    tflops: float | None = None
    weights_gb_s: float | None = None
    floor_us: float | None = None
    binds: str | None = None
    floor_percent: float | None = None
    repetitions: int = 0
    calls: int = 0
    host_us: float | None = None
    y_error: float | None = None
    skipped: str | None = None


def figures(shape: Shape, tokens: int, load: Load, floor: Floor, timing: Timing) -> dict[str, float | int | str]:
    """The columns of a row that follow from its time."""
    return {
        "us": timing.us,
        "low_us": timing.low_us,
        "high_us": timing.high_us,
        "tflops": tokens * shape.topk * shape.route_flops / timing.us * 1e-6,
        "weights_gb_s": load.weight_bytes / timing.us * 1e-3,
        "floor_us": floor.us,
        "binds": floor.binds,
        "floor_percent": 100 * floor.us / timing.us,
        "repetitions": timing.repetitions,
        "calls": timing.calls,
        "host_us": timing.host_us,
    }


HEADER = (
    f"{'T':>5} {'regime':9} {'contender':24} {'acc':5} {'comb':5} {'us':>8} {'p10':>8} {'p90':>8} "
    f"{'TFLOP/s':>7} {'GB/s':>5} {'%floor':>6} {'binds':10} {'host':>5} {'y err':>7}"
)


def format_row(row: Row) -> str:
    """One line of at most 130 characters, unless the reason of a skip is longer."""
    start = f"{row.tokens:5d} {row.regime:9} {row.contender[:24]:24} {row.accumulate[:5]:5} {row.combine[:5]:5} "
    if row.us is None or row.skipped is not None:
        return f"{start}skipped: {row.skipped}"
    error = "" if row.y_error is None else f"{row.y_error:.1e}"
    return (
        f"{start}{row.us:8.1f} {row.low_us:8.1f} {row.high_us:8.1f} {row.tflops:7.1f} {row.weights_gb_s:5.0f} "
        f"{row.floor_percent:6.1f} {row.binds:10} {row.host_us:5.0f} {error:>7}"
    )


def contender_name(row: Row) -> str:
    """With accumulation and combine type: ``megamoe fp32/bf16``."""
    return f"{row.contender} {row.accumulate}/{row.combine}"


def compact_table(rows: Sequence[Row]) -> list[str]:
    """Microseconds of every contender side by side: a line for each shape, routing, regime and token count."""
    names = list(dict.fromkeys(contender_name(row) for row in rows if row.us is not None))
    lines = [f"{chr(ord('A') + index)} = {name}" for index, name in enumerate(names)]
    found: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for row in rows:
        if row.us is not None:
            key = (row.shape, row.routing, row.regime, row.tokens)
            found.setdefault(key, {})[contender_name(row)] = row.us
    for (shape, routing, regime, tokens), times in found.items():
        cells = [f"{times[name]:9.1f}" if name in times else f"{'-':>9}" for name in names]
        lines.append(f"{shape:12} {routing:8} {regime:9} {tokens:5d} us: {''.join(cells)}")
    return lines


def write_json(path: Path, machine: Machine, facts: dict[str, object], rows: Sequence[Row]) -> None:
    """Everything of a run; written again after every row, so that a run cut short leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"facts": facts, "machine": asdict(machine), "rows": [asdict(row) for row in rows]}, indent=1)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


def draw_roofline(path: Path, machine: Machine, rows: Sequence[Row]) -> str | None:
    """A picture: TFLOP/s over operations per byte of touched weights. Returns why there is none, or None."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    timed = [row for row in rows if row.us and row.tflops and row.weights_gb_s]
    if not timed:
        return "no picture: nothing was timed"
    names = list(dict.fromkeys((row.shape, row.contender, row.accumulate, row.regime, row.routing) for row in timed))
    reached: list[float] = []
    for name in names:
        mine = [row for row in timed if (row.shape, row.contender, row.accumulate, row.regime, row.routing) == name]
        points = sorted((1e3 * (row.tflops or 0) / (row.weights_gb_s or 1), row.tflops or 0) for row in mine)
        reached += [x for x, _ in points]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=" ".join(name))
    edges = [min(reached) / 2, 1e3 * machine.dense_tflops / machine.hbm_gb_s, max(max(reached) * 2, 1000.0)]
    axes.plot(
        edges, [min(machine.dense_tflops, x * machine.hbm_gb_s * 1e-3) for x in edges], color="black", label="roofline"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations of a rank's tokens per byte of touched weights")
    axes.set_ylabel("TFLOP/s a rank")
    axes.set_title(machine.name)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return None
