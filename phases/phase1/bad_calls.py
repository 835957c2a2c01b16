"""Calls that must be refused before anything is launched, and what the message must name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe import (
    DebugWindow,
    L1Weights,
    L2Weights,
    MegaMoEConfig,
    SymmBuffer,
    fp8_mega_moe,
    launch_mega_moe,
    transform_weights_for_mega_moe,
)
from phases.support.inputs import natural_weights

NUM_TOKENS = 4


@dataclass(frozen=True)
class BadCall:
    """A call, and the words that its ValueError must contain: the argument, what came or what was expected."""

    name: str
    call: Callable[[], object]
    words: tuple[str, ...]


def bad_calls(buffer: SymmBuffer, weights: tuple[L1Weights, L2Weights]) -> list[BadCall]:
    """Every kind of call that the host can refuse, on an open buffer with tokens filled in."""
    return [
        *_bad_y(buffer, weights),
        *_bad_weights(buffer, weights),
        *_bad_options(buffer, weights),
        *_bad_fill(buffer),
    ]


def bad_configs(config: MegaMoEConfig) -> list[BadCall]:
    """Configs that break one rule each."""

    def changed(**values: Any) -> Callable[[], object]:
        return lambda: MegaMoEConfig(**{**vars(config), **values})

    return [
        BadCall("experts not divisible", changed(num_ranks=2, num_experts=7), ("num_experts", "7")),
        BadCall("top-k of too many", changed(num_topk=33), ("num_topk", "33")),
        BadCall("hidden not in blocks", changed(hidden=200), ("hidden", "200", "128")),
        BadCall("intermediate not in blocks", changed(intermediate_hidden=64), ("intermediate_hidden", "64", "128")),
        BadCall("granularity", changed(l2_sf_granularity=32), ("l2_sf_granularity", "32")),
        BadCall("block_m", changed(block_m=48), ("block_m", "48")),
        BadCall("accumulate", changed(accumulate="fp16"), ("accumulate", "fp32", "fast", "fp16")),
        BadCall("ranks", changed(num_ranks=73, num_experts=73), ("num_ranks", "73")),
        BadCall("no tokens", changed(num_max_tokens_per_rank=0), ("num_max_tokens_per_rank", "0")),
    ]


def _y(
    buffer: SymmBuffer, rows: int = NUM_TOKENS, columns: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return torch.zeros(rows, columns or buffer.config.hidden, dtype=dtype, device=buffer.device)


def _bad_y(buffer: SymmBuffer, weights: tuple[L1Weights, L2Weights]) -> list[BadCall]:
    hidden, capacity = buffer.config.hidden, buffer.config.num_max_tokens_per_rank

    def with_y(y: Any, **options: Any) -> Callable[[], object]:
        return lambda: fp8_mega_moe(y, *weights, buffer, **options)

    strided = _y(buffer, columns=2 * hidden)[:, ::2]
    return [
        BadCall(
            "y of too many tokens", with_y(_y(buffer, capacity + 1)), ("num_tokens", str(capacity + 1), str(capacity))
        ),
        BadCall("y of another dtype", with_y(_y(buffer, dtype=torch.float16)), ("y:", "float16", "bf16")),
        BadCall("y of another width", with_y(_y(buffer, columns=hidden + 8)), ("y:", str(hidden + 8), str(hidden))),
        BadCall("y of one dimension", with_y(_y(buffer)[0]), ("y:", "bf16")),
        BadCall("y not contiguous", with_y(strided), ("y:", "strides")),
        BadCall("y no tensor", with_y(None), ("y:", "NoneType")),
        BadCall("more tokens than y has", with_y(_y(buffer), num_tokens=NUM_TOKENS + 1), ("num_tokens", "5", "4")),
        BadCall("a negative number of tokens", with_y(_y(buffer), num_tokens=-1), ("num_tokens", "-1")),
        BadCall(
            "num_tokens of another dtype",
            with_y(_y(buffer), num_tokens=torch.tensor([4], dtype=torch.int64)),
            ("num_tokens", "int64", "int32"),
        ),
    ]


def _bad_weights(buffer: SymmBuffer, weights: tuple[L1Weights, L2Weights]) -> list[BadCall]:
    l1, l2 = weights
    natural = natural_weights(buffer.config, buffer.rank)

    def with_weights(first: Any, second: Any) -> Callable[[], object]:
        return lambda: fp8_mega_moe(_y(buffer), first, second, buffer)

    strided = L2Weights(l2.weight.transpose(1, 2).contiguous().transpose(1, 2), l2.sf)
    return [
        BadCall("weights not transformed", with_weights(*natural), ("l1_weights", "transform_weights_for_mega_moe")),
        BadCall("weights swapped", with_weights(l2, l1), ("l1_weights", "L2Weights", "L1Weights")),
        BadCall(
            "weights of another dtype", with_weights(L1Weights(l1.sf, l1.sf), l2), ("l1_weights", "float32", "e4m3")
        ),
        BadCall("scales of another shape", with_weights(L1Weights(l1.weight, l1.sf[:, 1:]), l2), ("l1_weights sf",)),
        BadCall(
            "weights of too few experts",
            with_weights(L1Weights(l1.weight[1:], l1.sf[1:]), L2Weights(l2.weight[1:], l2.sf[1:])),
            ("l1_weights.weight",),
        ),
        BadCall("weights not contiguous", with_weights(l1, strided), ("l2_weights.weight", "strides")),
        BadCall("weights transformed twice", lambda: transform_weights_for_mega_moe(l1, l2), ("l1_weights", "already")),
    ]


def _bad_options(buffer: SymmBuffer, weights: tuple[L1Weights, L2Weights]) -> list[BadCall]:
    config = buffer.config

    def with_options(**options: Any) -> Callable[[], object]:
        return lambda: launch_mega_moe(_y(buffer), *weights, buffer, **options)

    no_buffer: Any = None
    stats = torch.zeros(config.experts_per_rank + 1, dtype=torch.int32, device=buffer.device)
    return [
        BadCall("recipe", with_options(recipe=(1, 1, 128)), ("recipe", "(1, 1, 128)")),
        BadCall("activation", with_options(activation="gelu"), ("activation", "gelu", "swiglu")),
        BadCall("activation_clamp", with_options(activation_clamp=-1.0), ("activation_clamp", "-1.0")),
        BadCall(
            "statistics of another size",
            with_options(cumulative_local_expert_recv_stats=stats),
            ("cumulative_local_expert_recv_stats", "int32"),
        ),
        BadCall("window outside", with_options(debug=DebugWindow(0, 1000)), ("debug.column_block", "1000")),
        BadCall("no buffer", lambda: fp8_mega_moe(_y(buffer), *weights, no_buffer), ("sym_buffer", "NoneType")),
    ]


def _bad_fill(buffer: SymmBuffer) -> list[BadCall]:
    config, device = buffer.config, buffer.device
    rows, capacity = NUM_TOKENS, config.num_max_tokens_per_rank
    x = torch.zeros(rows, config.hidden, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(rows, config.num_topk, dtype=torch.int64, device=device)
    weights = torch.zeros(rows, config.num_topk, device=device)
    many = capacity + 1
    return [
        BadCall("x of another width", lambda: buffer.fill(x[:, 1:], ids, weights), ("x:", str(config.hidden))),
        BadCall("x of integers", lambda: buffer.fill(x.int(), ids, weights), ("x:", "int32")),
        BadCall("ids of another shape", lambda: buffer.fill(x, ids[1:], weights), ("topk_idx", "[4,")),
        BadCall("ids that are floats", lambda: buffer.fill(x, weights, weights), ("topk_idx", "float32")),
        BadCall("weights of another dtype", lambda: buffer.fill(x, ids, weights.double()), ("topk_weights", "float64")),
        BadCall(
            "too many tokens",
            lambda: buffer.fill(x[:1].expand(many, -1), ids[:1].expand(many, -1), weights[:1].expand(many, -1)),
            ("num_tokens", str(many), str(capacity)),
        ),
        BadCall("no such view", lambda: buffer.view("l3_acts"), ("name", "l3_acts")),
    ]
