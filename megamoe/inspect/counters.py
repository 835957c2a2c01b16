"""The counters and flags of a buffer in words: what a rank has done in a launch, and what it still waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megamoe.faults import Fault, decode_fault_records
from megamoe.inspect.image import Image, NotSaved
from megamoe.inspect.rows import PoolState, describe_missing_rows
from megamoe.layout import CLAIM_LINE_WORDS, CLAIM_NAMES, FAULT_RECORD, NUM_BANKS

MAX_LISTED = 16
"""Entries of one kind that are listed one by one; the rest is counted."""

CLAIM_WORDS = {
    "count_chunk": "routing chunks claimed for counting",
    "counted_chunks": "chunks counted",
    "list_chunk": "chunks claimed for listing",
    "listed_chunks": "chunks listed",
    "table": "workers that came for the block table",
    "pull": "runs of rows claimed for pulling",
    "tile": "tiles claimed",
    "combine": "parts of tokens claimed for combining",
    "clear": "pieces of the other bank claimed for clearing",
    "exited_workers": "workers that left",
}


def _rows(flat: Sequence[int], length: int) -> list[list[int]]:
    return [list(flat[first : first + length]) for first in range(0, len(flat), length)]


@dataclass(frozen=True)
class Counters:
    """One look at a buffer, as Python integers. ``epoch`` is the launch under way, else the last that ended."""

    image: Image
    epoch: int
    under_way: bool
    abort: int
    faults: Sequence[Fault]
    broken_faults: str
    claims: Mapping[str, int]
    route_stamps: Sequence[Sequence[int]]
    table_stamp: int
    blocks: Sequence[Sequence[int]]
    arrived: Sequence[int]
    masks: Sequence[Sequence[int]]
    progress: Sequence[int]
    received: Sequence[int]
    done_stamps: Sequence[int]

    @property
    def has_table(self) -> bool:
        return self.table_stamp == self.epoch

    @property
    def late_sources(self) -> list[int]:
        """Ranks whose routes for this epoch are not here."""
        return [source for source, stamps in enumerate(self.route_stamps) if min(stamps) < self.epoch]

    @property
    def pool(self) -> PoolState:
        return PoolState(self.blocks, self.claims["pull"])

    def lacks(self, block: int) -> tuple[bool, bool]:
        """Whether a block lacks (rows, L1 tiles)."""
        stored = sum(word.bit_count() for word in self.masks[block])
        return self.arrived[block] != self.blocks[block][1], stored != self.image.config.num_l1_tiles


def _read_faults(image: Image) -> tuple[Sequence[Fault], str]:
    """(faults, why there are none to be had). Records that something overwrote must not hide the rest."""
    records = _rows(image.words("fault_records"), FAULT_RECORD.num_words)
    try:
        return decode_fault_records(image.word("fault_count"), records), ""
    except ValueError as error:
        return (), str(error)


def read_counters(image: Image) -> Counters:
    """Look once, without waiting. What is read while a launch runs may be of slightly different moments."""
    config = image.config
    under_way = image.is_under_way
    epoch = image.word("epoch") + under_way
    bank = epoch % NUM_BANKS
    table = image.word("table_ready")
    num_blocks = min(table & 0xFFFFFFFF, config.num_pool_blocks)
    claims = image.words("claims", bank)[::CLAIM_LINE_WORDS]
    masks = _rows(image.words("l2_arrival_mask", bank), config.num_mask_words)
    faults, broken_faults = _read_faults(image)
    return Counters(
        image=image,
        epoch=epoch,
        under_way=under_way,
        abort=image.word("abort"),
        faults=faults,
        broken_faults=broken_faults,
        claims=dict(zip(CLAIM_NAMES, claims, strict=True)),
        route_stamps=[
            [word >> 32 for word in row] for row in _rows(image.words("route_count"), config.experts_per_rank)
        ],
        table_stamp=table >> 32,
        blocks=_rows(image.words("pool_blocks"), 2)[:num_blocks],
        arrived=image.words("l1_arrival_count", bank)[:num_blocks],
        masks=masks[:num_blocks],
        progress=image.words("expert_progress", bank),
        received=[word & 0xFFFFFFFF for word in image.words("expert_recv_count_sum")],
        done_stamps=[word >> 32 for word in image.words("expert_done")],
    )


def describe_image(image: Image, peers: Mapping[int, Image] | None = None) -> str:
    """What the counters and flags of one rank's buffer say, in words.

    Args:
        image: the rank's buffer.
        peers: buffers of the group by rank, as far as they can be read: their route lists name the rows that are
            missing. None: this rank's alone.

    Returns:
        Lines: state, faults, routes published by each source, block table, claims, arrival and L1 tiles of the pool
        blocks, progress of the local experts, experts that this rank's tokens still wait for.
    """
    return describe_seen(read_counters(image), {image.rank: image, **(peers or {})})


def describe_seen(seen: Counters, peers: Mapping[int, Image]) -> str:
    """`describe_image` of counters that were read already."""
    image = seen.image
    state = "under way" if seen.under_way else "ended, none under way"
    launch = f"epoch {seen.epoch} {state}" if seen.epoch else "no launch yet"
    lines = [f"rank {image.rank} of {image.config.num_ranks}: {launch}"]
    if seen.abort:
        lines.append(f"aborted in epoch {seen.abort}")
    lines += [f"fault: {fault.describe(image.config)}" for fault in seen.faults]
    if seen.broken_faults:
        lines.append(f"faults: their records were overwritten: {seen.broken_faults}")
    if seen.epoch:
        lines += _describe_launch(seen, peers)
    return "\n".join(line if number == 0 else "  " + line for number, line in enumerate(lines))


def _describe_launch(seen: Counters, peers: Mapping[int, Image]) -> list[str]:
    lines = [_describe_routes(seen)]
    lines.append(
        f"block table: ready, {len(seen.blocks)} pool blocks in use"
        if seen.has_table
        else f"block table: not built for epoch {seen.epoch} (last for epoch {seen.table_stamp})"
    )
    lines.append("claims: " + ", ".join(f"{count} {CLAIM_WORDS[name]}" for name, count in seen.claims.items()))
    if seen.has_table:
        lines += _describe_blocks(seen, peers)
        lines += _describe_experts(seen)
    return [*lines, _describe_done(seen)]


def _listed(entries: Sequence[str]) -> str:
    more = f", and {len(entries) - MAX_LISTED} more" if len(entries) > MAX_LISTED else ""
    return ", ".join(entries[:MAX_LISTED]) + more


def _describe_routes(seen: Counters) -> str:
    late = [f"rank {source} (last for epoch {min(seen.route_stamps[source])})" for source in seen.late_sources]
    if not late:
        return f"routes: published here by all {len(seen.route_stamps)} ranks for epoch {seen.epoch}"
    return f"routes: not published here for epoch {seen.epoch} by " + _listed(late)


def _describe_blocks(seen: Counters, peers: Mapping[int, Image]) -> list[str]:
    config = seen.image.config
    first_expert = seen.image.rank * config.experts_per_rank
    lacking = [block for block in range(len(seen.blocks)) if any(seen.lacks(block))]
    lines = [
        f"pool blocks: {len(seen.blocks) - len(lacking)} of {len(seen.blocks)} have all rows and all L1 tiles",
    ]
    # What lacks rows first: of the other blocks a launch that is stopped early may have many.
    listed = sorted(lacking, key=lambda block: seen.arrived[block] == seen.blocks[block][1])[:MAX_LISTED]
    for block in sorted(listed):
        (expert, rows), words = seen.blocks[block], seen.masks[block]
        stored = sum(word.bit_count() for word in words)
        lines.append(
            f"block {block} (expert {first_expert + expert}): {seen.arrived[block]} of {rows} rows arrived, {stored} "
            f"of {config.num_l1_tiles} L1 tiles stored (mask {' '.join(f'{word:#x}' for word in words)})"
        )
        if seen.arrived[block] != rows:
            missing = describe_missing_rows(seen.image, peers, seen.pool, block, seen.arrived[block])
            lines.append(f"  {missing}")
    if len(lacking) > MAX_LISTED:
        lines.append(f"and {len(lacking) - MAX_LISTED} more blocks that lack something")
    return lines


def _describe_experts(seen: Counters) -> list[str]:
    config = seen.image.config
    entries = []
    for local, (received, steps) in enumerate(zip(seen.received, seen.progress, strict=True)):
        if received == 0:
            continue
        num_blocks = sum(expert == local for expert, _ in seen.blocks)
        entries.append(
            f"expert {seen.image.rank * config.experts_per_rank + local}: {received} routes, {steps} steps done of "
            f"{num_blocks * config.num_l2_tiles} L2 tiles (or of {received} rows in a launch that stops before L2)"
        )
    shown = entries[:MAX_LISTED]
    if len(entries) > MAX_LISTED:
        shown.append(f"and {len(entries) - MAX_LISTED} more experts with routes")
    return shown


def _describe_done(seen: Counters) -> str:
    config = seen.image.config
    told = sum(stamp >= seen.epoch for stamp in seen.done_stamps)
    start = f"experts done: {told} told this rank for epoch {seen.epoch}"
    try:
        named = set(seen.image.words("topk_idx"))
    except NotSaved as missing:
        return f"{start}; which its tokens name cannot be told: {missing}"
    wanted = sorted(
        expert for expert in named if 0 <= expert < config.num_experts and seen.done_stamps[expert] < seen.epoch
    )
    if not wanted:
        return f"{start}; no id in topk_idx waits"
    entries = [
        f"expert {expert} of rank {config.rank_of_expert(expert)} (last for epoch {seen.done_stamps[expert]})"
        for expert in wanted
    ]
    return f"{start}; named in topk_idx (rows beyond the launch's tokens too) and not told: " + _listed(entries)
