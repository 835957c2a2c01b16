"""Tokens that are not numbers and ids that no expert has: their rows are NaN, and no other row changes by a bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megamoe import MegaMoEConfig, MegaMoEFault
from megamoe.faults import FaultKind
from phases.support.checks import CaseChecks
from phases.support.inputs import Tokens, Workload, make_tokens
from phases.support.launches import Launch
from phases.support.numeric import compare_answers
from phases.support.runner import Phase
from phases.support.workloads import make_config

TOKENS = 12


def _start(phase: Phase, name: str) -> tuple[MegaMoEConfig, list[Tokens]]:
    config = make_config(phase.ranks, tiles=2)
    return config, make_tokens(Workload(name, config, (TOKENS,) * config.num_ranks))


def _compare_rows(checks: CaseChecks, launch: Launch, clean: Launch, bad: Sequence[Tensor], why: str) -> None:
    """Rows named in ``bad`` (bool [n] for each rank) are NaN in every column; all others are those of ``clean``."""
    for rank, y in launch.y.items():
        found, expected = y.cpu(), clean.y[rank].cpu()
        checks.require(not bool(expected.isnan().any()), f"rank {rank}: y of the clean launch has NaN")
        checks.equal("y", found, expected.masked_fill(bad[rank].unsqueeze(1), torch.nan), rank=rank, against=why)


def check_non_finite(phase: Phase, checks: CaseChecks) -> None:
    """NaN, +inf and -inf in x, in one column or in all of them; one such token has all its routes masked."""
    config, tokens = _start(phase, "non_finite")
    hidden = config.hidden
    spots: list[tuple[int, slice, float]] = [
        (1, slice(0, 1), torch.nan),
        (4, slice(hidden - 1, hidden), torch.inf),
        (5, slice(130, 131), -torch.inf),
        (9, slice(None), torch.nan),
        (11, slice(None), torch.inf),
    ]
    masked_token = 7
    edited, without = [], []
    for given in tokens:
        x, ids = given.x.clone(), given.topk_idx.clone()
        ids[masked_token] = -1
        without.append(replace(given, topk_idx=ids))
        for token, columns, value in [*spots, (masked_token, slice(None), torch.nan)]:
            x[token, columns] = value
        edited.append(replace(given, x=x, topk_idx=ids))
    bad = torch.zeros(TOKENS, dtype=torch.bool)
    bad[[token for token, _, _ in spots]] = True
    clean = phase.launcher.launch(config, without)
    launch = phase.launcher.launch(config, edited)
    _compare_rows(checks, launch, clean, [bad] * config.num_ranks, "NaN in those rows, else the clean launch")
    compare_answers(phase, checks, launch)


def check_bad_id(phase: Phase, checks: CaseChecks) -> None:
    """Ids of E and more: a fault in words on that rank alone, that token's row NaN, and no reset needed."""
    config, tokens = _start(phase, "bad_id")
    # On every other rank, so that with several ranks some have nothing to report.
    spots = [(2, 0, config.num_experts), (5, 1, config.num_experts + 3), (8, config.num_topk - 1, 1 << 40)]
    guilty = [rank for rank in range(config.num_ranks) if rank % 2 == 0]
    edited, without = [], []
    for rank, given in enumerate(tokens):
        ids, masked = given.topk_idx.clone(), given.topk_idx.clone()
        for token, slot, value in spots if rank in guilty else []:
            ids[token, slot], masked[token, slot] = value, -1
        edited.append(replace(given, topk_idx=ids))
        without.append(replace(given, topk_idx=masked))
    bad = [
        torch.tensor([rank in guilty and token in {spot[0] for spot in spots} for token in range(TOKENS)])
        for rank in range(config.num_ranks)
    ]
    clean = phase.launcher.launch(config, without)
    launch = phase.launcher.prepare(config, edited)
    phase.launcher.queue(launch)
    for rank in launch.buffers:
        _check_report(checks, launch, rank, spots if rank in guilty else [])
    _compare_rows(checks, launch, clean, bad, "NaN in those rows, else the routes masked")
    again = phase.launcher.launch(config, without)
    for rank, y in again.y.items():
        checks.equal("y", y, clean.y[rank], rank=rank, against="before the fault")


def _check_report(checks: CaseChecks, launch: Launch, rank: int, spots: Sequence[tuple[int, int, int]]) -> None:
    """Wait for a rank: one input fault a bad id and nothing else, with words that name token, slot and id."""
    fault: MegaMoEFault | None = None
    try:
        launch.buffers[rank].check()
    except MegaMoEFault as raised:
        fault = raised
    if fault is None or not spots:
        checks.require((fault is None) == (not spots), f"rank {rank}: {len(spots)} bad ids, and the fault: {fault}")
        return
    num_experts = launch.config.num_experts
    kinds = {found.kind for found in fault.faults}
    checks.require(kinds == {FaultKind.INPUT}, f"rank {rank}: kinds of faults {kinds}, expected input")
    checks.require(len(fault.faults) == len(spots), f"rank {rank}: {len(fault.faults)} faults, expected {len(spots)}")
    checks.require(fault.aborted_epoch == 0, f"rank {rank}: an input fault aborted the group: {fault}")
    for token, slot, value in spots:
        words = (f"rank {rank}: token {token} slot {slot} ", f"names expert {value}, ", f"{num_experts} experts")
        missing = [word for word in words if word not in str(fault)]
        checks.require(not missing, f"rank {rank}: the fault does not say {missing}: {fault}")
