"""L1: the gate and up projections, SwiGLU, and the quantisation of what it gives."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from megamoe.config import INTERLEAVE, SCALE_BLOCK, MegaMoEConfig
from megamoe.quant import E4M3, dequantize_activations, describe, quantize_activations
from megamoe.reference.dispatch import Pool
from megamoe.weights import L1Weights, interleaved_to_natural

_LARGEST_BITS = 0x7E
"""Of e4m3: 448."""


@overload
def l1_gemm(
    config: MegaMoEConfig, pool: Pool, l1: L1Weights, rows: Tensor | None = None, *, magnitude: Literal[True] = True
) -> tuple[Tensor, Tensor]: ...


@overload
def l1_gemm(
    config: MegaMoEConfig, pool: Pool, l1: L1Weights, rows: Tensor | None = None, *, magnitude: Literal[False]
) -> tuple[Tensor, None]: ...


def l1_gemm(
    config: MegaMoEConfig, pool: Pool, l1: L1Weights, rows: Tensor | None = None, *, magnitude: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Gate and up projections of pool rows.

    Args:
        config: the layer.
        pool: of the rank that owns the weights.
        l1: transformed weights of that rank's experts.
        rows: int64 [n], which routes, as positions in pool order (0 to num_routes - 1, not pool rows); None: all.
        magnitude: give the magnitude too, for the bound `l1_accum`. Costs a second product of the same size.

    Returns:
        (acc, magnitude), float64 [n, 2I], columns in the interleaved order of the transformed weights; magnitude is
        sum |a * b| * scales, or None where not asked for.

    Raises:
        ValueError: an argument does not fit.
    """
    if not isinstance(l1, L1Weights):
        raise ValueError(
            f"l1: got {type(l1).__name__}, expected L1Weights as transform_weights_for_mega_moe returns them"
        )
    rows = select_routes(pool, rows)
    experts = pool.expert[rows]
    acc = torch.empty((len(rows), config.l1_columns), dtype=torch.float64, device=pool.x.device)
    sizes = torch.empty_like(acc) if magnitude else None
    for expert in sorted(set(experts.tolist())):
        here = (experts == expert).nonzero().squeeze(1)
        x = dequantize_rows(pool.x, pool.x_sf, rows[here])
        weight = _dequantize_interleaved(l1.weight[expert], l1.sf[expert])
        acc[here] = x @ weight.T
        if sizes is not None:
            sizes[here] = x.abs_() @ weight.abs_().T
    return acc, sizes


def l1_epilogue(
    config: MegaMoEConfig, acc: Tensor, topk_weights: Tensor, *, activation_clamp: float | None = None
) -> Tensor:
    """SwiGLU times the route's weight: h = g / (1 + exp(-g)) * u * w, before quantisation.

    Args:
        config: the layer.
        acc: [n, 2I] in interleaved order; float64 of the oracle or fp32 of a target.
        topk_weights: fp32 [n].
        activation_clamp: c > 0: g = min(g, c), u = clamp(u, -c, c) first. NaN stays NaN.

    Returns:
        float64 [n, I].

    Raises:
        ValueError: an argument does not fit.
    """
    if acc.dim() != 2 or acc.shape[1] != config.l1_columns:
        raise ValueError(f"acc: got {describe(acc)}, expected [n, {config.l1_columns}]")
    if tuple(topk_weights.shape) != (acc.shape[0],):
        raise ValueError(f"topk_weights: got {describe(topk_weights)}, expected [{acc.shape[0]}]")
    if activation_clamp is not None and not activation_clamp > 0:
        raise ValueError(f"activation_clamp: got {activation_clamp}, expected a number above 0 or None")
    pairs = acc.to(torch.float64).reshape(acc.shape[0], config.intermediate_hidden // INTERLEAVE, 2, INTERLEAVE)
    gate = pairs[:, :, 0].reshape(acc.shape[0], config.intermediate_hidden)
    up = pairs[:, :, 1].reshape(acc.shape[0], config.intermediate_hidden)
    if activation_clamp is not None:
        gate = gate.clamp(max=activation_clamp)
        up = up.clamp(-activation_clamp, activation_clamp)
    return gate / (1 + torch.exp(-gate)) * up * topk_weights.to(torch.float64).unsqueeze(1)


def quantize_h(config: MegaMoEConfig, h: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds h to fp32, then quantises it by the rule of x in groups of `config.l2_sf_granularity` columns.

    Args:
        config: the layer.
        h: float64 or fp32 [n, I].

    Returns:
        (e4m3 [n, I], fp32 [n, I / l2_sf_granularity]).
    """
    if h.dim() != 2 or h.shape[1] != config.intermediate_hidden:
        raise ValueError(f"h: got {describe(h)}, expected [n, {config.intermediate_hidden}]")
    return quantize_activations(h.to(torch.float32), granularity=config.l2_sf_granularity)


def undecided_steps(config: MegaMoEConfig, h: Tensor, near: float) -> Tensor:
    """How much the quantised value of an element of h changes if it is rounded the other way, where that may happen.

    Args:
        config: the layer.
        h: as for `quantize_h`, exact.
        near: how far a target's h / scale may be from the exact one; the largest of a scale group is 448.

    Returns:
        float64 [n, I], in units of h: the step between the two e4m3 values whose middle is no further than `near` from
        the element, 0 where no middle is. NaN and inf give 0.
    """
    q, sf = quantize_h(config, h)
    scale = sf.to(torch.float64).repeat_interleave(config.l2_sf_granularity, dim=1)
    size = (h.to(torch.float64) / scale).abs()
    bits = q.view(torch.uint8) & 0x7F
    here, above, below = (
        (bits.to(torch.int16) + step).clamp(0, _LARGEST_BITS).to(torch.uint8).view(E4M3).to(torch.float64)
        for step in (0, 1, -1)
    )
    up, down = above - here, here - below
    # At either end there is no step, hence nothing that could be undecided.
    steps = torch.where(((here + above) / 2 - size).abs() <= near, up, 0.0)
    steps = torch.maximum(steps, torch.where(((here + below) / 2 - size).abs() <= near, down, 0.0))
    return torch.where(scale.isfinite(), steps * scale, 0.0)


def select_routes(pool: Pool, rows: Tensor | None) -> Tensor:
    """`rows` checked, or the positions of all routes."""
    if rows is None:
        return torch.arange(pool.num_routes)
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows: got {describe(rows)}, expected int64 [n], positions in pool order")
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < pool.num_routes):
        raise ValueError(
            f"rows: got {int(rows.min())} to {int(rows.max())}, expected positions 0 to {pool.num_routes - 1}"
        )
    return rows


def dequantize_rows(q: Tensor, sf: Tensor, rows: Tensor) -> Tensor:
    """float64 of the chosen rows of an e4m3 matrix (taken as bytes: torch need not know how to index e4m3)."""
    return dequantize_activations(q.view(torch.uint8)[rows].view(q.dtype), sf[rows])


def _dequantize_interleaved(weight: Tensor, sf: Tensor) -> Tensor:
    """float64 [2I, H] of one expert, rows interleaved as they are, each with the scale of its natural row."""
    num_rows, hidden = weight.shape
    natural_row = interleaved_to_natural(num_rows // 2).to(weight.device)
    scale_of_row = sf.to(torch.float64)[natural_row // SCALE_BLOCK]  # [2I, H/128]
    values = weight.to(torch.float64).reshape(num_rows, hidden // SCALE_BLOCK, SCALE_BLOCK)
    return values.mul_(scale_of_row.unsqueeze(-1)).reshape(num_rows, hidden)
