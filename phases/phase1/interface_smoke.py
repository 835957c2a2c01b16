"""Phase 1: buffers, views, weight transform, refusals, and an empty kernel that launches and ends."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megamoe import (
    MegaMoEConfig,
    Stage,
    SymmBuffer,
    fp8_mega_moe,
    launch_mega_moe,
    untransform_weights_for_mega_moe,
)
from megamoe.layout import BULK_COPY_BYTES
from megamoe.reference import as_bits
from phases.phase1.bad_calls import NUM_TOKENS, BadCall, bad_calls, bad_configs
from phases.support.checks import CaseChecks
from phases.support.inputs import Workload, make_tokens, make_weights, natural_weights
from phases.support.launches import open_buffer, wait
from phases.support.runner import CaseList, Phase, Variant, main
from phases.support.workloads import ODD, TILES, make_config

CAPACITY = 24


def pattern(view: Tensor, rank: int, number: int) -> Tensor:
    """Integers of the view's item size that differ from view to view, from rank to rank, and along the view."""
    count = torch.arange(view.numel(), dtype=torch.int64).reshape(view.shape)
    mixed = (count + 1) * 2654435761 + (number * 31 + rank + 1) * 40503 * 65537
    return (mixed >> 7 & 0xFF).to(torch.uint8) if view.element_size() == 1 else mixed.to(as_bits(view).dtype)


def write_patterns(phase: Phase, buffer: SymmBuffer) -> None:
    for number, name in enumerate(phase.views):
        view = buffer.view(name)
        as_bits(view).copy_(pattern(view, buffer.rank, number))


def compare_patterns(phase: Phase, checks: CaseChecks, buffer: SymmBuffer, owner: int, against: str) -> None:
    """Compare every view of a rank's buffer, as another rank may address it, with what its owner wrote."""
    for number, spec in enumerate(phase.views.values()):
        view = buffer.view(spec.name, rank=owner)
        (bound,) = spec.compare.values()
        assert bound == "exact", spec
        found = as_bits(view).cpu()
        checks.compare(spec.name, bound, found, pattern(view, owner, number), rank=buffer.rank, against=against)


def check_views(phase: Phase, checks: CaseChecks, *, config: MegaMoEConfig) -> None:
    """Dtypes, shapes, strides, alignment; every view written, then every view read: they do not overlap."""
    for rank, buffer in phase.launcher.buffers(config).items():
        for spec in phase.views.values():
            view = buffer.view(spec.name)
            for error in spec.layout_errors(view, config, config.num_max_tokens_per_rank):
                checks.require(False, f"rank {rank}: {error}")
            checks.require(
                view.data_ptr() % BULK_COPY_BYTES == 0, f"rank {rank}: {spec.name} begins at {view.data_ptr():#x}"
            )
            if spec.name in ("x", "x_sf", "l1_acts", "l2_acts"):
                row_bytes = view.stride(0) * view.element_size()
                checks.require(row_bytes % BULK_COPY_BYTES == 0, f"rank {rank}: rows of {spec.name}: {row_bytes} bytes")
        write_patterns(phase, buffer)
        compare_patterns(phase, checks, buffer, rank, "what was written")


def check_peer_views(phase: Phase, checks: CaseChecks) -> None:
    """Every rank sees in every other rank's buffer what that one wrote into its own."""
    config = make_config(phase.ranks, shape=ODD, capacity=CAPACITY)
    buffers = phase.launcher.buffers(config)
    phase.ranks.barrier()
    for buffer in buffers.values():
        write_patterns(phase, buffer)
    phase.ranks.barrier()
    for buffer in buffers.values():
        for owner in range(config.num_ranks):
            compare_patterns(phase, checks, buffer, owner, "what its owner wrote")
    phase.ranks.barrier()


def check_fill(phase: Phase, checks: CaseChecks) -> None:
    """fill() quantises and copies; rows beyond the tokens stay as they were."""
    ranks = phase.ranks.num_ranks
    config = make_config(phase.ranks, shape=ODD, capacity=CAPACITY)
    tokens = make_tokens(Workload("fill", config, tuple(rank % CAPACITY for rank in range(1, ranks + 1))))
    for rank, buffer in phase.launcher.buffers(config).items():
        given, inputs = tokens[rank], tokens[rank].quantised()
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            as_bits(buffer.view(name)).fill_(7)
        count = buffer.fill(*(part.to(buffer.device) for part in (given.x, given.topk_idx, given.topk_weights)))
        checks.require(count == given.num_tokens, f"rank {rank}: fill() gave {count}, expected {given.num_tokens}")
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            view = buffer.view(name)
            checks.equal(name, view[:count], getattr(inputs, name), rank=rank, against="quantised tokens")
            rest = as_bits(view)[count:]
            checks.equal(name, rest, torch.full_like(rest, 7), rank=rank, against="what was there before")


def check_weight_transform(phase: Phase, checks: CaseChecks) -> None:
    """Gate and up rows alternate in eights, scales stay, and the inverse gives the natural weights back."""
    config = make_config(phase.ranks, shape=ODD, capacity=CAPACITY)
    half = config.intermediate_hidden
    for rank in phase.ranks.local:
        natural_l1, natural_l2 = natural_weights(config, rank)
        l1, l2 = make_weights(config, rank)
        for row in range(2 * half):
            group, place = divmod(row, 16)
            natural = 8 * group + place if place < 8 else half + 8 * group + place - 8
            same = torch.equal(as_bits(l1.weight)[:, row], as_bits(natural_l1[0])[:, natural])
            checks.require(same, f"rank {rank}: transformed L1 row {row} is not natural row {natural}")
        back_l1, back_l2 = untransform_weights_for_mega_moe(l1, l2)
        for name, found, expected in (
            ("l1 weight", back_l1[0], natural_l1[0]),
            ("l1 sf", back_l1[1], natural_l1[1]),
            ("l2 weight", back_l2[0], natural_l2[0]),
            ("l2 sf", back_l2[1], natural_l2[1]),
        ):
            same = torch.equal(as_bits(found), as_bits(expected))
            checks.require(same, f"rank {rank}: {name} is not what it was after the inverse")
        checks.require(torch.equal(l1.sf, natural_l1[1]), f"rank {rank}: the L1 scales moved")
        for tensor in (*l1, *l2):
            checks.require(tensor.is_contiguous() and tensor.data_ptr() % BULK_COPY_BYTES == 0, "alignment")


def check_empty_kernel(phase: Phase, checks: CaseChecks) -> None:
    """Launches that stop after the interface end, count epochs, and leave every view and y alone."""
    config = make_config(phase.ranks, shape=ODD, capacity=CAPACITY)
    buffers = phase.launcher.buffers(config)
    before = {rank: buffer.epoch for rank, buffer in buffers.items()}
    y = {
        rank: torch.full((NUM_TOKENS, config.hidden), 3.0, dtype=torch.bfloat16, device=buffer.device)
        for rank, buffer in buffers.items()
    }
    phase.ranks.barrier()
    for buffer in buffers.values():
        write_patterns(phase, buffer)
    for _ in range(3):
        for rank, buffer in buffers.items():
            launch_mega_moe(y[rank], *phase.launcher.weights(config, rank), buffer, stage=Stage.INTERFACE)
        wait(buffers.values())
    for rank, buffer in buffers.items():
        checks.require(
            buffer.epoch == before[rank] + 3, f"rank {rank}: epoch {buffer.epoch} after 3 launches from {before[rank]}"
        )
        compare_patterns(phase, checks, buffer, rank, "what was there before the launch")
        checks.require(bool((y[rank] == 3.0).all()), f"rank {rank}: an empty kernel wrote y")


def _refusal(bad: BadCall) -> str:
    """What is wrong with how a bad call was answered; "" if it was refused as it should be."""
    try:
        bad.call()
    except ValueError as error:
        missing = [word for word in bad.words if word not in str(error)]
        return f"{bad.name}: the message does not say {missing}: {error}" if missing else ""
    return f"{bad.name}: was not refused"


def check_bad_calls(phase: Phase, checks: CaseChecks) -> None:
    """Each is refused with a ValueError that names the argument, and nothing is launched."""
    config = make_config(phase.ranks, shape=ODD, capacity=CAPACITY)
    for rank, buffer in phase.launcher.buffers(config).items():
        before = buffer.epoch
        for bad in [*bad_calls(buffer, phase.launcher.weights(config, rank)), *bad_configs(config)]:
            problem = _refusal(bad)
            checks.require(not problem, f"rank {rank}: {problem}")
        buffer.check()
        checks.require(buffer.epoch == before, f"rank {rank}: a refused call was launched")


def check_different_configs(phase: Phase, checks: CaseChecks) -> None:
    """Rank 1 asks for another width: every rank is told which, and what the others asked for."""
    config = make_config(phase.ranks, shape=ODD, capacity=CAPACITY)
    own = replace(config, hidden=config.hidden + 128) if phase.ranks.process == 1 else config
    problem = _refusal(
        BadCall("different configs", lambda: open_buffer(phase.ranks, own), ("hidden", "640", "768", "rank 1"))
    )
    checks.require(not problem, f"rank {phase.ranks.process}: {problem}")


def check_closed_buffer(phase: Phase, checks: CaseChecks) -> None:
    """A closed buffer refuses views, filling and launches; a new one works in its place."""
    config = make_config(phase.ranks, capacity=CAPACITY, tiles=2)
    buffers = phase.launcher.buffers(config)
    phase.ranks.barrier()
    weights = {rank: phase.launcher.weights(config, rank) for rank in buffers}
    phase.launcher.close(config)
    for rank, buffer in buffers.items():
        y = torch.zeros(0, config.hidden, dtype=torch.bfloat16, device=buffer.device)
        calls: dict[str, Callable[[], object]] = {
            "view": partial(buffer.view, "x"),
            "check": buffer.check,
            "launch": partial(fp8_mega_moe, y, *weights[rank], buffer),
        }
        for name, call in calls.items():
            problem = _refusal(BadCall(name, call, ("sym_buffer", "closed")))
            checks.require(not problem, f"rank {rank}: closed buffer: {problem}")
    for rank, buffer in phase.launcher.buffers(config).items():
        write_patterns(phase, buffer)
        compare_patterns(phase, checks, buffer, rank, "what was written into the new buffer")


def make_cases(phase: Phase) -> CaseList:
    views = []
    # A target with one shape of tiles has it three times; one variant a granularity is enough there.
    for tiles, granularity in dict.fromkeys(zip(TILES[phase.ranks.target], (128, 64, 128), strict=True)):
        config = make_config(phase.ranks, shape=ODD, tiles=tiles, granularity=granularity, capacity=CAPACITY)
        name = f"views[block_m={tiles[0]},l2_sf_granularity={granularity}]"
        views.append(Variant(name, partial(check_views, config=config)))
    processes = phase.ranks.kind == "process"
    return {
        "views": views,
        "peer_views": [Variant("peer_views", check_peer_views)],
        "fill": [Variant("fill", check_fill)],
        "weight_transform": [Variant("weight_transform", check_weight_transform)],
        "empty_kernel": [Variant("empty_kernel", check_empty_kernel)],
        "bad_calls": [Variant("bad_calls", check_bad_calls)],
        "different_configs": [
            Variant(
                "different_configs",
                check_different_configs if processes else None,
                "" if processes else "the ranks of one process have one config",
            )
        ],
        "closed_buffer": [Variant("closed_buffer", check_closed_buffer)],
    }


if __name__ == "__main__":
    main(__file__, make_cases)
