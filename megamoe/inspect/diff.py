"""Where two runs first differ: view by view in the order of the pipeline, bit by bit where a view is valid.

The comparison with the oracle is `phases.support.oracle_diff`, which has the same answer: a `ViewDifference` a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config import ACCUM_DEBUG_EDGE, INTERLEAVE, MegaMoEConfig, Stage
from megamoe.groups import TARGETS
from megamoe.inspect.dump import Dump
from megamoe.inspect.image import NotSaved
from megamoe.inspect.tensors import extra_tensor, region_tensor, values_of
from megamoe.reference import as_bits

VIEW_STAGES: Mapping[str, Stage] = {
    "x": Stage.INTERFACE,
    "x_sf": Stage.INTERFACE,
    "topk_idx": Stage.INTERFACE,
    "topk_weights": Stage.INTERFACE,
    "expert_recv_count_sum": Stage.DISPATCH,
    "token_src_metadata": Stage.DISPATCH,
    "l1_acts": Stage.DISPATCH,
    "l1_acts_sf": Stage.DISPATCH,
    "l1_topk_weights": Stage.DISPATCH,
    "l1_arrival_count": Stage.DISPATCH,
    "l1_accum_debug": Stage.L1_GEMM,
    "l2_acts": Stage.L1_EPILOGUE,
    "l2_acts_sf": Stage.L1_EPILOGUE,
    "l2_arrival_mask": Stage.L1_EPILOGUE,
    "combine": Stage.L2_GEMM,
    "y": Stage.COMBINE,
}
"""Views in pipeline order: whatever a view is made of comes before it. The stage from which on a launch writes it."""

_ROLES = "csrc/host/roles.hpp"
SOURCES: Mapping[str, tuple[str, str]] = {
    "x": ("megamoe/buffer.py", "csrc/sm90/fill.cu"),
    "x_sf": ("megamoe/buffer.py", "csrc/sm90/fill.cu"),
    "topk_idx": ("megamoe/buffer.py", "csrc/sm90/fill.cu"),
    "topk_weights": ("megamoe/buffer.py", "csrc/sm90/fill.cu"),
    "expert_recv_count_sum": ("csrc/protocol/pool.hpp", "csrc/protocol/pool.hpp"),
    "token_src_metadata": ("csrc/protocol/pull.hpp", "csrc/protocol/pull.hpp"),
    "l1_acts": (_ROLES, "csrc/sm90/roles/row_puller.hpp"),
    "l1_acts_sf": (_ROLES, "csrc/sm90/roles/row_puller.hpp"),
    "l1_topk_weights": ("csrc/protocol/pull.hpp", "csrc/protocol/pull.hpp"),
    "l1_arrival_count": ("csrc/protocol/pull.hpp", "csrc/protocol/pull.hpp"),
    "l1_accum_debug": (_ROLES, "csrc/sm90/roles/products.hpp"),
    "l2_acts": (_ROLES, "csrc/sm90/roles/l1_epilogue.hpp"),
    "l2_acts_sf": (_ROLES, "csrc/sm90/roles/l1_epilogue.hpp"),
    "l2_arrival_mask": ("csrc/protocol/tiles.hpp", "csrc/protocol/tiles.hpp"),
    "combine": (_ROLES, "csrc/sm90/roles/l2_epilogue.hpp"),
    "y": (_ROLES, "csrc/sm90/roles/reduce.hpp"),
}
"""Where to look first: the file that makes each view, for targets host and sm90."""

MAX_RUNS = 4
"""Runs of wrong columns that are listed."""

_INPUTS = ("x", "x_sf", "topk_idx", "topk_weights")
_POOL_ROWS = ("token_src_metadata", "l1_acts", "l1_acts_sf", "l1_topk_weights", "l2_acts", "l2_acts_sf")
_BLOCKS = ("l1_arrival_count", "l2_arrival_mask")


@dataclass(frozen=True)
class ViewDifference:
    """What came of comparing one view on one rank.

    Attributes:
        view, rank: which.
        compared, wrong: elements.
        lines: where it differs first and most, by how much, how far that reaches; empty where nothing differs.
        skipped: why it could not be compared; empty where it was.
    """

    view: str
    rank: int
    compared: int = 0
    wrong: int = 0
    lines: tuple[str, ...] = ()
    skipped: str = ""


def writer_of(dump: Dump, view: str) -> str:
    """The role that writes a view, and its source file where the dump says of which target it is."""
    role = "combine" if view == "y" else dump.image.layout[view].writer
    if dump.facts is None or dump.facts.target not in TARGETS:
        return role
    return f"{role} ({SOURCES[view][TARGETS.index(dump.facts.target)]})"


def last_stage(*dumps: Dump) -> Stage:
    """The last stage that all of the launches reached; a dump that does not say went through all."""
    return min(Stage(dump.facts.stage) if dump.facts is not None else Stage.COMBINE for dump in dumps)


def number_words(view: str, value: Tensor) -> str:
    """One element of a view."""
    if view == "expert_recv_count_sum":
        word = int(value.view(torch.int64))
        return f"{word & 0xFFFFFFFF} routes of epoch {word >> 32}"
    return f"{values_of(value).item():g}"


def extent(wrong: Tensor, first_column: int = 0) -> str:
    """How far wrong elements reach, in words.

    Args:
        wrong: bool [rows] or [rows, columns].
        first_column: number of the first column, in the view that this is a part of.
    """
    rows = wrong.reshape(wrong.shape[0], -1).any(dim=1)
    text = f"{int(wrong.sum())} of {wrong.numel()} elements, in {int(rows.sum())} of {len(rows)} rows"
    if wrong.dim() < 2:
        return text
    columns = wrong.reshape(-1, wrong.shape[-1]).any(dim=0).nonzero().squeeze(1)
    return f"{text}, in {len(columns)} of {wrong.shape[-1]} columns: {runs_words((columns + first_column).tolist())}"


def runs_words(numbers: Sequence[int]) -> str:
    """Ascending numbers as runs: ``8-15, 24-31, 40-47 and 5 more such runs``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs[:MAX_RUNS])
    return words + (f" and {len(runs) - MAX_RUNS} more runs, up to {runs[-1][1]}" if len(runs) > MAX_RUNS else "")


def gate_and_up_words(wrong: Tensor, first_column: int) -> str:
    """Of wrong L1 accumulators: how many columns of each kind. Gate and up alternate in groups of `INTERLEAVE`."""
    columns = wrong.any(dim=0)
    is_up = (torch.arange(first_column, first_column + len(columns)) // INTERLEAVE) % 2 == 1
    gate, up = int(columns[~is_up].sum()), int(columns[is_up].sum())
    return f"of these columns {gate} are gate's (of {int((~is_up).sum())}), {up} are up's (of {int(is_up.sum())})"


class _Side:
    """One rank's dump in a comparison of two."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.config: MegaMoEConfig = dump.image.config
        blocks = region_tensor(dump.image, "pool_blocks").view(torch.int32).long()
        num_blocks = min(dump.image.word("table_ready") & 0xFFFFFFFF, self.config.num_pool_blocks)
        self.blocks = blocks[:num_blocks]
        rows = self.blocks[:, 1]
        broken = ((rows < 0) | (rows > self.config.block_m)).nonzero().flatten().tolist()
        if broken:
            words = f"block {broken[0]} has {int(rows[broken[0]])} rows of {self.config.block_m}"
            raise ValueError(f"{dump.path}: the block table does not make sense: {words}")

    @property
    def num_tokens(self) -> int:
        facts = self.dump.facts
        return facts.num_tokens[self.dump.rank] if facts is not None else self.config.num_max_tokens_per_rank

    @property
    def pool_rows(self) -> Tensor:
        """int64: the pool rows in use, by the block table."""
        block_m = self.config.block_m
        parts = [torch.arange(b * block_m, b * block_m + int(rows)) for b, (_, rows) in enumerate(self.blocks)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    @property
    def named_slots(self) -> Tensor:
        """int64 [n, 2]: (slot, token) of every valid route."""
        ids = region_tensor(self.dump.image, "topk_idx")[: self.num_tokens]
        return ((ids >= 0) & (ids < self.config.num_experts)).T.nonzero()

    def select(self, view: str) -> tuple[Tensor, Tensor]:
        """(the valid part, as bits, rows first; number of each of its rows)."""
        if view == "y":
            if "y" not in self.dump.extras:
                raise NotSaved(f"{self.dump.path.name} does not hold y")
            y = extra_tensor(self.dump.extras["y"])[: self.num_tokens]
            return y, torch.arange(len(y))
        whole = region_tensor(self.dump.image, view)
        if view in _INPUTS:
            return whole[: self.num_tokens], torch.arange(self.num_tokens)
        if view in _POOL_ROWS:
            rows = self.pool_rows
        elif view in _BLOCKS:
            rows = torch.arange(len(self.blocks))
        elif view == "combine":
            slots = self.named_slots
            bits = as_bits(whole)[slots[:, 0], slots[:, 1]].view(whole.dtype)
            return bits, torch.arange(len(slots))
        elif view == "l1_accum_debug":
            rows = self._window_rows() % ACCUM_DEBUG_EDGE
        else:  # expert_recv_count_sum: without its epoch
            return whole.view(torch.int64) & 0xFFFFFFFF, torch.arange(len(whole))
        return as_bits(whole)[rows].view(whole.dtype), rows

    def window(self) -> tuple[int, int] | None:
        facts = self.dump.facts
        return facts.windows.get(self.dump.rank) if facts is not None else None

    def _window_rows(self) -> Tensor:
        window = self.window()
        if window is None:
            raise NotSaved(f"{self.dump.path.name} does not say which window of accumulators it holds")
        rows = self.pool_rows
        return rows[rows // ACCUM_DEBUG_EDGE == window[0]]

    def place(self, view: str, index: Sequence[int], row: int) -> str:
        """An element of `select` in words."""
        words = [f"rank {self.dump.rank}"]
        column = f"column {index[1]}" if len(index) > 1 else ""
        if view in _INPUTS or view == "y":
            words.append(f"token {row}")
        elif view in _POOL_ROWS:
            words.append(self._row_words(row))
        elif view in _BLOCKS:
            words.append(f"expert {self._global(row)}, pool block {row}")
        elif view == "combine":
            slot, token = self.named_slots[index[0]].tolist()
            expert = int(region_tensor(self.dump.image, "topk_idx")[token, slot])
            words.append(f"token {token} slot {slot} (expert {expert} of rank {self.config.rank_of_expert(expert)})")
        elif view == "l1_accum_debug":
            window = self.window()
            assert window is not None  # select saw to it
            words.append(self._row_words(window[0] * ACCUM_DEBUG_EDGE + row))
            column = f"column {window[1] * ACCUM_DEBUG_EDGE + index[1]}"
        else:
            words.append(f"expert {self.dump.rank * self.config.experts_per_rank + row}")
        return ", ".join([*words, column] if column else words)

    def _global(self, block: int) -> int:
        return self.dump.rank * self.config.experts_per_rank + int(self.blocks[block, 0])

    def _row_words(self, pool_row: int) -> str:
        block, row = divmod(pool_row, self.config.block_m)
        source, token, slot = self.dump.image.row("token_src_metadata", pool_row)
        origin = f"rank {source} token {token} slot {slot}"
        return f"expert {self._global(block)}, pool block {block} row {row} = {origin}"


def diff_dumps(first: Mapping[int, Dump], second: Mapping[int, Dump]) -> list[ViewDifference]:
    """Every view that both launches wrote, in pipeline order, each on every rank that both have.

    Raises:
        ValueError: the configs differ in more than output tiles and accumulation, or no rank is in both.
    """
    ranks = sorted(set(first) & set(second))
    if not ranks:
        raise ValueError(f"no rank is in both: {sorted(first)} and {sorted(second)}")
    one, other = vars(first[ranks[0]].image.config), vars(second[ranks[0]].image.config)
    harmless = ("l1_block_n", "l2_block_n", "accumulate")
    differing = [f"{name} {one[name]} and {other[name]}" for name in one if one[name] != other[name]]
    if any(not text.startswith(harmless) for text in differing):
        raise ValueError(f"launches of different layers cannot be compared: {'; '.join(differing)}")
    stage = last_stage(*(group[rank] for group in (first, second) for rank in ranks))
    sides = {rank: (_Side(first[rank]), _Side(second[rank])) for rank in ranks}
    return [
        _diff_view(view, rank, *sides[rank])
        for view, written_from in VIEW_STAGES.items()
        if written_from <= stage
        for rank in ranks
    ]


def _diff_view(view: str, rank: int, one: _Side, other: _Side) -> ViewDifference:
    if view == "l1_accum_debug" and one.window() != other.window():
        return ViewDifference(view, rank, skipped=f"windows {one.window()} and {other.window()}")
    if view == "l2_arrival_mask" and one.config.num_l1_tiles != other.config.num_l1_tiles:
        return ViewDifference(view, rank, skipped="tiles of different widths")
    try:
        (a, rows), (b, _) = one.select(view), other.select(view)
    except NotSaved as missing:
        return ViewDifference(view, rank, skipped=str(missing))
    if a.shape != b.shape:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        return ViewDifference(view, rank, a.numel(), a.numel(), (f"rank {rank}: valid parts of shapes {shapes}",))
    wrong = as_bits(a.contiguous()) != as_bits(b.contiguous())
    if not bool(wrong.any()):
        return ViewDifference(view, rank, a.numel())
    got, want = values_of(a), values_of(b)
    distance = (got - want).abs().nan_to_num(torch.inf) * wrong
    spots = {"first": wrong.nonzero()[0].tolist()}
    spots["most"] = list(torch.unravel_index(distance.argmax(), distance.shape))
    lines = [
        f"{name} at {one.place(view, [int(i) for i in index], int(rows[int(index[0])]))}: "
        f"{got[tuple(index)].item():g} and {want[tuple(index)].item():g}"
        for name, index in spots.items()
    ]
    window = one.window() if view == "l1_accum_debug" else None
    first_column = window[1] * ACCUM_DEBUG_EDGE if window is not None else 0
    lines.append(f"differ: {extent(wrong, first_column)}")
    if window is not None:
        lines.append(gate_and_up_words(wrong, first_column))
    return ViewDifference(view, rank, a.numel(), int(wrong.sum()), tuple(lines))


def describe_differences(found: Sequence[ViewDifference], writers: Mapping[str, str]) -> tuple[list[str], bool]:
    """(a line a view, and of the first that differs everything; whether something differs).

    Args:
        found: in pipeline order.
        writers: by view: the role that writes it.
    """
    lines: list[str] = []
    by_view: dict[str, list[ViewDifference]] = {}
    for item in found:
        by_view.setdefault(item.view, []).append(item)
    first = next((view for view, items in by_view.items() if any(item.wrong for item in items)), None)
    for view, items in by_view.items():
        wrong = [item for item in items if item.wrong]
        skipped = [item for item in items if item.skipped]
        compared = sum(item.compared for item in items)
        if wrong:
            ranks = ", ".join(str(item.rank) for item in wrong)
            count = sum(item.wrong for item in wrong)
            mark = "DIFFERS FIRST" if view == first else "differs"
            lines.append(f"{view:22} {mark}: {count} of {compared} elements, on ranks {ranks}")
        elif skipped:
            lines.append(f"{view:22} not compared: {skipped[0].skipped}")
        else:
            lines.append(f"{view:22} equal: {compared} elements")
    if first is None:
        return lines, False
    lines += ["", f"the first view that differs: {first}, written by: {writers[first]}"]
    before = list(by_view)[: list(by_view).index(first)]
    if before and not any(item.skipped for view in before for item in by_view[view]):
        lines.append("every view before it is right, so what it is made of is: look at what makes it")
    for item in by_view[first]:
        lines += [f"  {line}" for line in item.lines]
    return lines, True
