"""Phase 6: y against the oracle, the bitwise list of DESIGN.md, and launches that repeat with changing inputs."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megamoe.config import ACCUMULATE_CHOICES
from phases.phase6 import bad_rows, bitwise, repeated
from phases.support.numeric import activation_clamp_variants, numeric_variants
from phases.support.ranks import Ranks
from phases.support.runner import CaseList, Phase, Variant, main

REAL_SIZE_RANKS = 8


def _why_no_graph(ranks: Ranks) -> str:
    if ranks.target == "sm90":
        return "a capture takes the launches of one GPU; ranks that are processes or on one GPU run it"
    return f"target {ranks.target} has no graphs to capture; target sm90 runs it"


def _tile_variants(ranks: Ranks) -> list[Variant]:
    """Target sm90 chooses the height of a tile from the rows of its block, and has no other shapes."""
    if ranks.target == "host":
        check = bitwise.check_tile_shapes
        return [
            Variant(f"tile_shapes[granularity={granularity}]", partial(check, granularity=granularity))
            for granularity in (64, 128)
        ]
    return [
        Variant(
            f"tile_shapes[granularity={granularity},accumulate={accumulate}]",
            partial(bitwise.check_tile_heights, granularity=granularity, accumulate=accumulate),
        )
        for granularity in (64, 128)
        for accumulate in ACCUMULATE_CHOICES
    ]


def make_cases(phase: Phase) -> CaseList:
    ranks = phase.ranks
    bodies = {
        "non_finite": bad_rows.check_non_finite,
        "bad_id": bad_rows.check_bad_id,
        "group_kinds": bitwise.check_group_kinds,
        "permutation": bitwise.check_permutation,
        "added_tokens": bitwise.check_added_tokens,
        "debug_output": bitwise.check_debug_output,
        "repeated_launches": repeated.check_repeated_launches,
    }
    cases = {name: [Variant(name, body)] for name, body in bodies.items()}
    for name, check in (("run_to_run", bitwise.check_run_to_run), ("world_sizes", bitwise.check_world_sizes)):
        cases[name] = [
            Variant(f"{name}[accumulate={accumulate}]", partial(check, accumulate=accumulate))
            for accumulate in ACCUMULATE_CHOICES
        ]
    cases["tile_shapes"] = _tile_variants(ranks)
    here = ranks.target == "sm90" or (ranks.all_here and ranks.num_ranks == REAL_SIZE_RANKS)
    cases["real_size"] = [
        Variant(
            "real_size",
            repeated.check_real_size if here else None,
            "" if here else f"the weights of a real model fit once: {REAL_SIZE_RANKS} virtual ranks run it",
        )
    ]
    graphs = ranks.target == "sm90" and ranks.kind != "spread"
    cases["graph_replay"] = [
        Variant(
            "graph_replay",
            repeated.check_graph_replay if graphs else None,
            "" if graphs else _why_no_graph(ranks),
        )
    ]
    return {**numeric_variants(phase), "activation_clamp": activation_clamp_variants(phase), **cases}


if __name__ == "__main__":
    main(__file__, make_cases)
