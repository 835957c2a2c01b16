"""The bitwise list of DESIGN.md: y of two launches that must not differ by a bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megamoe import DebugWindow, MegaMoEConfig, VirtualGroup, launch_mega_moe
from megamoe.config import Accumulate
from megamoe.reference import as_bits
from phases.support.checks import CaseChecks
from phases.support.inputs import Tokens, Workload, concatenate, make_tokens, split
from phases.support.launches import Launch, Launcher, Options, wait
from phases.support.ranks import Ranks
from phases.support.runner import Phase
from phases.support.workloads import ODD, make_config

WORLD_SIZES = (1, 2, 4, 8)
EXPERTS = 8
"""Of the cases that change the number of ranks: divisible by all of them."""


def _case_config(phase: Phase, num_experts: int | None = None, accumulate: Accumulate = "fp32") -> MegaMoEConfig:
    return make_config(phase.ranks, tiles=2, num_experts=num_experts, accumulate=accumulate)


def _uneven(num_ranks: int, most: int = 12) -> tuple[int, ...]:
    """Token counts that differ from rank to rank."""
    return tuple(most - 5 * (rank % 3) for rank in range(num_ranks))


def _tokens(name: str, config: MegaMoEConfig, counts: Sequence[int]) -> list[Tokens]:
    return make_tokens(Workload(name, config, tuple(counts), masked=0.1))


def _compare(checks: CaseChecks, found: Mapping[int, Tensor], expected: Mapping[int, Tensor], against: str) -> None:
    for rank, y in found.items():
        checks.equal("y", y, expected[rank], rank=rank, against=against)


def all_answers(phase: Phase, launch: Launch) -> list[Tensor]:
    """y of every rank, also of those in other processes. Collective."""
    gathered: dict[int, Tensor] = {}
    for part in phase.ranks.gather({rank: y.cpu() for rank, y in launch.y.items()}):
        gathered |= part
    return [gathered[rank] for rank in range(phase.ranks.num_ranks)]


def virtual_answers(phase: Phase, config: MegaMoEConfig, tokens: Sequence[Tokens], workers: int) -> list[Tensor]:
    """y of every rank of a fresh virtual group with these inputs, all in this process, with so many workers a rank:
    threads, or CTAs of one GPU."""
    size, target = config.num_ranks, phase.ranks.target
    group = VirtualGroup(size, target, workers, num_gpus=1)
    launcher = Launcher(Ranks("virtual", target, size, tuple(range(size)), group, 0), max_ctas=workers)
    launch = launcher.launch(config, tokens)
    answers = [launch.y[rank].cpu() for rank in range(size)]
    launcher.close()
    return answers


def check_run_to_run(phase: Phase, checks: CaseChecks, *, accumulate: Accumulate) -> None:
    """The same inputs again, alone and three launches queued one behind the other."""
    config = _case_config(phase, accumulate=accumulate)
    tokens = _tokens("run_to_run", config, _uneven(phase.ranks.num_ranks))
    first = phase.launcher.launch(config, tokens)
    _compare(checks, phase.launcher.launch(config, tokens).y, first.y, "an earlier launch")
    phase.ranks.barrier()
    queued = [{rank: torch.full_like(y, torch.nan) for rank, y in first.y.items()} for _ in range(3)]
    for y in queued:
        for rank, buffer in first.buffers.items():
            launch_mega_moe(y[rank], *phase.launcher.weights(config, rank), buffer)
    wait(first.buffers.values())
    for y in queued:
        _compare(checks, y, first.y, "launches queued without waiting")


def check_tile_shapes(phase: Phase, checks: CaseChecks, *, granularity: int) -> None:
    """Every height and several widths of tiles; also widths that leave the last tile of a row narrower."""
    narrowest = 2 * granularity
    shapes = [(128, 256, 128), (64, 256, 256), (32, 512, 128), (128, 512, 384), (64, narrowest, 512)]
    base: Launch | None = None
    for tiles in shapes:
        config = make_config(phase.ranks, shape=ODD, tiles=tiles, granularity=granularity)
        tokens = _tokens("tile_shapes", config, _uneven(phase.ranks.num_ranks))
        launch = phase.launcher.launch(config, tokens)
        if base is None:
            base = launch
        else:
            _compare(checks, launch.y, base.y, f"tiles {shapes[0]}, here {tiles}")


def check_tile_heights(phase: Phase, checks: CaseChecks, *, granularity: int, accumulate: Accumulate) -> None:
    """The same tokens in tiles of few rows, and in tall ones because others' rows share their block; values whose
    exponents differ from column to column and from row to row as far as the formats go, so that the order of a sum
    shows."""
    ranks = phase.ranks
    config = make_config(
        ranks,
        shape=ODD,
        granularity=granularity,
        num_experts=ranks.num_ranks,
        num_topk=1,
        capacity=256,
        accumulate=accumulate,
    )
    few, more = (40,) * ranks.num_ranks, (200,) * ranks.num_ranks
    tokens = [_spread_exponents(given, 20) for given in _tokens("tile_heights", config, few)]
    extra = [_spread_exponents(given, 20) for given in _tokens("tile_heights, more", config, more)]
    tall = phase.launcher.launch(config, [concatenate(pair) for pair in zip(tokens, extra, strict=True)])
    # All ranks' rows go to an expert: with the extra tokens a full block and one more than half full, without them
    # about as many as a tile of that height holds.
    for height in (8, 16, 32, 64):
        taken = slice(0, max(1, height * 5 // 8))
        low = phase.launcher.launch(config, [given.rows(taken) for given in tokens])
        _compare(
            checks,
            {rank: tall.y[rank][: len(y)] for rank, y in low.y.items()},
            low.y,
            f"about {taken.stop} rows an expert, here tall tiles",
        )


def _spread_exponents(given: Tokens, spread: int) -> Tokens:
    """x times powers of two up to 2**(spread / 2) either way, in an order that differs from row to row."""
    rows, columns = given.x.shape
    steps = (torch.arange(rows).unsqueeze(1) * 7 + torch.arange(columns) * 11) % (spread + 1) - spread // 2
    return replace(given, x=(given.x.float() * torch.exp2(steps.float())).to(torch.bfloat16))


def check_world_sizes(phase: Phase, checks: CaseChecks, *, accumulate: Accumulate) -> None:
    """The same tokens and experts over 1, 2, 4 and 8 ranks: of this group, and virtual ones in the first process."""
    most = max(WORLD_SIZES)
    total = 5 * most
    config = _case_config(phase, num_experts=EXPERTS, accumulate=accumulate)
    own_counts = _shares(total, phase.ranks.num_ranks)
    tokens = _tokens("world_sizes", config, own_counts)
    own = torch.cat(all_answers(phase, phase.launcher.launch(config, tokens)))
    if phase.ranks.process != 0:
        checks.require(own.shape[0] == total, f"{own.shape[0]} rows of y came together, expected {total}")
        return
    everything = concatenate(tokens)
    for size in WORLD_SIZES:
        other = replace(config, num_ranks=size)
        answers = virtual_answers(phase, other, split(everything, _shares(total, size)), workers=1)
        checks.equal("y", torch.cat(answers), own, rank=0, against=f"{phase.ranks.num_ranks} ranks, here {size}")


def _shares(total: int, num_ranks: int) -> list[int]:
    """Uneven shares of the tokens: the first rank has more, unless it is alone."""
    share = total // num_ranks
    extra = share // 2 if num_ranks > 1 else 0
    return [share + extra, *[share] * (num_ranks - 2), *([share - extra] if num_ranks > 1 else [])]


def check_group_kinds(phase: Phase, checks: CaseChecks) -> None:
    """Ranks as processes, or this virtual group, against a fresh virtual group with another number of workers."""
    config = _case_config(phase)
    tokens = _tokens("group_kinds", config, _uneven(phase.ranks.num_ranks))
    answers = all_answers(phase, phase.launcher.launch(config, tokens))
    if phase.ranks.process != 0:
        checks.require(len(answers) == phase.ranks.num_ranks, "y of every rank came together")
        return
    for rank, y in enumerate(virtual_answers(phase, config, tokens, workers=2)):
        checks.equal("y", y, answers[rank], rank=rank, against=f"ranks that are {phase.ranks.kind}, here virtual")


def check_permutation(phase: Phase, checks: CaseChecks) -> None:
    """Tokens in another order, over all ranks: y in that order."""
    config = _case_config(phase)
    counts = _uneven(phase.ranks.num_ranks)
    tokens = _tokens("permutation", config, counts)
    before = torch.cat(all_answers(phase, phase.launcher.launch(config, tokens)))
    order = torch.randperm(len(before), generator=torch.Generator().manual_seed(6))
    permuted = phase.launcher.launch(config, split(concatenate(tokens).rows(order), counts))
    expected = before[order].split(list(counts))
    _compare(checks, permuted.y, dict(enumerate(expected)), "permuted y of the tokens in order")


def check_added_tokens(phase: Phase, checks: CaseChecks) -> None:
    """More tokens on this rank and on the others, or none on the others: the rows that were there do not change."""
    config = _case_config(phase)
    num_ranks = phase.ranks.num_ranks
    counts = _uneven(num_ranks)
    tokens = _tokens("added_tokens", config, counts)
    base = phase.launcher.launch(config, tokens)
    extra = _tokens("added_tokens, more", config, [4 + 7 * rank % 20 for rank in range(num_ranks)])
    more = phase.launcher.launch(config, [concatenate(pair) for pair in zip(tokens, extra, strict=True)])
    _compare(checks, {rank: y[: counts[rank]] for rank, y in more.y.items()}, base.y, "fewer tokens everywhere")
    for alone in {0, num_ranks - 1}:
        only = [given if rank == alone else given.rows(slice(0)) for rank, given in enumerate(tokens)]
        launch = phase.launcher.launch(config, only)
        if alone in launch.y:
            checks.equal("y", launch.y[alone], base.y[alone], rank=alone, against="tokens on the other ranks too")


def check_debug_output(phase: Phase, checks: CaseChecks) -> None:
    """L1 accumulators written or not: the same y; and without debug output nobody touches their view."""
    config = _case_config(phase)
    tokens = _tokens("debug_output", config, _uneven(phase.ranks.num_ranks))
    off = phase.launcher.launch(config, tokens)
    for rank, buffer in off.buffers.items():
        untouched = bool((as_bits(buffer.l1_accum_debug) == -1).all())
        checks.require(untouched, f"rank {rank}: l1_accum_debug was written without debug output")
    on = phase.launcher.launch(config, tokens, Options(windows=dict.fromkeys(off.y, DebugWindow(0, 1))))
    _compare(checks, on.y, off.y, "debug output off")
    for rank, buffer in on.buffers.items():
        routes = int((buffer.view("expert_recv_count_sum").view(torch.int64) & 0xFFFFFFFF).sum())
        written = bool((as_bits(buffer.l1_accum_debug) != -1).any())
        checks.require(written == (routes > 0), f"rank {rank}: l1_accum_debug written: {written}, {routes} routes")
