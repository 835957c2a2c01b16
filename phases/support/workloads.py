"""The numeric cases that phases 2 to 6 share, for 1, 2 and 8 ranks: which inputs, routes, token counts and tiles."""

from __future__ import annotations

from collections.abc import Sequence

from megamoe.config import MegaMoEConfig, Stage, ceil_div
from phases.support.inputs import ACTIVATIONS, Workload

# (hidden, intermediate_hidden). 640 has five scales a row, which 16-byte rows pad; of 640 and 384 the last L2 tile of
# 256 columns is half empty; 1024 has only whole ones.
SMALL = (384, 256)
ODD = (640, 384)
WIDE = (1024, 256)
EXPERTS = {1: 6, 2: 8, 4: 8, 8: 16}
TOPK = 3
CAPACITY = 48
TOKENS = {1: 48, 2: 24, 8: 8}
"""Tokens of a rank in the cases whose point is another one."""

# (block_m, l1_block_n, l2_block_n)
TILES = ((128, 256, 128), (64, 256, 256), (32, 512, 128))


def make_config(
    num_ranks: int,
    *,
    shape: tuple[int, int] = SMALL,
    tiles: tuple[int, int, int] = TILES[0],
    granularity: int = 128,
    num_experts: int | None = None,
    num_topk: int = TOPK,
    capacity: int = CAPACITY,
) -> MegaMoEConfig:
    """A config of the cases; ranks that are not in EXPERTS have two experts each."""
    return MegaMoEConfig(
        num_ranks=num_ranks,
        num_experts=num_experts or EXPERTS.get(num_ranks, 2 * num_ranks),
        num_topk=num_topk,
        hidden=shape[0],
        intermediate_hidden=shape[1],
        num_max_tokens_per_rank=capacity,
        l2_sf_granularity=granularity,
        block_m=tiles[0],
        l1_block_n=tiles[1],
        l2_block_n=tiles[2],
    )


def _granularities(stage: Stage) -> tuple[int, ...]:
    """Before L1's epilogue nothing depends on the granularity."""
    return (128, 64) if stage >= Stage.L1_EPILOGUE else (128,)


def _tokens(num_ranks: int, tokens: int | None = None) -> tuple[int, ...]:
    return (tokens if tokens is not None else TOKENS.get(num_ranks, 16),) * num_ranks


def numeric_cases(num_ranks: int, stage: Stage) -> dict[str, list[Workload]]:
    """By case name; a case's variants have the name with the variant in brackets."""
    cases = {
        "tiles": _tiles(num_ranks, stage),
        "one_expert": [
            Workload("one_expert", make_config(num_ranks, tiles=TILES[1]), _tokens(num_ranks), routing="one_expert")
        ],
        "edge_counts": [_edge_counts(num_ranks, tiles) for tiles in TILES],
        "token_counts": _token_counts(num_ranks),
        "masked": _masked(num_ranks),
        "duplicate_expert": [
            Workload(
                "duplicate_expert", make_config(num_ranks, tiles=TILES[2]), _tokens(num_ranks), routing="duplicate"
            )
        ],
    }
    for index, kind in enumerate(ACTIVATIONS):
        granularities = _granularities(stage)
        cases[kind] = [
            Workload(
                f"{kind}[l2_sf_granularity={granularity}]",
                make_config(
                    num_ranks,
                    shape=ODD if kind == "normal" else SMALL,
                    tiles=TILES[(index + step) % len(TILES)],
                    granularity=granularity,
                ),
                _tokens(num_ranks),
                activations=kind,
            )
            for step, granularity in enumerate(granularities)
        ]
    return cases


def _tiles(num_ranks: int, stage: Stage) -> list[Workload]:
    """Every tile height with every granularity, and a wider model."""
    works = []
    for granularity in _granularities(stage):
        for tiles in TILES:
            shape = WIDE if tiles == TILES[1] else ODD
            # With granularity 64 the narrowest L1 tile has 128 columns.
            l1_block_n = 128 if granularity == 64 and tiles == TILES[2] else tiles[1]
            config = make_config(
                num_ranks, shape=shape, tiles=(tiles[0], l1_block_n, tiles[2]), granularity=granularity
            )
            name = f"tiles[block_m={tiles[0]},l1_block_n={l1_block_n},l2_block_n={tiles[2]},granularity={granularity}]"
            works.append(Workload(name, config, _tokens(num_ranks)))
    return works


def _edge_counts(num_ranks: int, tiles: tuple[int, int, int]) -> Workload:
    """Experts with 0, 1, BLOCK_M-1, BLOCK_M and BLOCK_M+1 rows, from tokens of all ranks."""
    block_m = tiles[0]
    counts = (0, 1, block_m - 1, block_m, block_m + 1)
    per_rank = ceil_div(sum(counts), TOPK * num_ranks) + 1
    config = make_config(num_ranks, tiles=tiles, capacity=max(CAPACITY, per_rank))
    return Workload(
        f"edge_counts[block_m={block_m}]", config, _tokens(num_ranks, per_rank), routing="counts", counts=counts
    )


def _token_counts(num_ranks: int) -> list[Workload]:
    """0, 1, 8, 48 and 192 tokens, uneven over the ranks where there are several; and no token at all."""
    config = make_config(num_ranks, tiles=TILES[2], capacity=192)
    spreads: Sequence[tuple[int, ...]]
    if num_ranks == 1:
        spreads = [(1,), (8,), (48,), (192,)]
    elif num_ranks == 2:
        spreads = [(0, 192), (48, 1), (8, 0)]
    else:
        uneven = (0, 192, 1, 48, 8, 0, 17, 3)
        spreads = [tuple(uneven[rank % len(uneven)] for rank in range(num_ranks))]
    works = [Workload(f"token_counts[{','.join(map(str, spread))}]", config, spread) for spread in spreads]
    nothing = Workload("token_counts[0]", config, (0,) * num_ranks, empty=frozenset({"tokens", "routes"}))
    return [*works, nothing]


def _masked(num_ranks: int) -> list[Workload]:
    config = make_config(num_ranks, tiles=TILES[1])
    return [
        Workload("masked[0%]", config, _tokens(num_ranks)),
        Workload("masked[30%]", config, _tokens(num_ranks), masked=0.3),
        Workload("masked[100%]", config, _tokens(num_ranks), masked=1.0, empty=frozenset({"routes"})),
    ]
