"""Expert weights: from the checkpoint's order to the one the kernel reads, and back.

The L1 matrix of an expert holds gate rows 0..I-1 and up rows I..2I-1. The kernel wants the gate and the up value of a
column in one accumulator fragment, so the rows are interleaved by 8: g0..7, u0..7, g8..15, u8..15, ... Scales stay in
natural order: one scale covers 128 gate or 128 up rows, wherever these rows now lie.

`L1Weights` and `L2Weights` are the mark that weights were transformed; plain tuples are natural.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megamoe.config import INTERLEAVE, SCALE_BLOCK, MegaMoEConfig
from megamoe.quant import E4M3, describe

ALIGNMENT_BYTES = 16
"""Of every transformed tensor: what bulk copies and tensor maps need."""


class L1Weights(NamedTuple):
    """Transformed gate and up projections of one rank's experts; contiguous, 16-byte aligned."""

    weight: Tensor
    """e4m3 [E_local, 2I, H], rows interleaved by 8."""
    sf: Tensor
    """fp32 [E_local, 2I/128, H/128], natural order: gate blocks, then up blocks."""


class L2Weights(NamedTuple):
    """Down projections of one rank's experts as the kernel reads them (natural order); contiguous, 16-byte aligned."""

    weight: Tensor
    """e4m3 [E_local, H, I]."""
    sf: Tensor
    """fp32 [E_local, H/128, I/128]."""


def interleaved_to_natural(intermediate_hidden: int) -> Tensor:
    """int64 [2I]: the natural row (gate 0..I-1, up I..2I-1) that lies at each row of a transformed L1 weight."""
    if intermediate_hidden <= 0 or intermediate_hidden % INTERLEAVE:
        raise ValueError(
            f"intermediate_hidden: got {intermediate_hidden}, expected a positive multiple of {INTERLEAVE}"
        )
    natural = torch.arange(2 * intermediate_hidden).reshape(2, intermediate_hidden // INTERLEAVE, INTERLEAVE)
    return natural.transpose(0, 1).reshape(-1)


def transform_weights_for_mega_moe(
    l1_weights: tuple[Tensor, Tensor], l2_weights: tuple[Tensor, Tensor]
) -> tuple[L1Weights, L2Weights]:
    """Brings one rank's expert weights into the order that the kernel reads.

    Args:
        l1_weights: (weight e4m3 [E_local, 2I, H], gate rows then up rows; sf fp32 [E_local, 2I/128, H/128]).
        l2_weights: (weight e4m3 [E_local, H, I]; sf fp32 [E_local, H/128, I/128]). Any strides, all on one device.

    Returns:
        (L1Weights, L2Weights). The L1 weight is a copy; the other three share memory with the arguments where these
        are contiguous and 16-byte aligned already.

    Raises:
        ValueError: weights that were transformed already, or a dtype, shape or device that is not as above.
    """
    for name, pair in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
        if isinstance(pair, (L1Weights, L2Weights)):
            raise ValueError(f"{name}: got {type(pair).__name__}, transformed already, expected natural (weight, sf)")
    l1_weight, l1_sf, l2_weight, l2_sf = _check_pairs(l1_weights, l2_weights)
    num_experts, num_l1_rows, hidden = l1_weight.shape
    halves = l1_weight.view(torch.uint8).reshape(num_experts, 2, num_l1_rows // (2 * INTERLEAVE), INTERLEAVE, hidden)
    interleaved = halves.transpose(1, 2).reshape(num_experts, num_l1_rows, hidden).view(E4M3)
    return (
        L1Weights(_contiguous_aligned(interleaved), _contiguous_aligned(l1_sf)),
        L2Weights(_contiguous_aligned(l2_weight), _contiguous_aligned(l2_sf)),
    )


def untransform_weights_for_mega_moe(
    l1_weights: L1Weights, l2_weights: L2Weights
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The inverse of `transform_weights_for_mega_moe`: ((l1 weight, l1 sf), (l2 weight, l2 sf)) in natural order.

    The L1 weight is a copy, the other three share memory with the arguments.

    Raises:
        ValueError: weights that were not transformed, or a dtype, shape or device that does not fit.
    """
    _check_marks(l1_weights, l2_weights)
    l1_weight, l1_sf, l2_weight, l2_sf = _check_pairs(l1_weights, l2_weights)
    num_experts, num_l1_rows, hidden = l1_weight.shape
    pairs = l1_weight.view(torch.uint8).reshape(num_experts, num_l1_rows // (2 * INTERLEAVE), 2, INTERLEAVE, hidden)
    natural = pairs.transpose(1, 2).reshape(num_experts, num_l1_rows, hidden).view(E4M3)
    return (natural.contiguous(), l1_sf), (l2_weight, l2_sf)


def check_transformed_weights(config: MegaMoEConfig, l1_weights: L1Weights, l2_weights: L2Weights) -> None:
    """Checks that these are one rank's transformed weights for `config`, laid out as a kernel may read them.

    Raises:
        ValueError: not transformed, or dtype, shape, device, contiguity or alignment do not fit; names the tensor.
    """
    _check_marks(l1_weights, l2_weights)
    _check_pairs(l1_weights, l2_weights)
    num_experts, hidden, intermediate = config.experts_per_rank, config.hidden, config.intermediate_hidden
    for name, tensor, shape in (
        ("l1_weights.weight", l1_weights.weight, (num_experts, 2 * intermediate, hidden)),
        ("l2_weights.weight", l2_weights.weight, (num_experts, hidden, intermediate)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: got {describe(tensor)}, expected e4m3 {list(shape)} by the config")
    for name, tensor in (
        ("l1_weights.weight", l1_weights.weight),
        ("l1_weights.sf", l1_weights.sf),
        ("l2_weights.weight", l2_weights.weight),
        ("l2_weights.sf", l2_weights.sf),
    ):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got strides {tensor.stride()} of shape {list(tensor.shape)}, expected a contiguous tensor"
            )
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            raise ValueError(
                f"{name}: got address {tensor.data_ptr():#x}, expected a multiple of {ALIGNMENT_BYTES} bytes "
                "(a clone() has one)"
            )


def _check_marks(l1_weights: object, l2_weights: object) -> None:
    for name, pair, mark in (("l1_weights", l1_weights, L1Weights), ("l2_weights", l2_weights, L2Weights)):
        if not isinstance(pair, mark):
            raise ValueError(
                f"{name}: got {type(pair).__name__}, expected {mark.__name__} from transform_weights_for_mega_moe"
            )


def _check_pairs(
    l1_weights: tuple[Tensor, Tensor], l2_weights: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors, once dtype, rank, shape and device are known to fit together."""
    l1_weight, l1_sf = _unpack("l1_weights", l1_weights)
    l2_weight, l2_sf = _unpack("l2_weights", l2_weights)
    _check_tensor("l1_weights weight", l1_weight, E4M3, "e4m3 [E_local, 2I, H]")
    num_experts, num_l1_rows, hidden = l1_weight.shape
    if min(l1_weight.shape) == 0 or num_l1_rows % (2 * SCALE_BLOCK) or hidden % SCALE_BLOCK:
        raise ValueError(
            f"l1_weights weight: got {describe(l1_weight)}, "
            f"expected e4m3 [E_local, 2I, H] with I and H positive multiples of {SCALE_BLOCK}"
        )
    intermediate = num_l1_rows // 2
    expected_shapes = (
        (
            "l1_weights sf",
            l1_sf,
            torch.float32,
            "fp32",
            (num_experts, num_l1_rows // SCALE_BLOCK, hidden // SCALE_BLOCK),
        ),
        ("l2_weights weight", l2_weight, E4M3, "e4m3", (num_experts, hidden, intermediate)),
        (
            "l2_weights sf",
            l2_sf,
            torch.float32,
            "fp32",
            (num_experts, hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK),
        ),
    )
    for name, tensor, dtype, dtype_name, shape in expected_shapes:
        expectation = f"{dtype_name} {list(shape)} beside an l1 weight {list(l1_weight.shape)}"
        _check_tensor(name, tensor, dtype, expectation)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: got {describe(tensor)}, expected {expectation}")
        if tensor.device != l1_weight.device:
            raise ValueError(f"{name}: got {describe(tensor)}, expected it on {l1_weight.device} like the l1 weight")
    return l1_weight, l1_sf, l2_weight, l2_sf


def _unpack(name: str, pair: object) -> tuple[Tensor, Tensor]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        came = f"a tuple of {len(pair)}" if isinstance(pair, tuple) else type(pair).__name__
        raise ValueError(f"{name}: got {came}, expected a tuple (weight, sf)")
    weight, sf = pair
    return weight, sf


def _check_tensor(name: str, tensor: object, dtype: torch.dtype, expectation: str) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.dim() != 3:
        raise ValueError(f"{name}: got {describe(tensor)}, expected {expectation}")


def _contiguous_aligned(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous and aligned, else a copy (torch allocates to 64 bytes at least)."""
    tensor = tensor.contiguous()
    if tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
