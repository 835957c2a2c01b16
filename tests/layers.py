"""Small layers with drawn inputs and the oracle's answer, for tests that launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import megamoe
from megamoe import L1Weights, L2Weights, MegaMoEConfig, Schedule, SymmBuffer, VirtualSymmBuffer
from megamoe.quant import quantize_activations, quantize_weights
from megamoe.reference import RankInputs, moe_layer, norm_error, row_errors

Weights = tuple[L1Weights, L2Weights]


@dataclass(frozen=True)
class Batch:
    """What one rank's caller holds: bf16 tokens [n, hidden] and their routes."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    def fill(self, buffer: SymmBuffer) -> Tensor:
        """Put it into a rank's views. Returns a y of the right shape, full of what no launch writes."""
        buffer.fill(self.x, self.topk_idx, self.topk_weights)
        return torch.full((self.num_tokens, buffer.config.hidden), 7.0, dtype=torch.bfloat16)


def small_config(num_ranks: int, /, **changes: Any) -> MegaMoEConfig:
    values: dict[str, Any] = {
        "num_ranks": num_ranks,
        "num_experts": 2 * num_ranks,
        "num_topk": 2,
        "hidden": 128,
        "intermediate_hidden": 128,
        "num_max_tokens_per_rank": 24,
        "block_m": 32,
    }
    return MegaMoEConfig(**{**values, **changes})


@lru_cache(maxsize=32)
def draw_weights(config: MegaMoEConfig, seed: int = 0) -> list[Weights]:
    """Each rank's transformed weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden, intermediate = config.hidden, config.intermediate_hidden
    l1 = torch.randn(config.num_experts, 2 * intermediate, hidden, generator=generator) / hidden**0.5
    l2 = torch.randn(config.num_experts, hidden, intermediate, generator=generator) / intermediate**0.5
    return [
        megamoe.transform_weights_for_mega_moe(quantize_weights(l1[mine]), quantize_weights(l2[mine]))
        for mine in torch.arange(config.num_experts).chunk(config.num_ranks)
    ]


def draw_batches(config: MegaMoEConfig, tokens: Sequence[int], seed: int = 0, lowest: int = 0) -> list[Batch]:
    """A batch of each rank; expert ids from ``lowest`` (below 0: some masked), repetitions allowed."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for num_tokens in tokens:
        routes = (num_tokens, config.num_topk)
        batches.append(
            Batch(
                torch.randn(num_tokens, config.hidden, generator=generator).bfloat16(),
                torch.randint(lowest, config.num_experts, routes, generator=generator),
                torch.rand(routes, generator=generator) + 0.1,
            )
        )
    return batches


def answers(
    config: MegaMoEConfig, batches: Sequence[Batch], weights: Sequence[Weights], **options: Any
) -> list[Tensor]:
    """The oracle's y of every rank."""
    inputs = []
    for batch in batches:
        values, scales = quantize_activations(batch.x)
        inputs.append(RankInputs(values, scales, batch.topk_idx, batch.topk_weights))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: a second thread costs more than it brings
    try:
        return moe_layer(config, inputs, weights, **options)
    finally:
        torch.set_num_threads(threads)


def assert_right(y: Tensor, expected: Tensor) -> None:
    """NaN exactly where the oracle has it, and within the bounds of y elsewhere."""
    assert y.shape == expected.shape
    assert torch.equal(y.isnan(), expected.isnan()), f"NaN rows {y.isnan().any(1).nonzero().flatten().tolist()}"
    rows = ~expected.isnan().any(1)
    assert norm_error(y[rows], expected[rows]) <= 8e-3
    assert bool((row_errors(y[rows], expected[rows])[expected[rows].abs().amax(1) > 0] <= 3e-2).all())


def open_buffer(group: Any, config: MegaMoEConfig, **options: Any) -> Any:
    """The buffer of a config through the public call."""
    return megamoe.get_symm_buffer_for_mega_moe(
        group,
        config.num_experts,
        config.num_max_tokens_per_rank,
        config.num_topk,
        config.hidden,
        config.intermediate_hidden,
        l2_sf_granularity=config.l2_sf_granularity,
        pool_rows=config.pool_rows,
        schedule=Schedule(config.block_m, config.l1_block_n, config.l2_block_n),
        accumulate=config.accumulate,
        **options,
    )


def launch_all(buffers: VirtualSymmBuffer, batches: Sequence[Batch], weights: Sequence[Weights]) -> list[Tensor]:
    """Fill and launch every rank; not waited for."""
    ys = [batch.fill(buffer) for buffer, batch in zip(buffers.ranks, batches, strict=True)]
    for buffer, y, pair in zip(buffers.ranks, ys, weights, strict=True):
        megamoe.fp8_mega_moe(y, *pair, buffer)
    return ys


def run_all(buffers: VirtualSymmBuffer, batches: Sequence[Batch], weights: Sequence[Weights]) -> list[Tensor]:
    """Fill, launch and wait."""
    ys = launch_all(buffers, batches, weights)
    buffers.check()
    return ys


def assert_works(buffers: VirtualSymmBuffer, seed: int = 0) -> None:
    """One launch over all ranks gives the oracle's answer."""
    config = buffers.config
    tokens = [(seed + 5 * rank) % (config.num_max_tokens_per_rank + 1) for rank in range(config.num_ranks)]
    batches, weights = draw_batches(config, tokens, seed), draw_weights(config)
    for y, expected in zip(run_all(buffers, batches, weights), answers(config, batches, weights), strict=True):
        assert_right(y, expected)
