"""The oracle against a second, token-by-token form of the layer, and the bounds just inside and just outside."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamoe.config import MegaMoEConfig
from megamoe.quant import E4M3, dequantize_activations, dequantize_weights, quantize_activations, quantize_weights
from megamoe.reference import (
    BOUNDS,
    Comparison,
    Pool,
    RankInputs,
    Squares,
    combine,
    compare,
    dispatch,
    l1_epilogue,
    l1_gemm,
    l2_gemm,
    l2_gemm_unquantised,
    moe_layer,
    norm_error,
    quantize_h,
    row_errors,
    squares,
    undecided_rounding,
)
from megamoe.reference.bounds import e4m3_ordinals
from megamoe.reference.l1 import undecided_steps
from megamoe.weights import L1Weights, L2Weights, transform_weights_for_mega_moe

Natural = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

# ---- inputs ----


def make_inputs(config: MegaMoEConfig, tokens: Sequence[int], seed: int = 0, lowest: int = 0) -> list[RankInputs]:
    """Normal tokens; expert ids from `lowest` (below 0: some masked) to E - 1, repetitions allowed."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for num_tokens in tokens:
        x, x_sf = quantize_activations(torch.randn(num_tokens, config.hidden, generator=generator))
        shape = (num_tokens, config.num_topk)
        idx = torch.randint(lowest, config.num_experts, shape, generator=generator)
        inputs.append(RankInputs(x, x_sf, idx, torch.rand(shape, generator=generator) + 0.1))
    return inputs


def make_weights(config: MegaMoEConfig, seed: int = 0) -> tuple[list[Natural], list[tuple[L1Weights, L2Weights]]]:
    generator = torch.Generator().manual_seed(seed)
    natural: list[Natural] = []
    for _ in range(config.num_ranks):
        num_experts, hidden, intermediate = config.experts_per_rank, config.hidden, config.intermediate_hidden
        l1 = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator) / hidden**0.5
        l2 = torch.randn(num_experts, hidden, intermediate, generator=generator) / intermediate**0.5
        # Blocks of very different size, so that a scale at the wrong place shows.
        l1 *= torch.tensor([1.0, 1.7, 0.6]).repeat_interleave(128)[: l1.shape[1] // 2].repeat(2)[: l1.shape[1], None]
        natural.append((quantize_weights(l1), quantize_weights(l2)))
    return natural, [transform_weights_for_mega_moe(*pair) for pair in natural]


def layer_by_token(
    config: MegaMoEConfig,
    inputs: Sequence[RankInputs],
    natural: Sequence[Natural],
    clamp: float | None,
    quantised: bool,
) -> list[Tensor]:
    """The layer with natural weights, one token and slot at a time, without pool or interleaving."""
    results = []
    for given_inputs in inputs:
        y = torch.zeros(given_inputs.num_tokens, config.hidden, dtype=torch.float64)
        x = dequantize_activations(given_inputs.x, given_inputs.x_sf)
        for token in range(given_inputs.num_tokens):
            for slot in range(config.num_topk):
                expert = int(given_inputs.topk_idx[token, slot])
                if expert < 0:
                    continue
                if expert >= config.num_experts:
                    y[token] = math.nan
                    continue
                (w1, s1), (w2, s2) = natural[expert // config.experts_per_rank]
                local = expert % config.experts_per_rank
                gate, up = (dequantize_weights(w1[local], s1[local]) @ x[token]).chunk(2)
                if clamp is not None:
                    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
                h = torch.nn.functional.silu(gate) * up * float(given_inputs.topk_weights[token, slot])
                if quantised:
                    q, sf = quantize_activations(h.float()[None], granularity=config.l2_sf_granularity)
                    h = dequantize_activations(q, sf)[0]
                y[token] += dequantize_weights(w2[local], s2[local]) @ h
        results.append(y)
    return results


def close(actual: Tensor, expected: Tensor) -> bool:
    """NaN in the same places, and the rest equal but for the order of float64 sums."""
    largest = float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=0, atol=1e-13 * largest, equal_nan=True)


# ---- dispatch ----


def pool_order(config: MegaMoEConfig, inputs: Sequence[RankInputs], rank: int) -> list[tuple[int, int, int, int]]:
    """(expert, source, token, slot) of every route to `rank` by the contract's sort key."""
    routes = [
        (int(expert) - rank * config.experts_per_rank, source, token, slot)
        for source, given_inputs in enumerate(inputs)
        for token, experts in enumerate(given_inputs.topk_idx)
        for slot, expert in enumerate(experts)
        if 0 <= int(expert) < config.num_experts and int(expert) // config.experts_per_rank == rank
    ]
    return sorted(routes, key=lambda r: (r[0], (r[1] - rank) % config.num_ranks, r[2], r[3]))


@settings(max_examples=40)
@given(st.data())
def test_pool_order_blocks_and_copies(data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([1, 2, 4]))
    config = MegaMoEConfig(
        num_ranks,
        num_ranks * data.draw(st.integers(2, 4)),
        2,
        128,
        128,
        64,
        block_m=data.draw(st.sampled_from([32, 64])),
    )
    tokens = [data.draw(st.sampled_from([0, 1, 5, 33, 64])) for _ in range(num_ranks)]
    inputs = make_inputs(config, tokens, seed=data.draw(st.integers(0, 99)), lowest=-2)
    if tokens[0]:
        inputs[0].topk_idx[0, 0] = config.num_experts  # one that does not exist
    total = 0
    for rank in range(num_ranks):
        pool = dispatch(config, inputs, rank)
        routes = pool_order(config, inputs, rank)
        total += len(routes)
        assert (
            list(zip(*(t.tolist() for t in (pool.expert, pool.source, pool.token, pool.slot)), strict=True)) == routes
        )
        counts = [sum(route[0] == expert for route in routes) for expert in range(config.experts_per_rank)]
        assert pool.expert_counts.tolist() == counts
        expected_blocks = [
            (expert, min(config.block_m, count - start))
            for expert, count in enumerate(counts)
            for start in range(0, count, config.block_m)
        ]
        assert list(zip(pool.block_expert.tolist(), pool.block_rows.tolist(), strict=True)) == expected_blocks
        assert pool.num_blocks == len(expected_blocks)
        expected_rows = [
            block * config.block_m + row for block, (_, n) in enumerate(expected_blocks) for row in range(n)
        ]
        assert pool.rows.tolist() == expected_rows
        for position, (_, source, token, slot) in enumerate(routes):
            assert torch.equal(pool.x[position].view(torch.uint8), inputs[source].x[token].view(torch.uint8))
            assert torch.equal(pool.x_sf[position], inputs[source].x_sf[token])
            assert float(pool.topk_weights[position]) == float(inputs[source].topk_weights[token, slot])
    assert total == sum(int(((i.topk_idx >= 0) & (i.topk_idx < config.num_experts)).sum()) for i in inputs)


def test_a_duplicate_expert_gives_two_routes_and_padded_views_do() -> None:
    config = MegaMoEConfig(1, 4, 3, 256, 128, 8)
    (plain,) = make_inputs(config, [2])
    plain.topk_idx[:] = torch.tensor([[1, 3, 1], [-1, 3, 4]])
    buffer = torch.zeros(2, 5)
    buffer[:, :2] = plain.x_sf
    pool = dispatch(config, [dataclasses.replace(plain, x_sf=buffer[:, :2])], 0)
    assert list(zip(pool.expert.tolist(), pool.token.tolist(), pool.slot.tolist(), strict=True)) == [
        (1, 0, 0),
        (1, 0, 2),
        (3, 0, 1),
        (3, 1, 1),
    ]
    assert pool.rows.tolist() == [0, 1, 128, 129]
    assert torch.equal(pool.x_sf[3], plain.x_sf[1])


# ---- whole layer ----


@pytest.mark.parametrize(
    ("num_ranks", "tokens", "granularity", "clamp", "quantised"),
    [
        (1, [5], 128, None, True),
        (2, [3, 4], 64, None, True),
        (2, [0, 6], 128, 0.5, True),
        (4, [1, 0, 2, 3], 64, 0.25, True),
        (2, [4, 4], 128, None, False),
    ],
)
def test_layer_equals_the_token_by_token_form(
    num_ranks: int, tokens: list[int], granularity: int, clamp: float | None, quantised: bool
) -> None:
    config = MegaMoEConfig(num_ranks, 8, 3, 256, 384, 8, l2_sf_granularity=granularity)
    inputs = make_inputs(config, tokens, seed=1, lowest=-2)
    last = inputs[-1]
    last.topk_idx[0] = torch.tensor([2, 2, 5])  # the same expert twice
    if tokens[-1] > 1:
        last.topk_idx[1] = torch.tensor([1, 8, -1])  # no such expert
    natural, weights = make_weights(config)
    results = moe_layer(config, inputs, weights, activation_clamp=clamp, quantize_hidden=quantised)
    expected = layer_by_token(config, inputs, natural, clamp, quantised)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == torch.float64
        assert close(got, want)
    assert float(results[-1][0].abs().max()) > 0
    if tokens[-1] > 1:
        assert bool(results[-1][1].isnan().all())
        assert int(results[-1].isnan().any(dim=1).sum()) == 1


def scatter_partials(
    config: MegaMoEConfig, inputs: Sequence[RankInputs], pools: Sequence[Pool], parts: Sequence[Tensor]
) -> list[Tensor]:
    """[K, n, H] of each source rank; what nobody writes is NaN, so that reading it shows."""
    dtype = parts[0].dtype
    combined = [torch.full((config.num_topk, i.num_tokens, config.hidden), math.nan, dtype=dtype) for i in inputs]
    for pool, part in zip(pools, parts, strict=True):
        for route in range(pool.num_routes):
            combined[int(pool.source[route])][int(pool.slot[route]), int(pool.token[route])] = part[route]
    return combined


def test_stages_compose_to_the_layer() -> None:
    config = MegaMoEConfig(2, 6, 2, 256, 256, 16, l2_sf_granularity=64, block_m=32)
    inputs = make_inputs(config, [9, 12], seed=3, lowest=-1)
    inputs[0].topk_idx[4, 1] = 99
    _, weights = make_weights(config)
    pools = [dispatch(config, inputs, rank) for rank in range(2)]
    parts = []
    for pool, (l1, l2) in zip(pools, weights, strict=True):
        acc, _ = l1_gemm(config, pool, l1)
        parts.append(l2_gemm(config, pool, *quantize_h(config, l1_epilogue(config, acc, pool.topk_weights)), l2))
    partials = scatter_partials(config, inputs, pools, parts)
    for given_inputs, partial, want in zip(inputs, partials, moe_layer(config, inputs, weights), strict=True):
        assert close(combine(config, given_inputs, partial), want)
        # The kernel's roundings stay within the bound of y, and are not nothing.
        rounded = combine(config, given_inputs, partial.bfloat16())
        assert rounded.dtype == torch.bfloat16
        outcome = compare("y", rounded, want)
        assert outcome.ok, outcome.message
        assert outcome.max_error > 1e-4


def test_chosen_rows_give_the_same_as_all() -> None:
    config = MegaMoEConfig(1, 4, 2, 128, 128, 32)
    inputs = make_inputs(config, [20])
    _, ((l1, l2),) = make_weights(config)
    pool = dispatch(config, inputs, 0)
    acc, magnitude = l1_gemm(config, pool, l1)
    rows = torch.tensor([33, 2, 17])
    some, some_magnitude = l1_gemm(config, pool, l1, rows)
    assert close(some, acc[rows])
    assert close(some_magnitude, magnitude[rows])
    assert l1_gemm(config, pool, l1, rows, magnitude=False)[1] is None
    h = l1_epilogue(config, acc, pool.topk_weights)
    q, sf = quantize_h(config, h)
    whole = l2_gemm(config, pool, q, sf, l2)
    picked = q.view(torch.uint8)[rows].view(E4M3)
    assert close(l2_gemm(config, pool, picked, sf[rows], l2, rows), whole[rows])
    assert norm_error(l2_gemm_unquantised(config, pool, h, l2), whole) < 0.05


def test_accumulator_order_and_magnitude_by_hand() -> None:
    """One token of ones, weights that hold their own natural row number times a scale."""
    config = MegaMoEConfig(1, 1, 1, 128, 256, 8)
    numbers = (torch.arange(512) % 16 - 8).float()
    weight = numbers[None, :, None].expand(1, 512, 128).to(E4M3).contiguous()
    sf = torch.tensor([1.0, 16.0, 256.0, 4096.0]).reshape(1, 4, 1)
    l1, _ = transform_weights_for_mega_moe((weight, sf), (torch.zeros(1, 128, 256).to(E4M3), torch.ones(1, 1, 2)))
    x = torch.ones(1, 128)
    x[0, 64:] = -0.5
    given_inputs = RankInputs(
        x.to(E4M3), torch.full((1, 1), 2.0), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    )
    acc, magnitude = l1_gemm(config, dispatch(config, [given_inputs], 0), l1)
    by_row = numbers.double() * sf[0, :, 0].double().repeat_interleave(128)
    order = [base + 8 * pair + i for pair in range(32) for base in (0, 256) for i in range(8)]
    assert acc[0].tolist() == [float(by_row[row]) * (64 - 32) * 2 for row in order]
    assert magnitude[0].tolist() == [abs(float(by_row[row])) * (64 + 32) * 2 for row in order]


def test_epilogue_by_hand() -> None:
    config = MegaMoEConfig(1, 1, 1, 128, 128, 8)
    acc = torch.zeros(2, 256, dtype=torch.float64)
    acc[0, 0], acc[0, 8] = 2.0, 3.0  # gate 0, up 0
    acc[0, 17], acc[0, 25] = -1.0, -9.0  # gate 9, up 9
    acc[1, 255], acc[1, 247] = 20.0, 30.0  # up 127, gate 127
    weights = torch.tensor([0.5, 2.0])
    h = l1_epilogue(config, acc, weights)
    assert math.isclose(float(h[0, 0]), 2 / (1 + math.exp(-2)) * 3 * 0.5, rel_tol=1e-15)
    assert math.isclose(float(h[0, 9]), -1 / (1 + math.exp(1)) * -9 * 0.5, rel_tol=1e-15)
    assert math.isclose(float(h[1, 127]), 30 / (1 + math.exp(-30)) * 20 * 2, rel_tol=1e-15)
    assert int((h != 0).sum()) == 3
    clamped = l1_epilogue(config, acc, weights, activation_clamp=1.5)
    assert math.isclose(float(clamped[0, 0]), 1.5 / (1 + math.exp(-1.5)) * 1.5 * 0.5, rel_tol=1e-15)
    assert math.isclose(float(clamped[0, 9]), -1 / (1 + math.exp(1)) * -1.5 * 0.5, rel_tol=1e-15)
    acc[0, 0] = acc[1, 247] = math.nan
    assert l1_epilogue(config, acc, weights, activation_clamp=1.5).isnan().nonzero().tolist() == [[0, 0], [1, 127]]
    assert bool((l1_epilogue(config, torch.full((1, 256), -1e4), torch.ones(1)) == 0).all())  # exp overflows


def test_quantised_h_is_rounded_to_fp32_first() -> None:
    """A number that fp32 rounds onto a tie of e4m3, and float64 leaves above it."""
    config = MegaMoEConfig(1, 1, 1, 128, 128, 8)
    h = torch.zeros(1, 128, dtype=torch.float64)
    h[0, 0] = 448.0  # sf = 1 up to rounding
    _, sf = quantize_h(config, h)
    assert float(sf[0, 0]) == 1.0
    h[0, 1] = 17.0 + 2.0**-40  # between 16 and 18; the tie goes to 16
    q, _ = quantize_h(config, h)
    assert float(q[0, 1]) == 16.0


def test_combine_by_hand() -> None:
    config = MegaMoEConfig(1, 4, 4, 128, 128, 8)
    idx = torch.tensor([[0, 1, 2, 3], [-1, 2, -7, 2], [-1, -1, -1, -1], [0, 4, 1, 2]])
    (base,) = make_inputs(config, [4])
    given_inputs = dataclasses.replace(base, topk_idx=idx)
    partial = torch.full((4, 4, 128), math.nan, dtype=torch.bfloat16)
    partial[:, 0] = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]).bfloat16()[:, None]
    partial[1, 1], partial[3, 1] = 1.5, -0.25
    partial[0, 3], partial[2, 3], partial[3, 3] = 1.0, 1.0, 1.0
    y = combine(config, given_inputs, partial)
    assert y.dtype == torch.bfloat16
    assert y[0].tolist() == [0.0] * 128  # fp32 in slot order loses both ones
    assert y[1].tolist() == [1.25] * 128
    assert y[2].tolist() == [0.0] * 128
    assert not bool(torch.signbit(y[2]).any())
    assert bool(y[3].isnan().all())
    exact = combine(config, given_inputs, partial.double())
    assert exact.dtype == torch.float64
    assert exact[0].tolist() == [2.0] * 128
    partial[3, 1, 5] = math.nan  # in a slot that counts
    assert combine(config, given_inputs, partial)[1].isnan().nonzero().flatten().tolist() == [5]


def test_nan_and_inf_stay_in_their_token() -> None:
    config = MegaMoEConfig(2, 4, 2, 256, 128, 8)
    inputs = make_inputs(config, [4, 4], seed=5)
    inputs[1].topk_idx[3] = -1
    _, weights = make_weights(config)
    clean = moe_layer(config, inputs, weights)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(9))
    x[1, 200] = math.nan
    x[2, 3] = math.inf
    x[3, 3] = math.nan  # in a token that is sent nowhere
    clean_x, clean_sf = inputs[1].x.view(torch.uint8).clone(), inputs[1].x_sf.clone()
    bad_x, bad_sf = quantize_activations(x)
    clean_x[1:] = bad_x.view(torch.uint8)[1:]
    clean_sf[1:] = bad_sf[1:]
    inputs[1] = dataclasses.replace(inputs[1], x=clean_x.view(E4M3), x_sf=clean_sf)
    for clamp in (None, 1.0):
        got = moe_layer(config, inputs, weights, activation_clamp=clamp)
        assert got[1].isnan().all(dim=1).tolist() == [False, True, True, False]
        assert got[1].isnan().any(dim=1).tolist() == [False, True, True, False]
        assert got[1][3].tolist() == [0.0] * 256
        assert not bool(got[0].isnan().any())
    assert close(moe_layer(config, inputs, weights)[0], clean[0])


def test_no_tokens_anywhere() -> None:
    config = MegaMoEConfig(2, 4, 2, 128, 128, 8)
    _, weights = make_weights(config)
    inputs = make_inputs(config, [0, 0])
    pool = dispatch(config, inputs, 1)
    assert (pool.num_routes, pool.num_blocks, pool.expert_counts.tolist()) == (0, 0, [0, 0])
    acc, magnitude = l1_gemm(config, pool, weights[1][0])
    assert tuple(acc.shape) == tuple(magnitude.shape) == (0, 256)
    assert [tuple(y.shape) for y in moe_layer(config, inputs, weights)] == [(0, 128), (0, 128)]


def test_experts_without_routes_are_not_touched_and_memory_stays_small() -> None:
    """Hidden 7168, intermediate 2048: peak memory of a process that converts 2 of 4 experts; the others hold NaN."""
    code = """
import torch
from pathlib import Path
from megamoe.config import MegaMoEConfig
from megamoe.quant import E4M3, quantize_activations
from megamoe.reference import RankInputs, dispatch, l1_gemm, moe_layer
from megamoe.weights import L1Weights, L2Weights
torch.set_num_threads(2)
config = MegaMoEConfig(1, 4, 2, 7168, 2048, 8)
def weight(rows, columns):
    bits = torch.full((4, rows, columns), 0x7F, dtype=torch.uint8)
    bits[1:3].random_(0x20, 0x40)
    return bits.view(E4M3)
l1 = L1Weights(weight(4096, 7168), torch.full((4, 32, 56), 0.01))
l2 = L2Weights(weight(7168, 2048), torch.full((4, 56, 16), 0.01))
x, sf = quantize_activations(torch.randn(8, 7168, generator=torch.Generator().manual_seed(0)))
inputs = [RankInputs(x, sf, torch.tensor([[1, 2]] * 8), torch.ones(8, 2))]
(y,) = moe_layer(config, inputs, [(l1, l2)])
pool = dispatch(config, inputs, 0)
acc, magnitude = l1_gemm(config, pool, l1, torch.tensor([3]))
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0])
print(bool(y.isfinite().all()) and bool((magnitude >= acc.abs()).all()), peak // 1024)
"""
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    finite, peak_mib = result.stdout.split()
    assert finite == "True"
    assert int(peak_mib) < 1280  # of which 170 are the e4m3 weights and 300 or so torch


def test_refusals_name_argument_value_and_expectation() -> None:
    config = MegaMoEConfig(2, 4, 2, 256, 128, 8)
    inputs = make_inputs(config, [3, 2])
    natural, weights = make_weights(config)
    pool = dispatch(config, inputs, 0)
    l1, l2 = weights[0]
    acc, _ = l1_gemm(config, pool, l1, magnitude=False)
    h = l1_epilogue(config, acc, pool.topk_weights)
    q, sf = quantize_h(config, h)
    short = [inputs[0], dataclasses.replace(inputs[1], topk_idx=inputs[1].topk_idx.int())]
    n = pool.num_routes
    for call, words in [
        (lambda: dispatch(config, inputs[:1], 0), "inputs: got those of 1 ranks, expected 2"),
        (lambda: dispatch(config, inputs, 2), "rank: got 2, expected 0 to 1"),
        (
            lambda: dispatch(config, short, 0),
            r"inputs\[1\].topk_idx: got int32 \[2, 2\] on cpu, expected int64 \[2, 2\]",
        ),
        (lambda: moe_layer(config, inputs, weights[:1]), "weights: got those of 1 ranks, expected 2"),
        (lambda: moe_layer(config, inputs, natural), "l1_weights: got tuple, expected L1Weights"),  # type: ignore[arg-type]
        (lambda: l1_gemm(config, pool, natural[0][0]), "l1: got tuple, expected L1Weights"),  # type: ignore[call-overload]
        (
            lambda: l1_gemm(config, pool, l1, torch.tensor([n])),
            f"rows: got {n} to {n}, expected positions 0 to {n - 1}",
        ),
        (lambda: l1_gemm(config, pool, l1, torch.tensor([0.5])), r"rows: got float32 \[1\]"),
        (lambda: l1_epilogue(config, acc[:, :200], pool.topk_weights), r"acc: got .* expected \[n, 256\]"),
        (lambda: l1_epilogue(config, acc, pool.topk_weights[1:]), "topk_weights: got"),
        (lambda: l1_epilogue(config, acc, pool.topk_weights, activation_clamp=-1.0), "activation_clamp: got -1.0"),
        (lambda: l1_epilogue(config, acc, pool.topk_weights, activation_clamp=math.nan), "activation_clamp: got nan"),
        (lambda: quantize_h(config, h[:, :64]), r"h: got .* expected \[n, 128\]"),
        (lambda: l2_gemm(config, pool, q[1:], sf, l2), "h_q: got float8_e4m3fn"),
        (lambda: l2_gemm(config, pool, q, sf[:, :0], l2), "h_sf: got float32"),
        (lambda: l2_gemm(config, pool, q, sf, natural[0][1]), "l2: got tuple"),  # type: ignore[arg-type]
        (lambda: l2_gemm_unquantised(config, pool, h.float(), l2), "h: got float32 .* expected float64"),
        (lambda: combine(config, inputs[0], torch.zeros(2, 2, 256)), r"partial: got float32 .* bf16 \[2, 3, 256\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


# ---- bounds ----


def test_the_table() -> None:
    """The bounds that were agreed; a looser one is a finding."""
    limits = {name: bound.limit for name, bound in BOUNDS.items()}
    assert limits == {
        "exact": 0.0,
        "l1_accum": 3e-4,
        "l1_accum_positive": 1.5e-3,
        "l1_accum_cancelling": 1.5e-3,
        "l1_accum_host": pytest.approx(3e-5),
        "l1_accum_host_positive": pytest.approx(1.5e-4),
        "l1_accum_fast": 5e-3,
        "l2_acts_sf": 3e-3,
        "l2_acts_sf_fast": 2e-2,
        "l2_acts": 1.0,
        "l2_acts_tensor_core": 1.0,
        "l2_acts_clamped": 1.0,
        "l2_acts_fast": 1.0,
        "combine": 2.5e-3,
        "combine_fast": 5e-3,
        "y": 8e-3,
        "y_all_ranks": 8e-3,
        "y_unquantised": 2.6e-2,
        "y_fast": 16e-3,
        "y_fast_all_ranks": 16e-3,
        "y_unquantised_fast": 5.2e-2,
    }
    row_limits = {name: bound.row_limit for name, bound in BOUNDS.items() if bound.row_limit is not None}
    assert row_limits == {
        "combine": 3e-2,
        "combine_fast": 6e-2,
        "y": 3e-2,
        "y_all_ranks": 3e-2,
        "y_fast": 6e-2,
        "y_fast_all_ranks": 6e-2,
    }
    shares = {name: (bound.unequal_share, bound.near) for name, bound in BOUNDS.items() if bound.unequal_share}
    assert shares == {
        "l2_acts": (0.02, 0.0),
        "l2_acts_tensor_core": (0.02, pytest.approx(0.448)),
        "l2_acts_clamped": (0.02, pytest.approx(0.896)),
        "l2_acts_fast": (0.12, pytest.approx(4.48)),
    }
    assert {name for name, bound in BOUNDS.items() if bound.all_ranks} == {"y_all_ranks", "y_fast_all_ranks"}
    assert {name for name, bound in BOUNDS.items() if bound.min_rows == 48} == {"y_unquantised", "y_unquantised_fast"}


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint32, torch.int64, torch.float32, torch.bfloat16, E4M3])
def test_exact_finds_one_bit_anywhere(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    expected = torch.arange(12).reshape(4, 3).to(raw).view(dtype).T  # rows fastest
    actual = expected.clone()
    assert compare("exact", actual, expected).ok
    actual.view(raw)[2, 1] ^= 1
    actual.view(raw)[2, 3] ^= 1
    outcome = compare("exact", actual, expected)
    assert (outcome.ok, outcome.num_elements, outcome.num_wrong, outcome.worst) == (False, 12, 2, (2, 1))
    assert "(2, 1)" in outcome.message


def test_exact_on_nan_and_zeros() -> None:
    bits = torch.tensor([[0x7F, 0x01], [0xFF, 0x80]], dtype=torch.uint8)
    for change, wrong in [
        ([[0xFF, 0x01], [0x7F, 0x80]], 0),  # a NaN is any NaN
        ([[0x7F, 0x01], [0xFF, 0x00]], 1),  # +0 is not -0
        ([[0x7F, 0x01], [0x7E, 0x80]], 1),
        ([[0x7F, 0x7F], [0xFF, 0x80]], 1),
    ]:
        outcome = compare("exact", torch.tensor(change, dtype=torch.uint8).view(E4M3), bits.view(E4M3))
        assert outcome.num_wrong == wrong
        assert outcome.ok == (wrong == 0)
    fp32 = torch.tensor([math.nan, math.inf, 0.0])
    assert compare("exact", -fp32.abs() * torch.tensor([1.0, -1.0, -1.0]), fp32).ok
    assert not compare("exact", torch.tensor([math.nan, -math.inf, 0.0]), fp32).ok
    assert not compare("exact", torch.tensor([math.nan, math.inf, -0.0]), fp32).ok


@pytest.mark.parametrize(
    "name", ["l1_accum", "l1_accum_positive", "l1_accum_cancelling", "l1_accum_host", "l1_accum_host_positive"]
)
def test_accumulator_bound_of_every_element(name: str) -> None:
    limit = BOUNDS[name].limit
    expected = torch.zeros(4, 8, dtype=torch.float64)
    magnitude = torch.logspace(-6, 6, 32, dtype=torch.float64).reshape(4, 8)
    magnitude[0, 0] = 0
    assert compare(name, expected + 0.99 * limit * magnitude, expected, magnitude=magnitude).ok
    for worst in [(3, 7), (0, 1), (0, 0)]:  # the largest, the tiniest, one that must be exact
        actual = expected + 0.5 * limit * magnitude
        actual[worst] += 0.51 * limit * float(magnitude[worst]) if worst != (0, 0) else 1e-30
        outcome = compare(name, actual, expected, magnitude=magnitude)
        assert (outcome.ok, outcome.num_wrong, outcome.worst) == (False, 1, worst)
    assert not compare(name, expected, expected + 1, magnitude=torch.full_like(magnitude, math.nan)).ok


@pytest.mark.parametrize(("name", "limit"), [("l2_acts_sf", 3e-3), ("l2_acts_sf_fast", 2e-2)])
def test_scale_bound_is_relative(name: str, limit: float) -> None:
    expected = torch.logspace(-12, 3, 64).reshape(16, 4)
    expected[3, 3] = math.inf
    actual = expected * (1 + 0.97 * limit)
    assert compare(name, actual, expected).ok
    actual[2, 1] = expected[2, 1] * (1 - 1.03 * limit)
    outcome = compare(name, actual, expected)
    assert (outcome.ok, outcome.num_wrong, outcome.worst) == (False, 1, (2, 1))
    assert outcome.max_error == pytest.approx(1.03 * limit, rel=1e-2)


def test_e4m3_steps() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = every.view(E4M3).float()
    ordinals = e4m3_ordinals(every.view(E4M3))
    finite = ~values.isnan()
    by_value = values[finite].unique()  # -0 and +0 are one
    assert ordinals[finite].tolist() == [int(torch.searchsorted(by_value, v)) - 126 for v in values[finite]]

    expected = torch.full((20, 50), 0x30, dtype=torch.uint8)
    actual = expected.clone()
    actual.flatten()[:20] += 1
    outcome = compare("l2_acts", actual.view(E4M3), expected.view(E4M3))
    assert outcome.ok, outcome.message  # 20 of 1000 is 2 %
    actual[10, 10] -= 1
    outcome = compare("l2_acts", actual.view(E4M3), expected.view(E4M3))
    assert (outcome.ok, outcome.num_wrong) == (False, 21)
    actual = expected.clone()
    actual[7, 3] += 2
    outcome = compare("l2_acts", actual.view(E4M3), expected.view(E4M3))
    assert (outcome.ok, outcome.num_wrong, outcome.worst, outcome.max_error) == (False, 1, (7, 3), 2.0)
    small = expected[:1, :5].clone()
    small[0, 2] += 1
    assert compare("l2_acts", small.view(E4M3), expected[:1, :5].view(E4M3)).ok  # one always may
    small[0, 3] -= 1
    assert not compare("l2_acts", small.view(E4M3), expected[:1, :5].view(E4M3)).ok


@pytest.mark.parametrize(
    ("name", "near_pair", "far_pair", "share"),
    [
        # Actual and expected many steps apart: 0.4375 and 0.453125 of 0.448; 4 and 4.5 of 4.48; none is near.
        ("l2_acts_tensor_core", (0.0, 0.4375), (-0.015625, 0.4375), 0.02),
        ("l2_acts_clamped", (0.0, 0.875), (0.0, 0.9375), 0.02),
        ("l2_acts_fast", (0.0, 4.0), (0.0, 4.5), 0.12),
        ("l2_acts", (0.0, 0.0), (0.0, 2**-8), 0.02),
    ],
)
def test_e4m3_steps_of_values_that_are_small_beside_the_largest(
    name: str, near_pair: tuple[float, float], far_pair: tuple[float, float], share: float
) -> None:
    expected = torch.full((10, 50), 224.0)
    actual = expected.clone()
    actual[3, 4], expected[3, 4] = near_pair
    actual[5, 6], expected[5, 6] = far_pair
    outcome = compare(name, actual.to(E4M3), expected.to(E4M3))
    assert (outcome.ok, outcome.num_wrong, outcome.worst) == (False, 1, (5, 6))
    actual[5, 6] = expected[5, 6]
    outcome = compare(name, actual.to(E4M3), expected.to(E4M3))
    assert outcome.ok, outcome.message
    assert outcome.max_error <= outcome.bound
    # What is near counts as unequal, as one step does.
    allowed = int(share * actual.numel())
    actual.view(-1)[400 : 400 + allowed - (near_pair[0] != near_pair[1])] = 240.0
    assert compare(name, actual.to(E4M3), expected.to(E4M3)).ok
    actual[7, 7] = 240.0
    outcome = compare(name, actual.to(E4M3), expected.to(E4M3))
    assert (outcome.ok, outcome.num_wrong) == (False, allowed + 1)
    actual = expected.clone()
    actual[0, 0] = 256.0  # two steps of 16
    assert not compare(name, actual.to(E4M3), expected.to(E4M3)).ok


def test_e4m3_steps_across_zero_and_nan() -> None:
    def outcome(actual: list[int], expected: list[int]) -> bool:
        pair = [torch.tensor(codes, dtype=torch.uint8).view(E4M3) for codes in (actual, expected)]
        return compare("l2_acts", *pair).ok

    assert outcome([0x80, 0x00, 0x80], [0x00, 0x00, 0x00])  # zeros are equal
    assert outcome([0x81], [0x00])
    assert not outcome([0x81], [0x01])  # -1 to +1 is two steps
    assert outcome([0x7F, 0xFF], [0xFF, 0xFF])
    assert not outcome([0x7E], [0x7F])  # 448 is no step from NaN
    assert not outcome([0x7F], [0x7E])


NORMS = ["l1_accum_fast", "combine", "combine_fast", "y", "y_fast", "y_unquantised", "y_unquantised_fast"]


@pytest.mark.parametrize("name", NORMS)
def test_norm_bounds(name: str) -> None:
    limit = BOUNDS[name].limit
    expected = torch.randn(64, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert compare(name, expected * (1 + 0.99 * limit), expected).ok
    outcome = compare(name, expected * (1 + 1.01 * limit), expected)
    assert not outcome.ok
    assert outcome.max_error == pytest.approx(1.01 * limit)
    assert outcome.num_wrong == outcome.num_elements == 64 * 128
    swapped = expected.clone()
    swapped[:, [0, 1]] = expected[:, [1, 0]]
    assert not compare(name, swapped, expected).ok


@pytest.mark.parametrize("name", ["y_all_ranks", "y_fast_all_ranks"])
def test_a_norm_over_all_ranks(name: str) -> None:
    """A rank beyond the bound passes among ranks that are not, all fail together, and every row has its own limit."""
    bound = BOUNDS[name]
    assert bound.row_limit is not None
    draw = torch.Generator().manual_seed(1)
    expected = [torch.randn(rows, 128, generator=draw, dtype=torch.float64) for rows in (1, 0, 30)]

    def outcomes(factors: tuple[float, float, float]) -> list[Comparison]:
        actual = [one * (1 + factor) for one, factor in zip(expected, factors, strict=True)]
        everyone = sum(map(squares, actual, expected), Squares(0.0, 0.0))
        return [compare(name, *pair, all_ranks=everyone) for pair in zip(actual, expected, strict=True)]

    alone, nobody, many = outcomes((1.5 * bound.limit, 0.0, 0.5 * bound.limit))
    assert all(outcome.ok for outcome in (alone, nobody, many)), (alone.message, many.message)
    assert alone.own_error == pytest.approx(1.5 * bound.limit)
    assert many.own_error == pytest.approx(0.5 * bound.limit)
    assert alone.max_error == many.max_error < bound.limit
    alone, _, many = outcomes((0.0, 0.0, 1.1 * bound.limit))
    assert (alone.ok, many.ok, many.max_error > bound.limit) == (False, False, True)
    alone, _, many = outcomes((1.01 * bound.row_limit, 0.0, 0.0))  # its norm over all is 1/5 of the bound
    assert (alone.ok, many.ok, alone.max_error < bound.limit) == (False, True, True)


def test_squares_leave_out_what_no_norm_has() -> None:
    expected = torch.tensor([[3.0, math.nan], [4.0, math.inf]])
    actual = torch.tensor([[3.0, math.nan], [4.5, math.inf]])
    assert squares(actual, expected) == Squares(0.25, 25.0)
    assert (squares(actual, expected) + Squares(0.75, 75.0)).norm_error == pytest.approx(0.1)
    assert Squares(0.0, 0.0).norm_error == 0.0
    assert Squares(1e-30, 0.0).norm_error == math.inf


@pytest.mark.parametrize("name", ["y", "y_fast", "combine", "combine_fast"])
def test_a_tiny_row_is_checked_by_itself(name: str) -> None:
    row_limit = BOUNDS[name].row_limit
    assert row_limit is not None
    expected = torch.randn(3, 16, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected[1, 5] *= 1e-8
    expected[2, 2] = 0
    actual = expected.clone()
    actual[1, 5] *= 1 + 0.99 * row_limit
    assert compare(name, actual, expected).ok
    actual[1, 5] = expected[1, 5] * (1 + 1.01 * row_limit)
    outcome = compare(name, actual, expected)
    assert (outcome.ok, outcome.num_wrong, outcome.worst) == (False, 128, (1, 5))
    assert outcome.max_row_error == pytest.approx(1.01 * row_limit)
    assert outcome.max_error < BOUNDS[name].limit
    zero_row = expected.clone()
    zero_row[2, 2, 7] = 1e-30
    outcome = compare(name, zero_row, expected)
    assert (outcome.ok, outcome.worst, outcome.max_row_error) == (False, (2, 2), math.inf)


# ---- roundings of h that may go either way ----


def small_layer() -> MegaMoEConfig:
    return MegaMoEConfig(
        num_ranks=2,
        num_experts=4,
        num_max_tokens_per_rank=16,
        num_topk=2,
        hidden=128,
        intermediate_hidden=128,
    )


def test_undecided_steps() -> None:
    """Values are quotients by the scale: 448 is the largest. The middle between 256 and 288 is 272, and so on."""
    config, scale = small_layer(), 2.0**-5
    h = torch.zeros(2, 128, dtype=torch.float64)
    values = [448.0, 271.7, -272.3, 270.0, 303.9, -9.3, 9.51, 440.0, 432.1, 0.0, 2.0**-10]
    h[0, : len(values)] = torch.tensor(values, dtype=torch.float64) * scale
    h[1, 0] = math.inf
    h[1, 1:3] = torch.tensor([math.nan, 1.0])
    steps = undecided_steps(config, h, 0.448) / scale
    large = [0.0, 32.0, 32.0, 0.0, 32.0, 1.0, 1.0, 0.0, 32.0, 2.0**-9, 2.0**-9]
    assert steps[0, : len(values)].tolist() == pytest.approx(large, rel=1e-6)
    assert steps[1].tolist() == [0.0] * 128
    assert undecided_steps(config, h, 0.25)[0, 1:6].tolist() == pytest.approx([0, 0, 0, 32 * scale, 1 * scale])


def test_undecided_rounding_is_the_largest_change_of_a_row_by_one_of_them() -> None:
    """Each element of h in turn to the other side of the middle that it is near to, and down that path to y."""
    config = small_layer()
    inputs, (_, weights) = make_inputs(config, [2, 1], seed=5, lowest=-1), make_weights(config, seed=6)
    largest = [torch.zeros(given.num_tokens, dtype=torch.float64) for given in inputs]
    near = BOUNDS["l2_acts_tensor_core"].near
    for rank, (l1, l2) in enumerate(weights):
        pool = dispatch(config, inputs, rank)
        acc, _ = l1_gemm(config, pool, l1, magnitude=False)
        h = l1_epilogue(config, acc, pool.topk_weights)
        q, sf = quantize_h(config, h)
        y = l2_gemm(config, pool, q, sf, l2)
        for way in (-1.0, 1.0):
            moved = h + way * near * 1.0001 * sf.double().repeat_interleave(128, dim=1)
            flipped = (moved / sf.double()).float().clamp(-448, 448).to(E4M3)
            large = q.float().abs() >= 8  # with steps of 1 and more; every row has some that flip
            for row, column in (large & (flipped.float() != q.float())).nonzero().tolist():
                one = q.clone()
                one[row, column] = flipped[row, column]
                change = float((l2_gemm(config, pool, one, sf, l2)[row] - y[row]).norm())
                source, token = int(pool.source[row]), int(pool.token[row])
                largest[source][token] = max(float(largest[source][token]), change)
    found = undecided_rounding(config, inputs, weights)
    for mine, want in zip(found, largest, strict=True):
        assert mine.tolist() == pytest.approx(want.tolist(), rel=1e-6)
    assert min(float(rows.max()) for rows in found) > 0
    with pytest.raises(ValueError, match="weights: got those of 1 ranks, expected 2"):
        undecided_rounding(config, inputs, weights[:1])


def row_with_a_large_h(quotient: float) -> tuple[MegaMoEConfig, list[RankInputs], list[tuple[L1Weights, L2Weights]]]:
    """One token with one route, in whose h an element is `quotient` times the scale, the largest is 448, all others
    are a fiftieth: launch 6100 of the soak with seed 5 (2 x H200, 2026-11-30) had such a row at 368.04."""
    config = MegaMoEConfig(
        num_ranks=1, num_experts=1, num_max_tokens_per_rank=1, num_topk=1, hidden=256, intermediate_hidden=128
    )
    generator = torch.Generator().manual_seed(3)
    terms = 4  # of an up value: what is left after each is rounded to e4m3
    x, x_sf = torch.zeros(1, 256), torch.ones(1, 2)
    x[0, :terms] = 1.0
    rest = torch.full((128,), 9.0)
    rest[:2] = torch.tensor([448.0, quotient])
    weight = torch.zeros(256, 256)  # natural order: 128 gates, then 128 ups
    weight[:128, 0] = 8.0
    for term in range(terms):
        weight[128:, term] = rest.to(E4M3).float()
        rest = rest - weight[128:, term]
    w2 = quantize_weights(torch.randn(1, 256, 128, generator=generator))
    l1 = (weight.to(E4M3).unsqueeze(0), torch.ones(1, 2, 2))
    inputs = [RankInputs(x.to(E4M3), x_sf, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))]
    return config, inputs, [transform_weights_for_mega_moe(l1, w2)]


@pytest.mark.parametrize(("quotient", "may_be_off"), [(368.25, True), (367.75, True), (376.0, False), (384.0, False)])
def test_a_row_may_be_off_by_one_rounding_that_is_undecided(quotient: float, may_be_off: bool) -> None:
    config, inputs, weights = row_with_a_large_h(quotient)
    pool = dispatch(config, inputs, 0)
    acc, _ = l1_gemm(config, pool, weights[0][0], magnitude=False)
    q, sf = quantize_h(config, l1_epilogue(config, acc, pool.topk_weights))
    column = 1
    before = float(q[0, column].float())
    assert before in (352.0, 384.0)
    q[0, column] = {352.0: 384.0, 384.0: 352.0}[before]
    (y,) = moe_layer(config, inputs, weights)
    off = l2_gemm(config, pool, q, sf, weights[0][1])
    (undecided,) = undecided_rounding(config, inputs, weights)
    assert not compare("y", off, y).max_row_error <= 3e-2  # type: ignore[operator]
    everyone = Squares(0.0, 1.0)  # of many other rows, which are right
    plain = compare("y_all_ranks", off, y, all_ranks=everyone)
    outcome = compare("y_all_ranks", off, y, all_ranks=everyone, undecided=undecided)
    assert (plain.ok, outcome.ok) == (False, may_be_off), outcome.message
    assert "and one rounding of h" in outcome.message
    twice = compare("y_all_ranks", y + 2 * (off - y), y, all_ranks=everyone, undecided=undecided)
    assert not twice.ok
    # The only row there is: its norm is the whole one.
    alone = squares(off, y, undecided)
    assert alone.norm_error > BOUNDS["y_all_ranks"].limit
    for one in (
        compare("y_all_ranks", off, y, all_ranks=alone, undecided=undecided),
        compare("y", off, y, undecided=undecided),
    ):
        assert one.ok == may_be_off, one.message
    assert not compare("y_all_ranks", off, y, all_ranks=squares(off, y), undecided=undecided).ok


def test_what_is_undecided_counts_beside_the_limit_of_a_row() -> None:
    limit = BOUNDS["y"].row_limit
    assert limit is not None
    expected = torch.randn(64, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected[7] *= 1e-6
    expected[9], expected[10] = 0.0, math.nan
    undecided = torch.zeros(64, dtype=torch.float64)
    undecided[7] = 0.04 * expected[7].norm()
    undecided[9] = undecided[10] = 1.0
    actual = expected.clone()
    actual[7] *= 1 + 0.99 * math.hypot(limit, 0.04)
    assert not compare("y", actual, expected).ok
    outcome = compare("y", actual, expected, undecided=undecided)
    assert outcome.ok, outcome.message
    actual[7] = expected[7] * (1 + 1.01 * math.hypot(limit, 0.04))
    outcome = compare("y", actual, expected, undecided=undecided)
    assert (outcome.ok, outcome.worst) == (False, (7,))
    assert outcome.row_bound == pytest.approx(math.hypot(limit, 0.04))
    actual = expected.clone()
    actual[9, 3] = 1e-30
    assert not compare("y", actual, expected, undecided=undecided).ok
    actual = expected.clone()
    actual[8] *= 1 + 1.01 * limit  # has nothing undecided
    assert compare("y", actual, expected, undecided=undecided).worst == (8,)
    assert not compare("y", actual, expected, undecided=undecided).ok
    # All rows together may be off by one rounding, the largest: not by that of each.
    few, rounding = expected[:4], torch.tensor([0.0, 0.02, 0.02, 0.0]) * expected[:4].norm(dim=1)
    one, two = few.clone(), few.clone()
    one[1] *= 1.02
    two[1:3] *= 1.02
    assert not compare("y", one, few).ok
    allowed = compare("y", one, few, undecided=rounding)
    assert allowed.ok
    assert allowed.max_error <= allowed.bound
    assert not compare("y", two, few, undecided=rounding).ok
    halves = [squares(two[:2], few[:2], rounding[:2]), squares(two[2:], few[2:], rounding[2:])]
    assert (halves[0] + halves[1]).undecided_square == pytest.approx(float(rounding.max()) ** 2)
    for name, rows, words in [
        ("y", undecided[:5], r"undecided: got float64 \[5\] .* expected float64 \[64\] for y"),
        ("l2_acts_sf", undecided, "undecided: got .* expected None for l2_acts_sf"),
        ("y", undecided / 0.0, "undecided: got .* with NaN or inf, expected finite sizes"),
    ]:
        with pytest.raises(ValueError, match=words):
            compare(name, expected, expected, undecided=rows)


@pytest.mark.parametrize("name", ["l1_accum_fast", "combine", "y", "y_unquantised", "l2_acts_sf", "l1_accum"])
def test_nan_must_be_in_the_same_rows(name: str) -> None:
    expected = torch.randn(64, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected[9] = math.nan
    magnitude = expected.abs() if name == "l1_accum" else None
    assert compare(name, expected.clone(), expected, magnitude=magnitude).ok
    for row, value, words in [
        (9, 0.0, "missing or different NaN or inf in 1 rows, first (9,)"),
        (20, math.nan, "unexpected NaN or inf in 1 rows, first (20,)"),
        (21, math.inf, "unexpected NaN or inf in 1 rows, first (21,)"),
    ]:
        actual = expected.clone()
        actual[row, 3] = value
        outcome = compare(name, actual, expected, magnitude=magnitude)
        assert not outcome.ok
        assert outcome.num_wrong >= 1
        assert outcome.worst[0] == row
        assert words in outcome.message
    all_nan = torch.full_like(expected, math.nan)
    assert not compare(name, all_nan, expected, magnitude=magnitude).ok
    infinite = expected.clone()
    infinite[4, 4] = math.inf
    scale = infinite.abs() if name == "l1_accum" else None
    assert compare(name, infinite.clone(), infinite, magnitude=scale).ok
    negative = infinite.clone()
    negative[4, 4] = -math.inf
    assert not compare(name, negative, infinite, magnitude=scale).ok


def test_norms_by_hand() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    actual = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.0, 1.0]])
    assert row_errors(actual, expected).tolist() == [0.1, 0.0, math.inf]
    assert norm_error(actual, expected) == pytest.approx(1.25**0.5 / 5)


def test_nothing_to_compare_says_so() -> None:
    outcome = compare("y", torch.empty(0, 128, dtype=torch.bfloat16), torch.empty(0, 128, dtype=torch.float64))
    assert (outcome.num_elements, outcome.ok, outcome.worst) == (0, True, ())
    assert "nothing to compare" in outcome.message


def test_compare_refuses_what_cannot_be_compared() -> None:
    f64 = torch.zeros(4, 8, dtype=torch.float64)
    fp8 = torch.zeros(4, 8).to(E4M3)
    for call, words in [
        (lambda: compare("close", f64, f64), "name: got 'close', expected one of exact, l1_accum"),
        (lambda: compare("y", f64[:2], f64), r"actual: got float64 \[2, 8\] on cpu, expected the shape .* \[4, 8\]"),
        (lambda: compare("exact", f64.float(), f64), "actual: got float32 .* expected the dtype"),
        (lambda: compare("l2_acts", f64, fp8), "actual: got float64 .* expected e4m3"),
        (lambda: compare("l2_acts", fp8, f64), "expected: got float64 .* expected e4m3"),
        (lambda: compare("y", f64.long(), f64), "actual: got int64 .* expected floating point"),
        (lambda: compare("l1_accum", f64, f64), r"magnitude: got NoneType None, expected float64 \[4, 8\]"),
        (lambda: compare("y", f64, f64, magnitude=f64), "magnitude: got float64 .* expected None for y"),
        (lambda: compare("y_all_ranks", f64, f64), "all_ranks: got None, expected the squares of all ranks"),
        (lambda: compare("y", f64, f64, all_ranks=Squares(0.0, 1.0)), "all_ranks: got Squares.*, expected None for y"),
        (lambda: compare("y_unquantised", f64, f64), "actual: got 4 rows, expected at least 48"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_a_plain_fp32_kernel_meets_the_bounds() -> None:
    """The rules of the kernel in torch fp32, one scale group at a time: the bounds fit what they are meant for."""
    config = MegaMoEConfig(1, 4, 2, 512, 256, 64, l2_sf_granularity=64)
    (given_inputs,) = make_inputs(config, [48], seed=2)
    natural, weights = make_weights(config)
    l1, l2 = weights[0]
    pool = dispatch(config, [given_inputs], 0)
    expert = pool.expert
    acc = torch.zeros(pool.num_routes, 512)
    order = torch.tensor([base + 8 * pair + i for pair in range(32) for base in (0, 256) for i in range(8)])
    (w1, s1), (w2, s2) = natural[0]
    for route in range(pool.num_routes):
        local = int(expert[route])
        for group in range(4):
            columns = slice(128 * group, 128 * group + 128)
            part = w1[local][:, columns].float() @ pool.x[route, columns].float()
            scale = pool.x_sf[route, group] * s1[local][:, group].repeat_interleave(128)
            acc[route] += (part * scale)[order]
    exact_acc, magnitude = l1_gemm(config, pool, l1)
    host = compare("l1_accum_host", acc, exact_acc, magnitude=magnitude)
    assert host.ok, host.message
    gate, up = acc[:, order.argsort()].chunk(2, dim=1)
    h = gate / (1 + torch.exp(-gate)) * up * pool.topk_weights[:, None]
    q, sf = quantize_activations(h, granularity=64)
    exact_q, exact_sf = quantize_h(config, l1_epilogue(config, exact_acc, pool.topk_weights))
    for outcome in (compare("l2_acts", q, exact_q), compare("l2_acts_sf", sf, exact_sf)):
        assert outcome.ok, outcome.message
    part = torch.stack(
        [
            dequantize_weights(w2[int(e)], s2[int(e)], torch.float32) @ row
            for e, row in zip(expert, dequantize_activations(q, sf, torch.float32), strict=True)
        ]
    ).bfloat16()
    outcome = compare("combine", part, l2_gemm(config, pool, q, sf, l2))
    assert outcome.ok, outcome.message
    assert outcome.max_error > 1e-3  # bf16 is seen
    (partial,) = scatter_partials(config, [given_inputs], [pool], [part])
    y = combine(config, given_inputs, partial)
    (exact_y,) = moe_layer(config, [given_inputs], weights)
    (unquantised_y,) = moe_layer(config, [given_inputs], weights, quantize_hidden=False)
    for outcome in (compare("y", y, exact_y), compare("y_unquantised", y, unquantised_y)):
        assert outcome.ok, outcome.message
    assert not compare("y", y, unquantised_y).ok  # the quantisation of h is part of the oracle
