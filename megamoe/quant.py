"""FP8 (e4m3) quantisation of activations and weights.

Every operation is one IEEE fp32 operation, rounded to nearest even, so that CPU and GPU agree bit for bit::

    amax = max(|v| over the group, NaN ignored, 1e-10)
    sf   = amax * fp32(1/448)          # a product: torch on a GPU would turn amax / 448 into this anyway, the CPU not
    inv  = 1 / sf
    q    = e4m3_rn_sat(v * inv)

An infinite value makes ``sf`` infinite and itself NaN (inf * 0), so its row is NaN from there on. A group is
`granularity` columns of one token for activations and 128 x 128 for weights.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import cast

import torch
from torch import Tensor

from megamoe.config import SCALE_BLOCK

E4M3 = torch.float8_e4m3fn
FP32 = torch.finfo(torch.float32)
FP32_MAX = float(FP32.max)
E4M3_MAX = 448.0
"""Largest finite e4m3 value."""
E4M3_NAN_BITS = 0x7F
"""The only NaN that quantisation writes (0xFF is a NaN too, and is read as one)."""
FP32_INV_E4M3_MAX = float.fromhex("0x1.24924ap-9")
"""1/448 rounded to fp32."""
AMAX_FLOOR = 1e-10
"""Lower limit of a group's amax (rounded to fp32): keeps 1/sf finite for groups of zeros."""
ACTIVATION_GRANULARITIES = (64, 128)


def describe(value: object) -> str:
    """What came, for error messages: dtype and shape of a tensor, type and repr of anything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def check_memory(name: str, tensor: Tensor) -> None:
    """Check that a kernel may read and write all of a tensor: offloaders free the memory of tensors that live on.

    Raises:
        ValueError: it has no memory, as a fake tensor has none, or less than its shape needs.
    """
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    if held < needed:
        raise ValueError(f"{name}: got {describe(tensor)} with {held} bytes of memory, expected {needed}")


def is_fp32(value: object) -> bool:
    """Whether it is a finite number within the range of fp32."""
    # In a call's path: float first, since asking the abstract class costs ten times as much.
    return isinstance(value, (float, Real)) and bool(-FP32_MAX <= cast(float, value) <= FP32_MAX)


def e4m3_rn_sat(values: Tensor) -> Tensor:
    """Rounds fp32 to e4m3: nearest even, saturating at +-448 (also for inf), the sign of zero kept, NaN to 0x7F.

    Args:
        values: fp32, any shape.

    Returns:
        e4m3, same shape.

    Raises:
        ValueError: `values` is not an fp32 tensor.
    """
    if not isinstance(values, Tensor) or values.dtype != torch.float32:
        raise ValueError(f"values: got {describe(values)}, expected an fp32 tensor")
    # Beyond 448 torch's own conversion gives NaN or saturates, by version and device; clamp lets NaN pass.
    bits = values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
    return bits.masked_fill_(values.isnan(), E4M3_NAN_BITS).view(E4M3)


def _scales(amax: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """fp32 (sf, 1/sf) of groups with these fp32 maxima."""
    sf = amax.clamp(min=AMAX_FLOOR) * FP32_INV_E4M3_MAX
    if ue8m0:
        sf = _round_up_to_power_of_two(sf)
    return sf, torch.ones_like(sf) / sf


def _round_up_to_power_of_two(sf: Tensor) -> Tensor:
    """Positive normal fp32 or inf, rounded up to a power of two in its bits: any mantissa carries into the exponent."""
    bits = sf.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def quantize_activations(x: Tensor, *, granularity: int = 128, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantises each token's groups of `granularity` columns.

    Args:
        x: bf16 or fp32 [tokens, hidden], any strides; hidden a positive multiple of `granularity`.
        granularity: columns that share a scale, 64 or 128.
        ue8m0: round each scale up to a power of two.

    Returns:
        (q, sf): e4m3 [tokens, hidden] and fp32 [tokens, hidden / granularity], contiguous, on the device of `x`.
        NaN becomes NaN and does not touch the scale; inf makes the scale inf and itself NaN.

    Raises:
        ValueError: an argument is not as above.
    """
    if granularity not in ACTIVATION_GRANULARITIES:
        raise ValueError(f"granularity: got {granularity!r}, expected 64 or 128 columns")
    if not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float32) or x.dim() != 2:
        raise ValueError(f"x: got {describe(x)}, expected bf16 or fp32 [tokens, hidden]")
    num_tokens, hidden = x.shape
    if hidden == 0 or hidden % granularity != 0:
        raise ValueError(
            f"x: got {describe(x)}, expected [tokens, hidden], hidden a positive multiple of granularity {granularity}"
        )
    groups = x.to(torch.float32).reshape(num_tokens, hidden // granularity, granularity)
    amax = groups.abs().masked_fill_(groups.isnan(), 0.0).amax(dim=-1)
    sf, inv = _scales(amax, ue8m0)
    return e4m3_rn_sat(groups * inv.unsqueeze(-1)).reshape(num_tokens, hidden), sf


def quantize_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises blocks of 128 x 128, one matrix at a time (so that the fp32 copy is one matrix large).

    Args:
        w: bf16 or fp32 [..., N, K], N and K positive multiples of 128, every value finite.

    Returns:
        (q, sf): e4m3 [..., N, K] and fp32 [..., N / 128, K / 128], contiguous, on the device of `w`.

    Raises:
        ValueError: an argument is not as above, or `w` holds NaN or inf.
    """
    if not isinstance(w, Tensor) or w.dtype not in (torch.bfloat16, torch.float32) or w.dim() < 2:
        raise ValueError(f"w: got {describe(w)}, expected bf16 or fp32 [..., N, K]")
    num_rows, num_columns = w.shape[-2:]
    if min(num_rows, num_columns) == 0 or num_rows % SCALE_BLOCK or num_columns % SCALE_BLOCK:
        raise ValueError(f"w: got {describe(w)}, expected [..., N, K] with N and K positive multiples of {SCALE_BLOCK}")
    leading = w.shape[:-2]
    num_matrices = math.prod(leading)
    row_blocks, column_blocks = num_rows // SCALE_BLOCK, num_columns // SCALE_BLOCK
    q = torch.empty((num_matrices, num_rows, num_columns), dtype=E4M3, device=w.device)
    sf = torch.empty((num_matrices, row_blocks, column_blocks), dtype=torch.float32, device=w.device)
    for index, matrix in enumerate(w.reshape(num_matrices, num_rows, num_columns).unbind(0)):
        blocks = matrix.to(torch.float32).reshape(row_blocks, SCALE_BLOCK, column_blocks, SCALE_BLOCK)
        amax = blocks.abs().amax(dim=(1, 3))  # NaN wins here, inf is the maximum: one look at amax finds both
        if not bool(amax.isfinite().all()):
            num_bad = int((~blocks.isfinite()).sum())
            raise ValueError(f"w: got {num_bad} values that are NaN or inf in matrix {index}, expected finite weights")
        sf[index], inv = _scales(amax, ue8m0=False)
        q[index] = e4m3_rn_sat(blocks * inv[:, None, :, None]).reshape(num_rows, num_columns)
    return q.reshape(*leading, num_rows, num_columns), sf.reshape(*leading, row_blocks, column_blocks)


def dequantize_activations(q: Tensor, sf: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """q * sf, each group of columns with its scale; exact in float64.

    Args:
        q: e4m3 [rows, columns].
        sf: fp32 [rows, columns / g] with g = 64 or 128.
        dtype: float64 or fp32, of the result and of the one product an element takes.

    Returns:
        `dtype` [rows, columns].

    Raises:
        ValueError: an argument is not as above.
    """
    if not isinstance(q, Tensor) or q.dtype != E4M3 or q.dim() != 2:
        raise ValueError(f"q: got {describe(q)}, expected e4m3 [rows, columns]")
    _check_dequantize_dtype(dtype)
    num_rows, num_columns = q.shape
    shapes = [
        (num_rows, num_columns // g) for g in ACTIVATION_GRANULARITIES if num_columns > 0 and num_columns % g == 0
    ]
    if not isinstance(sf, Tensor) or sf.dtype != torch.float32 or tuple(sf.shape) not in shapes:
        raise ValueError(
            f"sf: got {describe(sf)}, expected fp32 {' or '.join(str(list(s)) for s in shapes)} for q {list(q.shape)}"
        )
    num_groups = sf.shape[1]
    values = q.to(dtype).reshape(num_rows, num_groups, num_columns // num_groups)
    return values.mul_(sf.to(dtype).unsqueeze(-1)).reshape(num_rows, num_columns)


def dequantize_weights(q: Tensor, sf: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """q * sf, each block of 128 x 128 with its scale, natural row order; exact in float64.

    Args:
        q: e4m3 [..., N, K].
        sf: fp32 [..., N / 128, K / 128].
        dtype: float64 or fp32, of the result and of the one product an element takes.

    Returns:
        `dtype` [..., N, K].

    Raises:
        ValueError: an argument is not as above.
    """
    if (
        not isinstance(q, Tensor)
        or q.dtype != E4M3
        or q.dim() < 2
        or q.shape[-2] % SCALE_BLOCK
        or q.shape[-1] % SCALE_BLOCK
    ):
        raise ValueError(f"q: got {describe(q)}, expected e4m3 [..., N, K] with N and K multiples of {SCALE_BLOCK}")
    _check_dequantize_dtype(dtype)
    row_blocks, column_blocks = q.shape[-2] // SCALE_BLOCK, q.shape[-1] // SCALE_BLOCK
    expected = (*q.shape[:-2], row_blocks, column_blocks)
    if not isinstance(sf, Tensor) or sf.dtype != torch.float32 or tuple(sf.shape) != expected:
        raise ValueError(f"sf: got {describe(sf)}, expected fp32 {list(expected)} beside q {list(q.shape)}")
    blocks = q.to(dtype).reshape(*q.shape[:-2], row_blocks, SCALE_BLOCK, column_blocks, SCALE_BLOCK)
    return blocks.mul_(sf.to(dtype)[..., :, None, :, None]).reshape(q.shape)


def _check_dequantize_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float64, torch.float32):
        raise ValueError(f"dtype: got {dtype}, expected torch.float64 or torch.float32")
