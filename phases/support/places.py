"""The place of a view's element in words: rank, expert, pool block and row, token and slot, column."""

from __future__ import annotations

from functools import partial

from megamoe.config import ACCUM_DEBUG_EDGE
from phases.support.error_maps import Where
from phases.support.oracle import RankOracle

_BLOCK_VIEWS = ("l1_arrival_count", "l2_arrival_mask")


def places(oracle: RankOracle, view: str, rows: str) -> Where:
    """For the elements of `RankOracle.select` of a view. ``rows``: as in views.yaml."""
    return partial(_place, oracle, view, rows)


def _place(oracle: RankOracle, view: str, rows: str, index: tuple[int, ...]) -> str:
    return ", ".join([f"rank {oracle.rank}", *_row(oracle, view, rows, index[0]), *_column(oracle, rows, index)])


def _row(oracle: RankOracle, view: str, rows: str, number: int) -> list[str]:
    match rows:
        case "tokens":
            return [f"token {number}"]
        case "routes" | "slots":
            return [route_words(oracle, number)]
        case "window":
            return [route_words(oracle, int(oracle.window_routes[number]))]
    if view in _BLOCK_VIEWS:
        if number >= oracle.pool.num_blocks:
            return [f"pool block {number}, which no expert uses"]
        return [f"expert {_global(oracle, int(oracle.pool.block_expert[number]))}, pool block {number}"]
    if view == "expert_recv_count_sum":
        return [f"expert {_global(oracle, number)}"]
    return [f"row {number}"]


def _global(oracle: RankOracle, local_expert: int) -> int:
    return oracle.rank * oracle.config.experts_per_rank + local_expert


def route_words(oracle: RankOracle, route: int) -> str:
    """``expert 5, pool block 12 row 77 = rank 1 token 40 slot 2``: the expert is global."""
    pool, block_m = oracle.pool, oracle.config.block_m
    block, row = divmod(int(pool.rows[route]), block_m)
    expert = _global(oracle, int(pool.expert[route]))
    source, token, slot = (int(part[route]) for part in (pool.source, pool.token, pool.slot))
    return f"expert {expert}, pool block {block} row {row} = rank {source} token {token} slot {slot}"


def _column(oracle: RankOracle, rows: str, index: tuple[int, ...]) -> list[str]:
    if len(index) < 2:
        return []
    column = index[-1]
    if rows == "window":
        column += oracle.launch.windows[oracle.rank].column_block * ACCUM_DEBUG_EDGE
    return [f"column {column}"]
