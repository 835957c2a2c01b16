"""The counters and flags of a buffer in words: what a rank has done in a launch, and what it still waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.buffer import SymmBuffer
from megamoe.layout import CLAIM_NAMES, NUM_BANKS

MAX_LISTED = 16
"""Entries of one kind that are listed one by one; the rest is counted."""

_CLAIM_WORDS = {
    "count_chunk": "routing chunks claimed for counting",
    "counted_chunks": "chunks counted",
    "list_chunk": "chunks claimed for listing",
    "listed_chunks": "chunks listed",
    "table": "workers that came for the block table",
    "pull": "runs of rows claimed for pulling",
    "tile": "tiles claimed",
    "combine": "tokens claimed for combining",
    "clear": "pieces of the other bank claimed for clearing",
    "exited_workers": "workers that left",
}


@dataclass(frozen=True)
class _Counters:
    """One look at a buffer, as Python integers. ``epoch`` is the launch under way, else the last that ended."""

    epoch: int
    under_way: bool
    abort: int
    claims: list[int]
    route_stamps: list[list[int]]
    table_stamp: int
    num_blocks: int
    blocks: list[list[int]]
    arrived: list[int]
    masks: list[list[int]]
    progress: list[int]
    received: list[int]
    done_stamps: list[int]


def describe_counters(buffer: SymmBuffer) -> str:
    """What the counters and flags of one rank's buffer say, in words, without waiting for anything.

    Can be called at any moment, also while a launch runs or hangs: it then shows that launch's bank.

    Args:
        buffer: an open buffer; only this rank's memory is read.

    Returns:
        Lines: state, faults, routes published by each source, block table, claims, arrival and L1 tiles of the pool
        blocks, progress of the local experts, experts that this rank's tokens still wait for.

    Raises:
        ValueError: the buffer is closed.
    """
    seen = _read(buffer)
    config = buffer.config
    state = "under way" if seen.under_way else "ended, none under way"
    lines = [f"rank {buffer.rank} of {config.num_ranks}: epoch {seen.epoch} {state}"]
    if seen.abort:
        lines.append(f"aborted in epoch {seen.abort}")
    lines += [f"fault: {fault.describe(config)}" for fault in buffer.read_faults()]
    lines.append(_describe_routes(seen))
    lines.append(
        f"block table: ready, {seen.num_blocks} pool blocks in use"
        if seen.table_stamp == seen.epoch
        else f"block table: not built for epoch {seen.epoch} (last for epoch {seen.table_stamp})"
    )
    lines.append("claims: " + ", ".join(f"{count} {_CLAIM_WORDS[name]}" for name, count in _named_claims(seen)))
    if seen.table_stamp == seen.epoch:
        lines += _describe_blocks(buffer, seen)
        lines += _describe_experts(buffer, seen)
    lines.append(_describe_done(buffer, seen))
    return "\n".join(line if number == 0 else "  " + line for number, line in enumerate(lines))


def _named_claims(seen: _Counters) -> list[tuple[str, int]]:
    return list(zip(CLAIM_NAMES, seen.claims, strict=True))


def _words(buffer: SymmBuffer, name: str, bank: int | None = None) -> Tensor:
    """A region of unsigned words as int64 on the CPU; of a banked one the bank asked for."""
    whole = buffer.layout[name]
    view = buffer.view(name)
    if bank is not None:
        # view() shows the bank of the last launch that ended; the other one lies a bank's stride before or after it.
        shown = buffer.epoch % NUM_BANKS
        view = view.as_strided(view.shape, view.stride(), view.storage_offset() + (bank - shown) * whole.strides[0])
    signed = {4: torch.int32, 8: torch.int64}[view.element_size()]
    values = view.view(signed).cpu().long()
    return values & 0xFFFFFFFF if signed == torch.int32 else values


def _read(buffer: SymmBuffer) -> _Counters:
    under_way = int(_words(buffer, "in_use")[0]) != 0
    epoch = buffer.epoch + under_way
    bank = epoch % NUM_BANKS
    table = int(_words(buffer, "table_ready")[0])
    num_blocks = min(table & 0xFFFFFFFF, buffer.config.num_pool_blocks)
    return _Counters(
        epoch=epoch,
        under_way=under_way,
        abort=int(_words(buffer, "abort")[0]),
        claims=_words(buffer, "claims", bank)[:, 0].tolist(),
        route_stamps=(_words(buffer, "route_count") >> 32).tolist(),
        table_stamp=table >> 32,
        num_blocks=num_blocks,
        blocks=_words(buffer, "pool_blocks")[:num_blocks].tolist(),
        arrived=_words(buffer, "l1_arrival_count", bank)[:num_blocks].tolist(),
        masks=_words(buffer, "l2_arrival_mask", bank)[:num_blocks].tolist(),
        progress=_words(buffer, "expert_progress", bank).tolist(),
        received=(_words(buffer, "expert_recv_count_sum") & 0xFFFFFFFF).tolist(),
        done_stamps=(_words(buffer, "expert_done") >> 32).tolist(),
    )


def _listed(entries: Sequence[str]) -> str:
    more = f", and {len(entries) - MAX_LISTED} more" if len(entries) > MAX_LISTED else ""
    return ", ".join(entries[:MAX_LISTED]) + more


def _describe_routes(seen: _Counters) -> str:
    late = [
        f"rank {source} (last for epoch {min(stamps)})"
        for source, stamps in enumerate(seen.route_stamps)
        if min(stamps) < seen.epoch
    ]
    if not late:
        return f"routes: published here by all {len(seen.route_stamps)} ranks for epoch {seen.epoch}"
    return f"routes: not published here for epoch {seen.epoch} by " + _listed(late)


def _describe_blocks(buffer: SymmBuffer, seen: _Counters) -> list[str]:
    tiles = buffer.config.num_l1_tiles
    first_expert = buffer.rank * buffer.config.experts_per_rank
    lacking = []
    for block, ((expert, rows), arrived, mask) in enumerate(zip(seen.blocks, seen.arrived, seen.masks, strict=True)):
        words = [word & 0xFFFFFFFFFFFFFFFF for word in mask]
        stored = sum(word.bit_count() for word in words)
        if arrived != rows or stored != tiles:
            lacking.append(
                f"block {block} (expert {first_expert + expert}): {arrived} of {rows} rows arrived, {stored} of "
                f"{tiles} L1 tiles stored (mask {' '.join(f'{word:#x}' for word in words)})"
            )
    complete = len(seen.blocks) - len(lacking)
    lines = [f"pool blocks: {complete} of {len(seen.blocks)} have all rows and all L1 tiles", *lacking[:MAX_LISTED]]
    if len(lacking) > MAX_LISTED:
        lines.append(f"and {len(lacking) - MAX_LISTED} more blocks that lack something")
    return lines


def _describe_experts(buffer: SymmBuffer, seen: _Counters) -> list[str]:
    config = buffer.config
    entries = []
    for local, (received, steps) in enumerate(zip(seen.received, seen.progress, strict=True)):
        if received == 0:
            continue
        num_blocks = sum(expert == local for expert, _ in seen.blocks)
        entries.append(
            f"expert {buffer.rank * config.experts_per_rank + local}: {received} routes, {steps} steps done of "
            f"{num_blocks * config.num_l2_tiles} L2 tiles (or of {received} rows in a launch that stops before L2)"
        )
    shown = entries[:MAX_LISTED]
    if len(entries) > MAX_LISTED:
        shown.append(f"and {len(entries) - MAX_LISTED} more experts with routes")
    return shown


def _describe_done(buffer: SymmBuffer, seen: _Counters) -> str:
    config = buffer.config
    told = [expert for expert, stamp in enumerate(seen.done_stamps) if stamp >= seen.epoch]
    wanted = sorted(
        {
            expert
            for expert in buffer.view("topk_idx").cpu().reshape(-1).tolist()
            if 0 <= expert < config.num_experts and seen.done_stamps[expert] < seen.epoch
        }
    )
    if not wanted:
        return f"experts done: {len(told)} told this rank for epoch {seen.epoch}; no id in topk_idx waits"
    entries = [
        f"expert {expert} of rank {config.rank_of_expert(expert)} (last for epoch {seen.done_stamps[expert]})"
        for expert in wanted
    ]
    return (
        f"experts done: {len(told)} told this rank for epoch {seen.epoch}; named in topk_idx (rows beyond the launch's "
        "tokens too) and not told: " + _listed(entries)
    )
