"""Combine: the sum over a token's slots, at its source rank."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.config import MegaMoEConfig
from megamoe.quant import describe
from megamoe.reference.dispatch import RankInputs, check_rank_inputs


def combine(config: MegaMoEConfig, inputs_of_rank: RankInputs, partial: Tensor) -> Tensor:
    """Sums the partial results of each token in slot order, starting from +0; masked slots are skipped, never read.

    Args:
        config: the layer.
        inputs_of_rank: of the source rank.
        partial: float64 or bf16 [K, n, H], what `l2_gemm` gave for each slot and token; anything in masked slots.

    Returns:
        [n, H]. float64 partials: float64. bf16 partials: summed in fp32, then rounded to bf16, as the kernel does.
        A row is NaN where one of the token's experts is E or more, +0 where all its slots are masked.

    Raises:
        ValueError: an argument does not fit.
    """
    check_rank_inputs(config, inputs_of_rank, "inputs_of_rank")
    shape = (config.num_topk, inputs_of_rank.num_tokens, config.hidden)
    if partial.dtype not in (torch.float64, torch.bfloat16) or tuple(partial.shape) != shape:
        raise ValueError(f"partial: got {describe(partial)}, expected float64 or bf16 {list(shape)}")
    sum_dtype = torch.float64 if partial.dtype == torch.float64 else torch.float32
    y = torch.zeros(shape[1:], dtype=sum_dtype, device=partial.device)
    topk_idx = inputs_of_rank.topk_idx
    for slot in range(config.num_topk):
        valid = (topk_idx[:, slot] >= 0) & (topk_idx[:, slot] < config.num_experts)
        y[valid] += partial[slot][valid].to(sum_dtype)
    y[invalid_tokens(config, topk_idx)] = torch.nan
    return y.to(partial.dtype)


def invalid_tokens(config: MegaMoEConfig, topk_idx: Tensor) -> Tensor:
    """bool [n]: tokens that name an expert which does not exist (id E or more); their y is NaN."""
    return (topk_idx >= config.num_experts).any(dim=1)
