"""Phase 3: the scaled fp32 accumulators of L1, in windows of any pool rows and any columns."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megamoe.reference import dispatch
from phases.support.checks import CaseChecks
from phases.support.inputs import Workload
from phases.support.numeric import WorkloadComparison, all_windows, numeric_variants
from phases.support.runner import CaseList, Phase, Variant, main
from phases.support.workloads import TILES, make_config, tokens_of


def compare_every_window(phase: Phase, checks: CaseChecks, *, work: Workload) -> None:
    """Every window of the rank that has the most of them; the others begin again with their first."""
    comparison = WorkloadComparison(phase, checks, work)
    # Ranks in other processes have their own windows, and all launch equally often.
    pools = [dispatch(work.config, comparison.inputs, rank) for rank in range(work.config.num_ranks)]
    for number in range(max(len(all_windows(work.config, pool)) for pool in pools)):
        comparison.launch_and_compare(number)


def make_cases(phase: Phase) -> CaseList:
    ranks = phase.ranks
    shapes = TILES[ranks.target]
    # With 32-row blocks a window holds four blocks, of several experts; a tile of 512 columns holds four windows.
    works = [
        Workload(f"windows[block_m={tiles[0]}]", make_config(ranks, tiles=tiles), tokens_of(ranks))
        for tiles in dict.fromkeys((shapes[0], shapes[2]))
    ]
    variants = [Variant(work.name, partial(compare_every_window, work=work)) for work in works]
    return {**numeric_variants(phase), "windows": variants}


if __name__ == "__main__":
    main(__file__, make_cases)
