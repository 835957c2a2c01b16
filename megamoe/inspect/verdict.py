"""Who holds up a group: one line from the counters of all its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megamoe.inspect.counters import Counters


def find_culprit(ranks: Mapping[int, Counters], num_ranks: int) -> str:
    """What the counters of a group's ranks come to, in one line: the first fault, who has not launched, or what the
    launch under way lacks. ``ranks`` holds those whose memory could be read."""
    faults = [fault for seen in ranks.values() for fault in seen.faults]
    if faults:
        first = min(faults, key=lambda fault: (fault.epoch, fault.wait))  # waits are numbered from cause to effect
        more = f" (and {len(faults) - 1} more records)" if len(faults) > 1 else ""
        return first.describe(next(iter(ranks.values())).image.config) + more
    under_way = {rank: seen for rank, seen in ranks.items() if seen.under_way}
    if not under_way:
        return "no launch is under way and no fault is on record"
    epoch = max(seen.epoch for seen in under_way.values())
    unread = [rank for rank in range(num_ranks) if rank not in ranks]
    absent = [rank for rank, seen in ranks.items() if seen.epoch < epoch]
    awaited = sorted({rank for seen in under_way.values() for rank in seen.late_sources})
    behind = sorted(set(awaited) & {*absent, *unread})
    waiting = [rank for rank, seen in under_way.items() if seen.late_sources]
    if behind:
        verb = "waits" if len(waiting) == 1 else "wait"
        return f"{ranks_words(waiting)} {verb} in epoch {epoch} for {ranks_words(behind)}, which did not launch it"
    if awaited:
        return f"{ranks_words(awaited)} launched epoch {epoch} and did not publish the routes that others wait for"
    return _describe_work(under_way, epoch)


def _describe_work(under_way: Mapping[int, Counters], epoch: int) -> str:
    for rank, seen in under_way.items():
        if not seen.has_table:
            return f"rank {rank} has all routes of epoch {epoch} and has not built its block table"
        for block in range(len(seen.blocks)):
            lacks_rows, lacks_tiles = seen.lacks(block)
            if lacks_rows:
                rows = f"{seen.arrived[block]} of {seen.blocks[block][1]} rows"
                return f"rank {rank} has pulled {rows} of its pool block {block} in epoch {epoch}"
            if lacks_tiles:
                return f"rank {rank} lacks L1 tiles of its pool block {block} in epoch {epoch}"
    return f"{ranks_words(list(under_way))} have all rows and L1 tiles of epoch {epoch}: it is L2, done or combine"


def ranks_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 2``, ``ranks 0, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return "ranks " + ", ".join(map(str, ordered))
