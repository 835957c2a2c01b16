"""The pool that the host target builds, against an independent statement of its order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe
from megamoe import MegaMoEConfig, MegaMoEFault, Stage, VirtualGroup
from megamoe.faults import FaultKind
from tests.layers import Batch, draw_weights, open_buffer, small_config

Row = tuple[int, int, int, int]
"""Local expert, source, token, slot."""


def rows_in_order(config: MegaMoEConfig, batches: list[Batch], me: int) -> list[list[Row]]:
    """Each local expert's routes, sorted by (local expert, (source - me) mod R, token, slot)."""
    routes = [
        (int(batch.topk_idx[token, slot]) - me * config.experts_per_rank, source, token, slot)
        for source, batch in enumerate(batches)
        for token in range(batch.num_tokens)
        for slot in range(config.num_topk)
    ]
    return [
        sorted((route for route in routes if route[0] == local), key=lambda r: ((r[1] - me) % config.num_ranks, *r[2:]))
        for local in range(config.experts_per_rank)
    ]


def check_pool(config: MegaMoEConfig, batches: list[Batch], workers: int) -> None:
    buffers = megamoe_buffers(config, workers)
    try:
        invalid = sum(int((batch.topk_idx >= config.num_experts).sum()) for batch in batches)
        for buffer, batch, pair in zip(buffers.ranks, batches, draw_weights(config), strict=True):
            y = batch.fill(buffer)
            megamoe.launch_mega_moe(y, *pair, buffer, stage=Stage.DISPATCH)
        if invalid:
            with pytest.raises(MegaMoEFault) as caught:
                buffers.check()
            assert {fault.kind for fault in caught.value.faults} == {FaultKind.INPUT}
        else:
            buffers.check()
        for me, buffer in enumerate(buffers.ranks):
            check_rank(config, batches, me, buffer, buffers)
    finally:
        buffers.close()


def megamoe_buffers(config: MegaMoEConfig, workers: int) -> megamoe.VirtualSymmBuffer:
    buffers = open_buffer(VirtualGroup(config.num_ranks, num_workers=workers), config, timeout_s=5)
    assert isinstance(buffers, megamoe.VirtualSymmBuffer)
    return buffers


def check_rank(
    config: MegaMoEConfig,
    batches: list[Batch],
    me: int,
    buffer: megamoe.SymmBuffer,
    buffers: megamoe.VirtualSymmBuffer,
) -> None:
    by_expert = rows_in_order(config, batches, me)
    counts = buffer.expert_recv_count_sum.view(torch.int64)
    assert [int(word) >> 32 for word in counts] == [1] * config.experts_per_rank
    assert [int(word) & 0xFFFFFFFF for word in counts] == [len(rows) for rows in by_expert]
    metadata, blocks = (
        buffer.token_src_metadata.view(torch.int32).tolist(),
        buffer.view("pool_blocks").view(torch.int32),
    )
    arrived, weights = buffer.l1_arrival_count.view(torch.int32).tolist(), buffer.l1_topk_weights.tolist()
    block = 0
    for local, rows in enumerate(by_expert):
        assert int(buffer.view("expert_blocks").view(torch.int32)[local]) == block
        for place, (_, source, token, slot) in enumerate(rows):
            row = block * config.block_m + place
            assert metadata[row] == [source, token, slot]
            assert weights[row] == float(batches[source].topk_weights[token, slot])
            sent = buffers.ranks[source]
            assert torch.equal(buffer.l1_acts[row].view(torch.uint8), sent.x[token].view(torch.uint8))
            assert torch.equal(buffer.l1_acts_sf[row], sent.x_sf[token])
        for first in range(0, len(rows), config.block_m):
            used = min(config.block_m, len(rows) - first)
            assert blocks[block].tolist() == [local, used]
            assert arrived[block] == used
            block += 1
    assert block == sum(math.ceil(len(rows) / config.block_m) for rows in by_expert)
    assert not any(arrived[block:]), "blocks behind the last one are not touched"


@st.composite
def routings(draw: st.DrawFn) -> tuple[MegaMoEConfig, list[Batch], int]:
    """Uneven ranks, masked routes, duplicates, experts that do not exist, everything on one expert."""
    ranks, local, topk = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = ranks * local
    config = small_config(
        ranks,
        num_experts=experts,
        num_topk=min(topk, experts),
        num_max_tokens_per_rank=40,
        block_m=draw(st.sampled_from([32, 64])),
    )
    low, high = draw(st.sampled_from([(0, experts - 1), (-2, experts - 1), (0, 0), (-1, experts), (-1, -1)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batches = []
    for _ in range(ranks):
        tokens = draw(st.sampled_from([0, 1, 7, 31, 32, 33, 40]))
        shape = (tokens, config.num_topk)
        batches.append(
            Batch(
                torch.randn(tokens, config.hidden, generator=generator).bfloat16(),
                torch.randint(low, high + 1, shape, generator=generator),
                torch.rand(shape, generator=generator),
            )
        )
    return config, batches, draw(st.integers(1, 3))


@settings(max_examples=80)
@given(routings())
def test_rows_lie_in_the_order_of_the_contract(drawn: tuple[MegaMoEConfig, list[Batch], int]) -> None:
    check_pool(*drawn)


def test_several_chunks_of_routes() -> None:
    """More routes than one claim sorts, so that chunks by different workers have to come out in token order."""
    config = small_config(2, num_experts=6, num_topk=4, num_max_tokens_per_rank=600, block_m=64)
    generator = torch.Generator().manual_seed(3)
    batches = [
        Batch(
            torch.randn(tokens, config.hidden, generator=generator).bfloat16(),
            torch.randint(-1, 6, (tokens, 4), generator=generator),
            torch.rand(tokens, 4, generator=generator),
        )
        for tokens in (600, 257)
    ]
    for workers in (1, 4):
        check_pool(config, batches, workers)


@pytest.mark.parametrize("tokens", [(40, 33), (300, 7)], ids=["one chunk", "two chunks"])
def test_more_experts_than_are_sorted_at_a_time(tokens: tuple[int, int]) -> None:
    """Sources count 256 experts at a time, and a table of two sources takes 512 local experts at a time."""
    config = small_config(2, num_experts=1030, num_topk=4, num_max_tokens_per_rank=300)
    generator = torch.Generator().manual_seed(4)
    # Half of the routes go to a few experts on both sides of the borders.
    few = torch.tensor([0, 255, 256, 511, 512, 514, 515, 1026, 1027, 1029])
    batches = []
    for count in tokens:
        ids = torch.randint(0, 1030, (count, 4), generator=generator)
        drawn = few[torch.randint(0, len(few), (count, 4), generator=generator)]
        ids = torch.where(torch.rand(count, 4, generator=generator) < 0.5, drawn, ids)
        batches.append(
            Batch(
                torch.randn(count, config.hidden, generator=generator).bfloat16(),
                ids,
                torch.rand(count, 4, generator=generator),
            )
        )
    for workers in (1, 3):
        check_pool(config, batches, workers)
