"""The pairs of pool blocks that the host target builds, and their groups, against an independent statement of both.

One thread builds them here, one local expert after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import megamoe
from megamoe import MegaMoEConfig, MegaMoEFault, Stage, SymmBuffer, VirtualGroup, VirtualSymmBuffer
from megamoe.faults import FaultKind
from tests.layers import Batch, Weights, draw_weights, open_buffer, small_config

UNPAIRED = 0xFFFFFFFF
FEW_BLOCKS = 2
"""Blocks an expert, on average, up to which nothing is built."""
OWN_GROUP, MOST_PAIRS, GROUP_PAIRS = 5, 12, 8
"""Pairs from which on an expert starts a group, that it has in one, and between the starts of others."""

Rows = list[list[int]]
"""Routes of each local expert, by owner."""
Pair = tuple[int, int]
Block = tuple[int, int]
"""Local expert, rows."""


# --- what is expected ------------------------------------------------------------------------------------------------


def expected_blocks(rows: Sequence[int], block_m: int) -> list[Block]:
    return [
        (expert, min(block_m, count - first)) for expert, count in enumerate(rows) for first in range(0, count, block_m)
    ]


def expected_pairs(blocks: Sequence[Block], block_m: int) -> tuple[list[list[Pair]], list[Pair]]:
    """Pairs of each expert with rows, those it closes included; and the pair of what is over at the end, if any is."""
    waiting: dict[str, int] = {}
    of_experts: list[list[Pair]] = []
    for _, numbered in groupby(enumerate(blocks), key=lambda numbered: numbered[1][0]):
        kinds: dict[str, list[int]] = {"tall": [], "short": []}
        for block, (_, rows) in numbered:
            kinds["tall" if 2 * rows > block_m else "short"].append(block)
        pairs = []
        for members in kinds.values():
            while len(members) >= 2:
                pairs.append((members.pop(0), members.pop(0)))
        for kind, members in kinds.items():
            if members and kind in waiting:
                pairs.append((waiting.pop(kind), members[0]))
            elif members:
                waiting[kind] = members[0]
        of_experts.append(pairs)
    over = [waiting[kind] for kind in ("tall", "short") if kind in waiting]
    return of_experts, [(over[0], over[1] if len(over) == 2 else UNPAIRED)] if over else []


def expected_starts(of_experts: Sequence[Sequence[Pair]]) -> list[int]:
    """First pairs of the groups. What is over at the end starts none."""
    starts: list[int] = []
    first = 0
    for pairs in of_experts:
        mine = range(first, first + len(pairs))
        if len(mine) >= OWN_GROUP:
            starts += mine[:: math.ceil(len(mine) / math.ceil(len(mine) / MOST_PAIRS))]
        elif any(pair % GROUP_PAIRS == 0 for pair in mine):
            starts.append(first)
        first = mine.stop
    return starts


# --- what was built --------------------------------------------------------------------------------------------------


def words(buffer: SymmBuffer, name: str) -> list[int]:
    return [int(word) for word in buffer.view(name).flatten().tolist()]


def two_by_two(values: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(values[::2], values[1::2], strict=True))


@dataclass(frozen=True)
class Built:
    """What a rank's table has after a launch."""

    blocks: list[Block]
    pairs: list[Pair]
    starts: list[int]
    """First pair of each group."""
    rest: list[int]
    """Words of both regions behind the last pair and group."""

    @classmethod
    def read(cls, buffer: SymmBuffer, epoch: int) -> Built:
        (ready,) = words(buffer, "table_ready")
        assert ready >> 32 == epoch
        blocks = two_by_two(words(buffer, "pool_blocks"))[: ready & 0xFFFFFFFF]
        num_groups, *groups = words(buffer, "pair_groups")
        assert num_groups < len(groups)
        num_pairs = groups[num_groups]
        pair_words = words(buffer, "pair_blocks")
        assert 2 * num_pairs <= len(pair_words)
        rest = [*pair_words[2 * num_pairs :], *groups[num_groups + 1 :]]
        return cls(blocks, two_by_two(pair_words[: 2 * num_pairs]), groups[:num_groups], rest)


def check_rules(built: Built, block_m: int) -> None:
    """What must hold whichever block is paired with which."""
    blocks, pairs = built.blocks, built.pairs
    members = [block for pair in pairs for block in pair if block != UNPAIRED]
    assert sorted(members) == list(range(len(blocks))), "every block is in one pair"
    assert all(UNPAIRED not in pair for pair in pairs[:-1])
    assert pairs[-1][0] != UNPAIRED

    tall = [2 * rows > block_m for _, rows in blocks]
    num_tall, num_short = tall.count(True), tall.count(False)
    over = num_tall % 2 + num_short % 2
    assert len(pairs) == num_tall // 2 + num_short // 2 + (over > 0)
    of_one_kind = pairs[:-1] if over else pairs
    assert all(tall[first] == tall[second] for first, second in of_one_kind)
    num_tall_of = Counter(expert for (expert, _), is_tall in zip(blocks, tall, strict=True) if is_tall)
    own = Counter(blocks[first][0] for first, second in of_one_kind if blocks[first][0] == blocks[second][0])
    assert all(own[expert] == number // 2 for expert, number in num_tall_of.items())
    assert own.total() == sum(number // 2 for number in num_tall_of.values())

    assert built.starts[0] == 0
    ends = [*built.starts[1:], len(pairs)]
    assert all(start < end for start, end in zip(built.starts, ends, strict=True))
    closed_by = [blocks[second][0] for _, second in of_one_kind]
    assert closed_by == sorted(closed_by), "pairs are in order of experts"
    large = {expert for expert, number in Counter(closed_by).items() if number >= OWN_GROUP}
    assert {closed_by.index(expert) for expert in large} <= set(built.starts)
    for start, end in zip(built.starts, ends, strict=True):
        here = closed_by[start:end]
        assert max(map(here.count, here)) <= MOST_PAIRS
        # An expert with few pairs starts a group if a multiple of GROUP_PAIRS lies among them, so that fewer than that
        # many pairs follow those of the expert that started one. What is over at the end comes on top.
        follow = GROUP_PAIRS - 1
        first = sum(expert == here[0] for expert in here)
        assert first <= (MOST_PAIRS if here[0] in large else OWN_GROUP - 1)
        assert len(here) - first <= follow
        assert end - start <= first + follow + (over > 0)


def check_built(buffer: SymmBuffer, rows: Sequence[int], epoch: int = 1) -> Built:
    """One rank's table against the routes of its experts."""
    block_m = buffer.config.block_m
    built = Built.read(buffer, epoch)
    assert built.blocks == expected_blocks(rows, block_m)
    if len(built.blocks) > FEW_BLOCKS * len(rows):
        of_experts, over = expected_pairs(built.blocks, block_m)
        check_rules(built, block_m)
        assert built.pairs == [pair for pairs in of_experts for pair in pairs] + over
        assert built.starts == expected_starts(of_experts)
    elif epoch == 1:
        assert (built.pairs, built.starts) == ([], [])
    if epoch == 1:
        assert not any(built.rest), "nothing is written behind the last pair and group"
    return built


# --- launches --------------------------------------------------------------------------------------------------------


def batches_of(rows: Rows, num_topk: int, seed: int = 0) -> list[Batch]:
    """Routes for the experts of each owner, dealt out to the sources at random; slots left over are masked."""
    ranks, local = len(rows), len(rows[0])
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(rows).flatten()
    ids = torch.arange(ranks * local).repeat_interleave(counts)
    sources = torch.randint(0, ranks, (len(ids),), generator=generator)
    batches = []
    for source in range(ranks):
        mine = ids[sources == source]
        slots = torch.full((math.ceil(len(mine) / num_topk) * num_topk,), -1)
        slots[torch.randperm(len(slots), generator=generator)[: len(mine)]] = mine
        topk_idx = slots.view(-1, num_topk)
        tokens = torch.ones(len(topk_idx), 128, dtype=torch.bfloat16)
        batches.append(Batch(tokens, topk_idx, torch.ones(topk_idx.shape)))
    return batches


def config_of(rows: Rows, batches: Sequence[Batch], block_m: int, pool_rows: int | None = None) -> MegaMoEConfig:
    return small_config(
        len(rows),
        num_experts=len(rows) * len(rows[0]),
        num_topk=batches[0].topk_idx.shape[1],
        num_max_tokens_per_rank=max(1, *(batch.num_tokens for batch in batches)),
        block_m=block_m,
        pool_rows=pool_rows,
    )


def dispatch(buffers: VirtualSymmBuffer, batches: Sequence[Batch], weights: Sequence[Weights]) -> None:
    """Fill and launch every rank up to the pool; not waited for."""
    for buffer, batch, pair in zip(buffers.ranks, batches, weights, strict=True):
        megamoe.launch_mega_moe(batch.fill(buffer), *pair, buffer, stage=Stage.DISPATCH)


def weights_for(config: MegaMoEConfig) -> list[Weights]:
    """They are not used before the pool is there, so one draw does for every capacity."""
    return draw_weights(small_config(config.num_ranks, num_experts=config.num_experts, num_topk=1))


def check_pairs(rows: Rows, block_m: int = 32, num_topk: int = 4, num_workers: int = 1, seed: int = 0) -> list[Built]:
    """Launch on fresh buffers and check the table of every rank."""
    batches = batches_of(rows, min(num_topk, len(rows) * len(rows[0])), seed)
    config = config_of(rows, batches, block_m)
    buffers = open_buffer(VirtualGroup(config.num_ranks, num_workers=num_workers), config, timeout_s=5)
    try:
        dispatch(buffers, batches, weights_for(config))
        buffers.check()
        return [check_built(buffer, mine) for buffer, mine in zip(buffers.ranks, rows, strict=True)]
    finally:
        buffers.close()


# --- any routing -----------------------------------------------------------------------------------------------------


@st.composite
def routings(draw: st.DrawFn) -> tuple[Rows, int, int, int, int]:
    """Rows of the experts about the edges of blocks, from none to more blocks than a group has."""
    block_m = draw(st.sampled_from([32, 32, 64]))
    blocks = st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 8, 9, 10, 11, 25, 27])
    over = st.sampled_from([0, 1, block_m // 2 - 1, block_m // 2, block_m // 2 + 1, block_m - 1])
    experts = st.builds(lambda whole, rest: whole * block_m + rest, blocks, over)
    ranks, local = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rows = [draw(st.lists(experts, min_size=local, max_size=local)) for _ in range(ranks)]
    return rows, block_m, draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 2**32))


@settings(max_examples=150)
@example(([[0]], 32, 1, 1, 0))
@given(routings())
def test_pairs_of_any_routing(drawn: tuple[Rows, int, int, int, int]) -> None:
    check_pairs(*drawn)


# --- routings of one kind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_m", [32, 64, 128])
def test_the_pairs_in_full(block_m: int) -> None:
    """Two tall blocks of an expert; then what closes an earlier tall block, then what closes a short one."""
    half = block_m // 2
    rows = [3 * block_m + half, 0, half + 1, 2 * block_m + half + 1, 4 * block_m, block_m + 1]
    (built,) = check_pairs([rows], block_m)
    # Blocks: 0 1 2 tall, 3 short | | 4 tall | 5 6 7 tall | 8 9 10 11 tall | 12 tall, 13 short
    assert built.pairs == [(0, 1), (2, 4), (5, 6), (8, 9), (10, 11), (7, 12), (3, 13)]
    assert built.starts == [0]


@pytest.mark.parametrize(
    ("over", "last"),
    [
        ([0, 0], (6, 7)),
        ([32, 0], (6, UNPAIRED)),
        ([0, 32], (8, UNPAIRED)),
        ([17, 0], (6, UNPAIRED)),
        ([16, 0], (6, UNPAIRED)),
        ([1, 0], (6, UNPAIRED)),
        ([0, 16], (8, UNPAIRED)),
        ([32, 1], (6, 9)),
        ([1, 32], (9, 6)),  # tall first
        ([33, 0], (6, 7)),
        ([0, 33], (8, 9)),
        ([32, 32], (6, 9)),
        ([16, 16], (6, 9)),
        ([33, 33], (7, 11)),
    ],
)
def test_what_is_over(over: list[int], last: Pair) -> None:
    """Six blocks of one expert, two of another, and what both have beyond."""
    (built,) = check_pairs([[6 * 32 + over[0], 2 * 32 + over[1]]])
    assert built.pairs[-1] == last


@pytest.mark.parametrize("whole", [3, 4, 7, 8, 9, 10, 23, 24, 25, 26, 27, 49, 50, 73, 75])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_one_expert_has_nearly_everything(whole: int, place: int) -> None:
    """Its pairs fill one to four groups; the other experts are empty."""
    rows = [0] * 4
    rows[place] = whole * 32 + 16
    (built,) = check_pairs([rows])
    num_pairs = whole // 2
    if whole >= FEW_BLOCKS * len(rows):
        assert len(built.starts) == math.ceil(num_pairs / MOST_PAIRS)
        assert built.pairs[-1] == ((whole - 1, whole) if whole % 2 else (whole, UNPAIRED))


@pytest.mark.parametrize(
    ("pairs", "starts"),
    [
        ([4, 4, 4, 4, 4], [0, 8, 16]),
        ([3, 3, 3, 3, 3, 3], [0, 6, 15]),
        ([4, 3, 4, 4, 4], [0, 7, 15]),
        ([1] * 25, [0, 8, 16, 24]),
        ([2, 5, 1, 1, 1], [0, 2, 8]),
        ([4, 4, 5, 4, 4], [0, 8, 13]),
        ([4, 12, 4], [0, 4, 16]),
        ([4, 13, 4], [0, 4, 11]),
        ([13], [0, 7]),
        ([24, 3], [0, 12, 24]),
        ([25], [0, 9, 18]),
        ([36, 37], [0, 12, 24, 36, 46, 56, 66]),
        ([9, 0, 0, 4, 3, 1], [0, 16]),
    ],
)
def test_groups_of_experts_with_so_many_pairs(pairs: list[int], starts: list[int]) -> None:
    """No expert has anything over. Then with something over: a last pair that starts no group."""
    (built,) = check_pairs([[64 * count for count in pairs]])
    if sum(pairs) > len(pairs):
        assert built.starts == starts
    (built,) = check_pairs([[64 * count for count in pairs[:-1]] + [64 * pairs[-1] + 1]])
    assert built.starts == starts
    assert built.pairs[-1] == (2 * sum(pairs), UNPAIRED)


def test_ranks_have_pairs_of_their_own() -> None:
    """One rank has many blocks, one has few, one has none."""
    many, few, none = check_pairs([[5 * 32 + 1, 17, 3 * 32], [33, 64, 1], [0, 0, 0]])
    assert many.pairs == [(0, 1), (2, 3), (4, 6), (7, 8), (9, 5)]
    assert few.blocks == [(0, 32), (0, 1), (1, 32), (1, 32), (2, 1)]
    assert none.blocks == []


# --- when they are built ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[64], [33, 64, 33], [192, 0, 0], [0, 160, 32], [1, 1, 1], [0, 0, 0, 0]])
def test_few_blocks_have_no_pairs(rows: list[int]) -> None:
    (built,) = check_pairs([rows])
    assert len(built.blocks) <= FEW_BLOCKS * len(rows)
    assert not built.pairs
    assert not built.starts
    if len(built.blocks) == FEW_BLOCKS * len(rows):  # one block more and there are some
        (built,) = check_pairs([[*rows[:-1], rows[-1] + 32]])
        assert built.pairs


def test_pairs_of_launch_after_launch() -> None:
    """What an earlier launch left behind is not taken for this one's."""
    launches: list[Rows] = [
        [[75 * 32, 17, 40], [9 * 32, 0, 5 * 32]],
        [[33, 3 * 32 + 1, 7 * 32 + 17], [64, 8, 40]],
        [[0, 5 * 32, 4 * 32 + 1], [0, 0, 30 * 32 + 1]],
    ]
    drawn = [batches_of(rows, 4, seed) for seed, rows in enumerate(launches)]
    config = config_of(launches[0], [batch for batches in drawn for batch in batches], 32)
    buffers = open_buffer(VirtualGroup(2, num_workers=2), config, timeout_s=5)
    try:
        for epoch, (rows, batches) in enumerate(zip(launches, drawn, strict=True), start=1):
            dispatch(buffers, batches, weights_for(config))
            buffers.check()
            for buffer, mine in zip(buffers.ranks, rows, strict=True):
                check_built(buffer, mine, epoch)
    finally:
        buffers.close()


def test_a_pool_that_overflows_has_no_pairs() -> None:
    rows = [[7 * 32 + 1, 32]]
    batches = batches_of(rows, 2)
    buffers = open_buffer(VirtualGroup(1), config_of(rows, batches, 32, pool_rows=8 * 32), timeout_s=5)
    try:
        dispatch(buffers, batches, weights_for(buffers.config))
        with pytest.raises(MegaMoEFault) as caught:
            buffers.check()
        assert {fault.kind for fault in caught.value.faults} == {FaultKind.OVERFLOW}
        (buffer,) = buffers.ranks
        assert not any(words(buffer, "pair_blocks") + words(buffer, "pair_groups"))
    finally:
        buffers.close()


def test_a_pool_that_is_just_full() -> None:
    """Both regions end where the largest number of pairs and groups does."""
    rows = [[7 * 32 + 1]]
    batches = batches_of(rows, 1)
    buffers = open_buffer(VirtualGroup(1), config_of(rows, batches, 32, pool_rows=8 * 32), timeout_s=5)
    try:
        dispatch(buffers, batches, weights_for(buffers.config))
        buffers.check()
        built = check_built(buffers.ranks[0], rows[0])
        assert built.pairs == [(0, 1), (2, 3), (4, 5), (6, 7)]
    finally:
        buffers.close()


def test_more_experts_wait_for_another_than_there_are_places_to_wait() -> None:
    """The place of a tall block that waits is used again after 1024 of them, while one short block waits all along."""
    experts = 1030
    rows = [[1, *[17] * (experts - 1)]]
    rows[0][experts // 2] = (experts + 2) * 32
    (built,) = check_pairs(rows, num_topk=32)
    assert built.pairs[-1] == (0, UNPAIRED)
