"""The numeric cases that phases 2 to 6 share, for 1, 2 and 8 ranks: which inputs, routes, token counts and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megamoe.config import Accumulate, MegaMoEConfig, Stage, ceil_div
from phases.support.inputs import ACTIVATIONS, Workload
from phases.support.ranks import Ranks

# (hidden, intermediate_hidden). 640 has five scales a row, which 16-byte rows pad; of 640 and 384 the last L2 tile of
# 256 columns is half empty; 1024 has only whole ones.
SMALL = (384, 256)
ODD = (640, 384)
WIDE = (1024, 256)
REAL = (7168, 2048)
EXPERTS = {1: 6, 2: 8, 4: 8, 8: 16}
TOPK = 3
CAPACITY = 48
TOKENS = {1: 48, 2: 24, 8: 8}
"""Tokens of a rank in the cases whose point is another one."""

Tiles = tuple[int, int, int]
"""(block_m, l1_block_n, l2_block_n)"""
TILES: dict[str, tuple[Tiles, Tiles, Tiles]] = {
    "host": ((128, 256, 128), (64, 256, 256), (32, 512, 128)),
    "sm90": ((128, 256, 256),) * 3,
}
"""Three shapes that the cases of a target use by number. Target sm90 has one: it chooses between TILE_HEIGHTS for each
block, from its counts."""
TILE_HEIGHTS: dict[str, tuple[int, ...]] = {"host": (64, 128), "sm90": (8, 16, 32, 64, 128)}
"""Most rows of a tile, of blocks of 128: a tile is computed for the least of these that holds its block's rows. On sm90
each has code of its own; host has one code, and blocks up to half full and fuller ones are asked for."""
BLOCK_EDGES: dict[str, dict[Tiles, tuple[int, ...]]] = {
    "host": {tiles: (tiles[0],) for tiles in TILES["host"]},
    "sm90": {TILES["sm90"][0]: (128, 192, 64, 32, 16, 8)},
}
"""Rows around which an expert is cut into blocks, or a block's tiles change their height (192: in a second block)."""
EDGE_DRAWS = {8: 2, 16: 2, 128: 5, 192: 41}
"""For the case around so many rows, a number that goes into its name, from which its inputs are drawn: those of the
plain name hang on one rounding of h that may go either way, and y would miss a bound by it (DESIGN.md, known
deviations). test_no_edge_case_of_a_gpu_hangs_on_one_rounding says what is asked of a draw."""


def make_config(
    ranks: Ranks,
    *,
    shape: tuple[int, int] = SMALL,
    tiles: int | Tiles = 0,
    granularity: int = 128,
    num_experts: int | None = None,
    num_topk: int = TOPK,
    capacity: int = CAPACITY,
    accumulate: Accumulate = "fp32",
) -> MegaMoEConfig:
    """A config of the cases; numbers of ranks that are not in EXPERTS have two experts each. ``tiles``: a number of
    TILES of the target, or a shape."""
    num_ranks = ranks.num_ranks
    block_m, l1_block_n, l2_block_n = TILES[ranks.target][tiles] if isinstance(tiles, int) else tiles
    return MegaMoEConfig(
        num_ranks=num_ranks,
        num_experts=num_experts or EXPERTS.get(num_ranks, 2 * num_ranks),
        num_topk=num_topk,
        hidden=shape[0],
        intermediate_hidden=shape[1],
        num_max_tokens_per_rank=capacity,
        l2_sf_granularity=granularity,
        block_m=block_m,
        l1_block_n=l1_block_n,
        l2_block_n=l2_block_n,
        accumulate=accumulate,
    )


def _granularities(stage: Stage) -> tuple[int, ...]:
    """Before L1's epilogue nothing depends on the granularity."""
    return (128, 64) if stage >= Stage.L1_EPILOGUE else (128,)


def tokens_of(ranks: Ranks, tokens: int | None = None) -> tuple[int, ...]:
    """Of each rank, in the cases whose point is another one."""
    return (tokens if tokens is not None else TOKENS.get(ranks.num_ranks, 16),) * ranks.num_ranks


def numeric_cases(ranks: Ranks, stage: Stage) -> dict[str, list[Workload]]:
    """By case name; a case's variants have the name with the variant in brackets."""
    cases = {
        "tiles": _tiles(ranks, stage),
        "one_expert": [Workload("one_expert", make_config(ranks, tiles=1), tokens_of(ranks), routing="one_expert")],
        "edge_counts": [
            _edge_counts(ranks, tiles, edge) for tiles, edges in BLOCK_EDGES[ranks.target].items() for edge in edges
        ],
        "token_counts": _token_counts(ranks),
        "many_blocks": _many_blocks(ranks, stage),
        "masked": _masked(ranks),
        "duplicate_expert": [
            Workload("duplicate_expert", make_config(ranks, tiles=2), tokens_of(ranks), routing="duplicate")
        ],
    }
    for index, kind in enumerate(ACTIVATIONS):
        granularities = _granularities(stage)
        cases[kind] = [
            Workload(
                f"{kind}[l2_sf_granularity={granularity}]",
                make_config(
                    ranks,
                    shape=ODD if kind == "normal" else SMALL,
                    tiles=(index + step) % 3,
                    granularity=granularity,
                ),
                tokens_of(ranks),
                activations=kind,
            )
            for step, granularity in enumerate(granularities)
        ]
    if stage >= Stage.L1_GEMM:
        cases["accumulate_fast"] = _accumulate_fast(ranks, stage)
    return cases


def tile_name(tiles: Tiles, granularity: int) -> str:
    return f"tiles[block_m={tiles[0]},l1_block_n={tiles[1]},l2_block_n={tiles[2]},granularity={granularity}]"


def _tiles(ranks: Ranks, stage: Stage) -> list[Workload]:
    """Every tile shape of the target with every granularity, and wider models."""
    works = []
    for granularity in _granularities(stage):
        if ranks.target == "sm90":
            for shape in (ODD, WIDE, REAL):
                config = make_config(ranks, shape=shape, granularity=granularity)
                name = f"tiles[hidden={shape[0]},intermediate={shape[1]},granularity={granularity}]"
                works.append(Workload(name, config, tokens_of(ranks)))
            continue
        for number, shape in enumerate((ODD, WIDE, ODD)):
            block_m, l1_block_n, l2_block_n = TILES[ranks.target][number]
            # With granularity 64 the narrowest L1 tile has 128 columns.
            tiles = (block_m, 128 if granularity == 64 and number == 2 else l1_block_n, l2_block_n)
            config = make_config(ranks, shape=shape, tiles=tiles, granularity=granularity)
            works.append(Workload(tile_name(tiles, granularity), config, tokens_of(ranks)))
    return works


def _accumulate_fast(ranks: Ranks, stage: Stage) -> list[Workload]:
    """Sums as long as the target's time allows, which is where they lose most, and odd ones."""
    longest = REAL if ranks.target == "sm90" else WIDE
    works = []
    for shape, granularity in zip((longest, ODD), _granularities(stage), strict=False):
        config = make_config(ranks, shape=shape, granularity=granularity, accumulate="fast")
        name = f"accumulate_fast[hidden={shape[0]},intermediate={shape[1]},granularity={granularity}]"
        works.append(Workload(name, config, tokens_of(ranks)))
    return works


def _edge_counts(ranks: Ranks, tiles: Tiles, edge: int) -> Workload:
    """Experts with 0, 1, edge-1, edge and edge+1 rows, from tokens of all ranks: about where a block or tile ends."""
    counts = (0, 1, edge - 1, edge, edge + 1)
    per_rank = ceil_div(sum(counts), TOPK * ranks.num_ranks) + 1
    config = make_config(ranks, tiles=tiles, capacity=max(CAPACITY, per_rank))
    draw = f",draw={EDGE_DRAWS[edge]}" if ranks.target == "sm90" and edge in EDGE_DRAWS else ""
    name = f"edge_counts[rows={edge}{draw}]"
    return Workload(name, config, tokens_of(ranks, per_rank), routing="counts", counts=counts)


MANY_TOKENS = {"host": 192, "sm90": 1000}
"""The most that a rank has in the case token_counts."""


def _token_counts(ranks: Ranks) -> list[Workload]:
    """0, 1, 8, 48, 192 and on a GPU 1000 tokens, uneven over the ranks where there are several; and no token at all."""
    num_ranks, many = ranks.num_ranks, MANY_TOKENS[ranks.target]
    config = make_config(ranks, tiles=2, capacity=many)
    spreads: Sequence[tuple[int, ...]]
    if num_ranks == 1:
        spreads = [(1,), (8,), (48,), (192,)]
    elif num_ranks == 2:
        spreads = [(0, 192), (48, 1), (8, 0)]
    else:
        uneven = (0, 192, 1, 48, 8, 0, 17, 3)
        spreads = [tuple(uneven[rank % len(uneven)] for rank in range(num_ranks))]
    if many > 192:
        spreads = [*spreads, (*spreads[0][:-1], many)]
    works = [Workload(f"token_counts[{','.join(map(str, spread))}]", config, spread) for spread in spreads]
    nothing = Workload("token_counts[0]", config, (0,) * num_ranks, empty=frozenset({"tokens", "routes"}))
    return [*works, nothing]


def _many_blocks(ranks: Ranks, stage: Stage) -> list[Workload]:
    """More than two blocks an expert, which target sm90 takes two by two: blocks of one expert and of two experts, more
    and less than half full, and one that is left over."""
    works = []

    def add(pattern: Sequence[float], shape: tuple[int, int], accumulate: Accumulate = "fp32", **options: int) -> None:
        config = make_config(ranks, shape=shape, tiles=2, accumulate=accumulate, **options)
        rows = [
            int(pattern[expert % len(pattern)] * config.block_m) + expert % 2 for expert in range(config.num_experts)
        ]
        tokens = ceil_div(sum(rows), config.num_topk * config.num_ranks) + 1
        name = f"many_blocks[hidden={shape[0]},granularity={config.l2_sf_granularity},{accumulate}]"
        config = replace(config, num_max_tokens_per_rank=tokens)
        works.append(Workload(name, config, tokens_of(ranks, tokens), routing="counts", counts=tuple(rows)))

    uneven = (5, 2.5, 3, 3, 0, 4.5)
    for granularity in _granularities(stage):
        add(uneven, ODD, granularity=granularity)
    if stage >= Stage.L1_GEMM:
        add(uneven, ODD, "fast")
    if ranks.target == "sm90":
        add((3, 2.5), REAL, num_experts=2 * ranks.num_ranks, num_topk=1)
    return works


def _masked(ranks: Ranks) -> list[Workload]:
    config = make_config(ranks, tiles=1)
    return [
        Workload("masked[0%]", config, tokens_of(ranks)),
        Workload("masked[30%]", config, tokens_of(ranks), masked=0.3),
        Workload("masked[100%]", config, tokens_of(ranks), masked=1.0, empty=frozenset({"routes"})),
    ]
