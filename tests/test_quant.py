"""quant.py against exact arithmetic: fractions for fp32 operations, the list of all e4m3 values for the rounding."""

from __future__ import annotations

import math
import subprocess
import sys
from bisect import bisect_left
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megamoe.quant import (
    E4M3,
    E4M3_MAX,
    FP32_INV_E4M3_MAX,
    dequantize_activations,
    dequantize_weights,
    e4m3_rn_sat,
    quantize_activations,
    quantize_weights,
)


def e4m3_value(code: int) -> Fraction:
    """Value of a positive finite e4m3 code by its definition: 4 bits of exponent (bias 7), 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(1, 2**6)
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3_VALUES = [e4m3_value(code) for code in range(0x7F)]
E4M3_FLOATS = np.array([float(value) for value in E4M3_VALUES])  # exact: 4 significant bits


def round_to_fp32(value: Fraction) -> float:
    """Nearest fp32, ties to even, with subnormals and overflow to inf."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(size / step) * step  # round() of a Fraction goes to even
    result = math.inf if rounded >= Fraction(2) ** 128 else float(rounded)
    return math.copysign(result, value)


def round_to_e4m3(value: float) -> int:
    """Bits of the nearest e4m3 value, ties to the even code, saturating, NaN to 0x7F; on fractions."""
    if math.isnan(value):
        return 0x7F
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    if abs(value) >= E4M3_MAX:
        return sign | 0x7E
    size = Fraction(abs(value))
    above = bisect_left(E4M3_VALUES, size)
    if E4M3_VALUES[above] == size:
        return sign | above
    below = above - 1
    to_below, to_above = size - E4M3_VALUES[below], E4M3_VALUES[above] - size
    nearest = below if to_below < to_above or (to_below == to_above and below % 2 == 0) else above
    return sign | nearest


def multiply_fp32(left: float, right: float) -> float:
    if not (math.isfinite(left) and math.isfinite(right)):
        return left * right
    product = round_to_fp32(Fraction(left) * Fraction(right))
    return product if product != 0 else math.copysign(0.0, math.copysign(1.0, left) * math.copysign(1.0, right))


def scale_exactly(values: list[float], ue8m0: bool) -> tuple[float, float]:
    """(sf, 1/sf) of a group by its rule, on fractions."""
    amax = max([abs(v) for v in values if not math.isnan(v)] + [round_to_fp32(Fraction(1e-10))])
    if math.isinf(amax):
        return math.inf, 0.0
    sf = round_to_fp32(Fraction(amax) * Fraction(round_to_fp32(Fraction(1, 448))))
    if ue8m0:
        power = Fraction(1)
        while power < Fraction(sf):
            power *= 2
        while power / 2 >= Fraction(sf):
            power /= 2
        sf = float(power)
    return sf, round_to_fp32(1 / Fraction(sf))


def quantize_exactly(values: list[float], ue8m0: bool) -> tuple[list[int], float]:
    """(e4m3 bits, sf) of one group by its rule, on fractions."""
    sf, inv = scale_exactly(values, ue8m0)
    return [round_to_e4m3(multiply_fp32(v, inv)) for v in values], sf


def round_to_e4m3_array(values: np.ndarray) -> np.ndarray:
    """`round_to_e4m3` of an fp32 array: every fp32 and every midpoint of e4m3 values is exact in float64."""
    size = np.abs(values.astype(np.float64))
    midpoints = (E4M3_FLOATS[:-1] + E4M3_FLOATS[1:]) / 2
    code = np.searchsorted(midpoints, np.nan_to_num(size), side="left")
    tie = (code < len(midpoints)) & (midpoints[np.minimum(code, len(midpoints) - 1)] == size)
    code = code + (tie & (code % 2 == 1))
    bits = code | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, bits).astype(np.uint8)


def bits_of(q: torch.Tensor) -> np.ndarray:
    assert q.dtype == E4M3
    return q.view(torch.uint8).numpy()


def fp32_near_midpoints() -> np.ndarray:
    """Every e4m3 value, every midpoint, and the fp32 on either side of each; both signs; and beyond the largest."""
    midpoints = (E4M3_FLOATS[:-1] + E4M3_FLOATS[1:]) / 2
    points = np.concatenate([E4M3_FLOATS, midpoints, [464.0, 480.0, 1e9]]).astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
    special = np.array([np.inf, np.nan, np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal], np.float32)
    both = np.concatenate([near, special])
    return np.concatenate([both, -both])


def test_e4m3_rounding_at_every_value_and_midpoint() -> None:
    values = fp32_near_midpoints()
    expected = [round_to_e4m3(float(v)) for v in values]
    assert bits_of(e4m3_rn_sat(torch.from_numpy(values))).tolist() == expected
    assert round_to_e4m3_array(values).tolist() == expected  # the array form, which the tests below use


@given(arrays(np.float32, 64, elements=st.floats(width=32)))
def test_e4m3_rounding_of_any_fp32(values: np.ndarray) -> None:
    assert bits_of(e4m3_rn_sat(torch.from_numpy(values))).tolist() == [round_to_e4m3(float(v)) for v in values]


def test_e4m3_rounding_of_strided_input() -> None:
    values = torch.linspace(-500, 500, 256 * 6).reshape(256, 6).T
    assert bits_of(e4m3_rn_sat(values)).tolist() == round_to_e4m3_array(values.numpy()).tolist()


def test_reciprocal_constant_is_the_fp32_one() -> None:
    assert round_to_fp32(Fraction(1, 448)) == FP32_INV_E4M3_MAX


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
elements = st.one_of(
    finite,
    st.floats(width=32),  # NaN, inf, subnormal
    st.floats(-8, 8, width=32),
    st.floats(-(2.0**-30), 2.0**-30, width=32),  # around the floor of amax
    st.sampled_from([float(v) for v in fp32_near_midpoints()]),
)


@settings(max_examples=60)
@given(arrays(np.float32, (2, 128), elements=elements), st.sampled_from([64, 128]), st.booleans())
@example(np.zeros((2, 128), np.float32), 128, False)
@example(np.full((2, 128), np.finfo(np.float32).max), 128, True)
@example(np.full((2, 128), np.nan, np.float32), 64, False)
@example(np.concatenate([np.full((2, 127), 1.0, np.float32), np.full((2, 1), -np.inf, np.float32)], axis=1), 64, False)
@example(np.resize(np.append(fp32_near_midpoints()[:127], np.float32(448)), (2, 128)), 128, False)
def test_activations_against_exact_arithmetic(x: np.ndarray, granularity: int, ue8m0: bool) -> None:
    q, sf = quantize_activations(torch.from_numpy(x), granularity=granularity, ue8m0=ue8m0)
    assert tuple(q.shape) == x.shape
    assert tuple(sf.shape) == (2, 128 // granularity)
    for row in range(2):
        for group in range(128 // granularity):
            columns = slice(group * granularity, (group + 1) * granularity)
            bits, scale = quantize_exactly([float(v) for v in x[row, columns]], ue8m0)
            assert float(sf[row, group]) == scale
            assert bits_of(q)[row, columns].tolist() == bits


def test_activations_over_every_bf16() -> None:
    """All 65536 bf16 patterns, sorted so that each group holds values of a similar size (else amax hides them)."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = patterns.reshape(512, 128)
    q, sf = quantize_activations(x)
    values = x.to(torch.float32).numpy()
    for row in range(512):
        scale, inverse = scale_exactly(values[row].tolist(), ue8m0=False)
        assert float(sf[row, 0]) == scale
        with np.errstate(invalid="ignore"):
            scaled = values[row] * np.float32(inverse)  # one IEEE product
        assert bits_of(q)[row].tolist() == round_to_e4m3_array(scaled).tolist()


def test_scale_is_a_product_not_a_quotient() -> None:
    amax = np.linspace(1, 2, 4096, dtype=np.float32)
    product, quotient = amax * np.float32(FP32_INV_E4M3_MAX), amax / np.float32(448)
    assert (product != quotient).any()  # else this test shows nothing
    x = torch.from_numpy(amax)[:, None].expand(-1, 128)
    assert quantize_activations(x)[1][:, 0].numpy().tolist() == product.tolist()


def test_values_are_multiplied_by_the_rounded_reciprocal() -> None:
    """x * (1 / sf) and x / sf differ where an e4m3 midpoint is near; the rule is the product."""
    amax = np.linspace(1, 2, 1024, dtype=np.float32)[:, None]
    sf = amax * np.float32(FP32_INV_E4M3_MAX)
    midpoints = ((E4M3_FLOATS[:-1] + E4M3_FLOATS[1:]) / 2).astype(np.float32)  # 126 of them, the last below amax
    near = midpoints * sf
    x = np.concatenate([amax, near, np.zeros_like(amax)], axis=1)
    product = round_to_e4m3_array(x * (np.float32(1) / sf))
    assert (product != round_to_e4m3_array(x / sf)).any()  # else this test shows nothing
    assert np.array_equal(bits_of(quantize_activations(torch.from_numpy(x))[0]), product)


def test_ue8m0_scales_are_the_next_power_of_two() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 6, 64)[:, None]
    plain, rounded = quantize_activations(x)[1], quantize_activations(x, ue8m0=True)[1]
    mantissa, _ = torch.frexp(rounded)
    assert bool((mantissa == 0.5).all())
    assert bool((rounded >= plain).all())
    assert bool((rounded / 2 < plain).all())


def test_nan_stays_where_it_is_and_inf_takes_its_group() -> None:
    x = torch.ones(3, 256)
    x[0, 5] = math.nan
    x[1, 130] = -math.inf
    clean_q, clean_sf = quantize_activations(torch.ones(3, 256))
    q, sf = quantize_activations(x)
    nan_at = dequantize_activations(q, sf).isnan()
    assert nan_at[0].nonzero().flatten().tolist() == [5]
    assert nan_at[1].nonzero().flatten().tolist() == list(range(128, 256))  # inf * 0 for the finite ones
    assert not bool(nan_at[2].any())
    assert float(sf[0, 0]) == float(clean_sf[0, 0])
    assert float(sf[1, 1]) == math.inf
    assert bits_of(q)[0, 5] == 0x7F
    assert bits_of(q)[2].tolist() == bits_of(clean_q)[2].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_do_not_depend_on_each_other_or_on_strides(dtype: torch.dtype) -> None:
    x = torch.randn(7, 384, generator=torch.Generator().manual_seed(2)).to(dtype)
    q, sf = quantize_activations(x)
    padded = torch.zeros(7, 400, dtype=dtype)
    padded[:, :384] = x
    q_strided, sf_strided = quantize_activations(padded[:, :384])
    assert torch.equal(q.view(torch.uint8), q_strided.view(torch.uint8))
    assert torch.equal(sf, sf_strided)
    q_one, sf_one = quantize_activations(x[3:4])
    assert torch.equal(q[3:4].view(torch.uint8), q_one.view(torch.uint8))
    assert torch.equal(sf[3:4], sf_one)
    assert q.is_contiguous()
    assert sf.is_contiguous()


def test_no_tokens() -> None:
    q, sf = quantize_activations(torch.empty(0, 256, dtype=torch.bfloat16))
    assert (tuple(q.shape), tuple(sf.shape), q.dtype) == ((0, 256), (0, 2), E4M3)


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.bfloat16, torch.float32]))
def test_weights_against_exact_arithmetic(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(2, 256, 384, generator=generator)
    w = (w * torch.logspace(-14, 3, 256)[:, None]).to(dtype)
    w[0, :128, :128] = 0
    q, sf = quantize_weights(w)
    assert tuple(q.shape) == (2, 256, 384)
    assert tuple(sf.shape) == (2, 2, 3)
    values = w.to(torch.float32).numpy()
    for matrix in range(2):
        for row in range(2):
            for column in range(3):
                block = (matrix, slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
                scale, inverse = scale_exactly(values[block].flatten().tolist(), ue8m0=False)
                assert float(sf[matrix, row, column]) == scale
                scaled = values[block] * np.float32(inverse)
                assert np.array_equal(bits_of(q)[block], round_to_e4m3_array(scaled))


def test_dequantisation_is_exact_and_puts_each_scale_where_it_belongs() -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3))
    for granularity in (64, 128):
        q, sf = quantize_activations(x, granularity=granularity)
        back = dequantize_activations(q, sf)
        for row, column in [(0, 0), (1, 63), (1, 64), (2, 127), (2, 128), (0, 255)]:
            code = int(bits_of(q)[row, column])
            value = e4m3_value(code & 0x7F) * (-1 if code & 0x80 else 1)
            assert Fraction(float(back[row, column])) == value * Fraction(float(sf[row, column // granularity]))
        assert float((back - x).abs().max()) <= float(x.abs().max()) / 16
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(4))
    q, sf = quantize_weights(w)
    back = dequantize_weights(q, sf)
    for row, column in [(0, 0), (127, 128), (128, 127), (255, 383)]:
        code = int(bits_of(q)[row, column])
        value = e4m3_value(code & 0x7F) * (-1 if code & 0x80 else 1)
        assert Fraction(float(back[row, column])) == value * Fraction(float(sf[row // 128, column // 128]))
    assert dequantize_weights(q, sf, torch.float32).dtype == torch.float32
    assert torch.equal(dequantize_weights(q[None], sf[None])[0], back)


def test_refusals_name_argument_value_and_expectation() -> None:
    x, w = torch.zeros(2, 256), torch.zeros(128, 128)
    q, sf = quantize_activations(x)
    q_w, sf_w = quantize_weights(w)
    nan_w = w.clone()
    nan_w[3, 4] = math.nan
    nan_w[3, 5] = math.inf
    for call, words in [
        (lambda: quantize_activations(x.to(torch.float16)), r"x: got float16 \[2, 256\] on cpu, expected bf16 or fp32"),
        (lambda: quantize_activations(x[0]), r"x: got float32 \[256\]"),
        (lambda: quantize_activations(x[:, :200]), r"x: got float32 \[2, 200\].*multiple of granularity 128"),
        (lambda: quantize_activations(x[:, :0]), r"x: got float32 \[2, 0\].*positive"),
        (lambda: quantize_activations(x, granularity=32), "granularity: got 32, expected 64 or 128"),
        (lambda: quantize_activations(None), "x: got NoneType None"),  # type: ignore[arg-type]
        (lambda: quantize_weights(nan_w), "w: got 2 values that are NaN or inf in matrix 0, expected finite"),
        (lambda: quantize_weights(w[:64]), r"w: got float32 \[64, 128\].*multiples of 128"),
        (lambda: quantize_weights(w[0]), r"w: got float32 \[128\]"),
        (lambda: quantize_weights(w.to(torch.float64)), "w: got float64"),
        (lambda: dequantize_activations(x, sf), "q: got float32"),
        (lambda: dequantize_activations(q, sf[:, :1]), r"sf: got float32 \[2, 1\].*expected fp32 \[2, 4\] or \[2, 2\]"),
        (lambda: dequantize_activations(q, sf, torch.bfloat16), "dtype: got torch.bfloat16, expected torch.float64"),
        (lambda: dequantize_weights(q_w, sf_w[0]), r"sf: got float32 \[1\].*expected fp32 \[1, 1\]"),
        (lambda: dequantize_weights(q_w[:, :64], sf_w), "q: got float8_e4m3fn"),
        (lambda: e4m3_rn_sat(x.to(torch.float64)), "values: got float64"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_import_brings_nothing_heavy() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"  # torch looks for cuda itself
        "import megamoe.quant, megamoe.weights, megamoe.reference\n"
        "heavy = ('cuda', 'transformers', 'safetensors', 'triton', 'torch.distributed._symmetric_memory')\n"
        "print(sorted(m for m in set(sys.modules) - before if m.startswith(heavy)))"
    )
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
