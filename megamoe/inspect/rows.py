"""Which rows of a pool block are missing, where they would come from, and whether anybody has gone to fetch them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megamoe.config import ceil_div
from megamoe.inspect.image import Image, NotSaved
from megamoe.layout import ROWS_PER_PULL

PULL_WINDOW = 4
"""``kPullWindow`` of ``csrc/protocol/pull.hpp``: blocks whose runs are claimed side by side."""
MAX_ROWS = 4
"""Missing rows of a block that are named."""


@dataclass(frozen=True)
class PoolState:
    """What the pulls of a rank's launch have come to: blocks as (local expert, rows), and runs of rows claimed."""

    blocks: Sequence[Sequence[int]]
    runs_claimed: int


def rows_per_run(rows_of_first_block: int, block_m: int) -> int:
    """Rows of a pull claim (a run) in a launch: ``rows_per_run`` in ``csrc/protocol/pull.hpp``."""
    return ROWS_PER_PULL // 2 if ROWS_PER_PULL < rows_of_first_block <= block_m // 2 else ROWS_PER_PULL


def run_of_row(block: int, row: int, num_blocks: int, block_m: int, run_rows: int) -> int:
    """The pull claim that covers a row of a block: the inverse of ``pull_run`` in ``csrc/protocol/pull.hpp``."""
    first_block = block // PULL_WINDOW * PULL_WINDOW
    blocks_here = min(PULL_WINDOW, num_blocks - first_block)
    first = first_block * ceil_div(block_m, run_rows)
    return first + row // run_rows * blocks_here + block - first_block


class Origins:
    """Where the rows of one rank's pool come from, as its table and the sources' lists say."""

    def __init__(self, image: Image, peers: Mapping[int, Image]) -> None:
        self._image = image
        self._peers = peers
        self._first_block = image.words("expert_blocks")
        ranks, local = image.config.num_ranks, image.config.experts_per_rank
        prefix, bases = image.words("source_rows"), image.words("route_base")
        self._prefix = [prefix[expert * (ranks + 1) : (expert + 1) * (ranks + 1)] for expert in range(local)]
        self._bases = [bases[source * local : (source + 1) * local] for source in range(ranks)]

    def of_row(self, block: int, expert: int, row: int) -> tuple[int, tuple[int, int] | None]:
        """(source rank, (token, slot)) of a row of a block; None where the source's list cannot be read."""
        config = self._image.config
        of_expert = (block - self._first_block[expert]) * config.block_m + row
        step = bisect_right(self._prefix[expert][:-1], of_expert) - 1
        source = (self._image.rank + step) % config.num_ranks
        if source not in self._peers:
            return source, None
        entry = self._bases[source][expert] + of_expert - self._prefix[expert][step]
        token, slot = self._peers[source].row("route_list", entry)
        return source, (token, slot)


def describe_missing_rows(image: Image, peers: Mapping[int, Image], pool: PoolState, block: int, arrived: int) -> str:
    """The rows that a block lacks, in words.

    Args:
        image: of the rank that owns the block.
        peers: by rank, whose route lists may be read, this rank's too.
        pool: the block table, and the runs claimed.
        block: number of the block.
        arrived: rows counted in it.
    """
    expert, rows = pool.blocks[block]
    block_m = image.config.block_m
    run_rows = rows_per_run(pool.blocks[0][1], block_m)
    if arrived > rows:
        return f"{arrived - rows} more than it has"
    try:
        origins = Origins(image, peers)
        open_runs, absent = [], []
        for row in range(rows):
            source, place = origins.of_row(block, expert, row)
            if run_of_row(block, row, len(pool.blocks), block_m, run_rows) >= pool.runs_claimed:
                open_runs.append(f"row {row} = {_origin(source, place)}")
            elif place is None or image.row("token_src_metadata", block * block_m + row) != [source, *place]:
                absent.append(f"row {row} = {_origin(source, place)}")
    except NotSaved as missing:
        return f"which rows cannot be told: {missing}"
    parts = []
    if open_runs:
        parts.append(f"{_listed(open_runs)}: pulled by nobody yet")
    if absent:
        parts.append(f"{_listed(absent)}: claimed by a worker, not stored")
    uncounted = rows - arrived - len(open_runs) - len(absent)
    if uncounted > 0:
        parts.append(f"{uncounted} claimed and with metadata in place, not counted")
    return "missing " + "; ".join(parts)


def _origin(source: int, place: tuple[int, int] | None) -> str:
    return f"rank {source} token {place[0]} slot {place[1]}" if place else f"a row of rank {source}"


def _listed(rows: Sequence[str]) -> str:
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    return ", ".join(rows[:MAX_ROWS]) + more
