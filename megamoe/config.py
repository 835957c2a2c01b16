"""What one MoE layer looks like: the numbers everything else is derived from, each rule checked once."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, get_args

SCALE_BLOCK = 128
"""Columns of hidden that share one activation scale, and the edge of a weight-scale block."""

MAX_RANKS = 72
MAX_TOPK = 32
MAX_EXPERTS = 2**20
"""Experts over all ranks: sorting keeps an expert and a count in one 32-bit word."""
BLOCK_M_CHOICES = (32, 64, 128)
L2_SF_GRANULARITY_CHOICES = (64, 128)
Accumulate = Literal["fp32", "fast"]
ACCUMULATE_CHOICES: tuple[Accumulate, ...] = get_args(Accumulate)
ACCUM_DEBUG_EDGE = 128
"""Rows and columns of the debug view of L1 accumulators."""
MAX_COUNTED = 2**32 - 2**16
"""Routes, pool rows and tiles are counted in 32 bits, and every worker of a launch may claim one past the last."""
INTERLEAVE = 8
"""Gate and up rows of the L1 weight alternate in groups of this many."""


class Stage(enum.IntEnum):
    """Where a launch stops. A phase is the fused kernel truncated after its stage."""

    INTERFACE = 1
    DISPATCH = 2
    L1_GEMM = 3
    L1_EPILOGUE = 4
    L2_GEMM = 5
    COMBINE = 6


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


def is_count(value: object) -> bool:
    """Whether it is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class MegaMoEConfig:
    """One MoE layer over expert-parallel ranks. Global expert ``e`` lives on rank ``e // experts_per_rank``.

    Attributes:
        num_ranks: expert-parallel ranks, 1 to 72.
        num_experts: experts over all ranks; divisible by ``num_ranks``, at most 2**20.
        num_topk: routes a token has, 1 to 32 and at most ``num_experts``.
        hidden: model width, a multiple of 128.
        intermediate_hidden: width of one expert, a multiple of 128.
        num_max_tokens_per_rank: token capacity of each rank.
        l2_sf_granularity: columns of the intermediate that share one scale, 64 or 128.
        pool_rows: pool rows a rank has room for, rounded up to ``block_m``; None means the worst case, in which
            every route of every rank comes to one rank.
        block_m: rows of a pool block.
        l1_block_n: columns of an L1 output tile, gate and up interleaved.
        l2_block_n: columns of an L2 output tile; the last tile of a row may be narrower.
        accumulate: ``fp32``: the product of every scale group is added to an fp32 sum; ``fast``: the sum stays in the
            tensor core and is rescaled. The host target has the exact sums for both.

    Raises:
        ValueError: a rule does not hold; the message names the field, its value and the rule.
    """

    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    num_max_tokens_per_rank: int
    l2_sf_granularity: int = 128
    pool_rows: int | None = None
    block_m: int = 128
    l1_block_n: int = 256
    l2_block_n: int = 128
    accumulate: Accumulate = "fp32"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "accumulate" or (name == "pool_rows" and value is None):
                continue
            _require(is_count(value), f"{name} must be a positive integer, got {value!r}")
        _require(self.num_ranks <= MAX_RANKS, f"num_ranks must be at most {MAX_RANKS}, got {self.num_ranks}")
        _require(self.num_experts <= MAX_EXPERTS, f"num_experts must be at most {MAX_EXPERTS}, got {self.num_experts}")
        _require(
            self.num_experts % self.num_ranks == 0,
            f"num_experts must be divisible by num_ranks, got {self.num_experts} experts over {self.num_ranks} ranks",
        )
        _require(self.num_topk <= MAX_TOPK, f"num_topk must be at most {MAX_TOPK}, got {self.num_topk}")
        _require(
            self.num_topk <= self.num_experts,
            f"num_topk must not exceed num_experts, got top-{self.num_topk} of {self.num_experts} experts",
        )
        for name in ("hidden", "intermediate_hidden"):
            value = getattr(self, name)
            _require(value % SCALE_BLOCK == 0, f"{name} must be a multiple of {SCALE_BLOCK}, got {value}")
        _require(
            self.l2_sf_granularity in L2_SF_GRANULARITY_CHOICES,
            f"l2_sf_granularity must be one of {L2_SF_GRANULARITY_CHOICES}, got {self.l2_sf_granularity}",
        )
        _require(self.block_m in BLOCK_M_CHOICES, f"block_m must be one of {BLOCK_M_CHOICES}, got {self.block_m}")
        _require(
            self.l1_block_n % (2 * self.l2_sf_granularity) == 0,
            "l1_block_n must hold whole scale groups of gate and up: a multiple of 2 * l2_sf_granularity = "
            f"{2 * self.l2_sf_granularity}, got {self.l1_block_n}",
        )
        _require(
            self.l2_block_n % SCALE_BLOCK == 0,
            f"l2_block_n must be a multiple of {SCALE_BLOCK}, got {self.l2_block_n}",
        )
        _require(
            self.accumulate in ACCUMULATE_CHOICES,
            f"accumulate must be one of {ACCUMULATE_CHOICES}, got {self.accumulate!r}",
        )
        # An owner counts every route that comes before it finds that they do not fit into its pool.
        for what, count in (
            ("pool rows", max(self.worst_case_pool_rows, self.num_pool_rows)),
            ("output tiles of a launch", self.num_pool_blocks * (self.num_l1_tiles + self.num_l2_tiles)),
        ):
            _require(
                count <= MAX_COUNTED,
                f"num_max_tokens_per_rank = {self.num_max_tokens_per_rank} with top-{self.num_topk} over "
                f"{self.num_ranks} ranks (pool_rows = {self.pool_rows}) may come to {count} {what}, expected at most "
                f"{MAX_COUNTED}",
            )

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def l1_columns(self) -> int:
        """Columns of the L1 product: gate and up interleaved."""
        return 2 * self.intermediate_hidden

    @property
    def hidden_scales(self) -> int:
        """Activation scales a token has."""
        return self.hidden // SCALE_BLOCK

    @property
    def intermediate_scales(self) -> int:
        """Scales a row of ``l2_acts`` has."""
        return self.intermediate_hidden // self.l2_sf_granularity

    @property
    def max_routes_per_rank(self) -> int:
        return self.num_max_tokens_per_rank * self.num_topk

    @property
    def worst_case_pool_rows(self) -> int:
        """Every route of every rank comes here, and every local expert ends in a block of which one row is used."""
        routes = self.num_ranks * self.max_routes_per_rank
        padded_experts = min(self.experts_per_rank, routes)
        return round_up(routes + padded_experts * (self.block_m - 1), self.block_m)

    @property
    def num_pool_rows(self) -> int:
        if self.pool_rows is None:
            return self.worst_case_pool_rows
        return round_up(self.pool_rows, self.block_m)

    @property
    def num_pool_blocks(self) -> int:
        return self.num_pool_rows // self.block_m

    @property
    def num_l1_tiles(self) -> int:
        """L1 output tiles of a pool block."""
        return ceil_div(self.l1_columns, self.l1_block_n)

    @property
    def num_l2_tiles(self) -> int:
        """L2 output tiles of a pool block."""
        return ceil_div(self.hidden, self.l2_block_n)

    @property
    def num_mask_words(self) -> int:
        """64-bit words of ``l2_arrival_mask`` a pool block has."""
        return ceil_div(self.num_l1_tiles, 64)

    def rank_of_expert(self, expert: int) -> int:
        return expert // self.experts_per_rank
