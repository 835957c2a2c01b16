"""Phase 4: what the L1 epilogue stores: SwiGLU times the route's weight as fp8 with scales, and the readiness mask."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from phases.support.inputs import Workload
from phases.support.numeric import numeric_variants, run_workload
from phases.support.runner import CaseList, Phase, Variant, run_phase
from phases.support.workloads import TILES, TOKENS, make_config

CLAMP = 0.5
"""Well inside the range of gate and up here, so that both ends of the clamp are used."""


def make_cases(phase: Phase) -> CaseList:
    ranks = phase.ranks.num_ranks
    clamped = [
        Workload(
            f"activation_clamp[l2_sf_granularity={granularity}]",
            make_config(ranks, tiles=TILES[1], granularity=granularity),
            (TOKENS[ranks],) * ranks,
            activation_clamp=CLAMP,
        )
        for granularity in (64, 128)
    ]
    variants = [Variant(work.name, partial(run_workload, work=work)) for work in clamped]
    return {**numeric_variants(phase), "activation_clamp": variants}


if __name__ == "__main__":
    sys.exit(run_phase(Path(__file__).resolve().parent, make_cases))
