"""Phase 2: the pool that dispatch leaves on every rank, exactly: rows, scales, weights, counts, origins, arrival."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megamoe.layout import num_route_chunks
from phases.support.checks import CaseChecks
from phases.support.inputs import Workload
from phases.support.numeric import WorkloadComparison, numeric_variants
from phases.support.runner import CaseList, Phase, Variant, main
from phases.support.workloads import make_config

LAUNCHES = {"single": 10, "virtual": 10, "spread": 10, "process": 2}
"""Many where a rank has several workers, which race for the chunks."""


def check_routing_chunks(phase: Phase, checks: CaseChecks, *, work: Workload) -> None:
    """The order of the pool does not depend on which chunk of the routes is listed first, launch after launch."""
    chunks = num_route_chunks(work.config)
    checks.require(chunks >= 3, f"a full rank's routes are {chunks} chunks, expected several")
    comparison = WorkloadComparison(phase, checks, work)
    for _ in range(LAUNCHES[phase.ranks.kind]):
        comparison.launch_and_compare()


def make_cases(phase: Phase) -> CaseList:
    ranks = phase.ranks
    config = make_config(ranks, num_experts=8 * max(1, ranks.num_ranks // 4), num_topk=6, capacity=352)
    counts = (352, *(7 * rank % 32 for rank in range(1, ranks.num_ranks)))
    work = Workload("routing_chunks", config, counts, masked=0.05)
    chunked = Variant(work.name, partial(check_routing_chunks, work=work))
    return {**numeric_variants(phase), "routing_chunks": [chunked]}


if __name__ == "__main__":
    main(__file__, make_cases)
