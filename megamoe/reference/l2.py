"""L2: the down projection of every route, before it is rounded to bf16 and sent back."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.config import MegaMoEConfig
from megamoe.quant import E4M3, dequantize_weights, describe
from megamoe.reference.dispatch import Pool
from megamoe.reference.l1 import dequantize_rows, select_routes
from megamoe.weights import L2Weights


def l2_gemm(
    config: MegaMoEConfig, pool: Pool, h_q: Tensor, h_sf: Tensor, l2: L2Weights, rows: Tensor | None = None
) -> Tensor:
    """Down projection of quantised h; the oracle's own (`quantize_h`) or a target's (views l2_acts, l2_acts_sf).

    Args:
        config: the layer.
        pool: of the rank that owns the weights.
        h_q: e4m3 [n, I].
        h_sf: fp32 [n, I / l2_sf_granularity].
        l2: transformed weights of that rank's experts.
        rows: int64 [n], which route each row of `h_q` is, as positions in pool order; None: all of them.

    Returns:
        float64 [n, H], not rounded to bf16.

    Raises:
        ValueError: an argument does not fit.
    """
    num_rows = len(select_routes(pool, rows))
    for name, tensor, dtype, shape in (
        ("h_q", h_q, E4M3, (num_rows, config.intermediate_hidden)),
        ("h_sf", h_sf, torch.float32, (num_rows, config.intermediate_scales)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            expected = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            raise ValueError(f"{name}: got {describe(tensor)}, expected {expected}")
    return l2_gemm_unquantised(config, pool, dequantize_rows(h_q, h_sf, torch.arange(num_rows)), l2, rows)


def l2_gemm_unquantised(
    config: MegaMoEConfig, pool: Pool, h: Tensor, l2: L2Weights, rows: Tensor | None = None
) -> Tensor:
    """`l2_gemm` for h as numbers, float64 [n, I]; what the layer would give if h were not quantised.

    Raises:
        ValueError: an argument does not fit.
    """
    if not isinstance(l2, L2Weights):
        raise ValueError(
            f"l2: got {type(l2).__name__}, expected L2Weights as transform_weights_for_mega_moe returns them"
        )
    rows = select_routes(pool, rows)
    if h.dtype != torch.float64 or tuple(h.shape) != (len(rows), config.intermediate_hidden):
        raise ValueError(f"h: got {describe(h)}, expected float64 {[len(rows), config.intermediate_hidden]}")
    experts = pool.expert[rows]
    out = torch.empty((len(rows), config.hidden), dtype=torch.float64, device=h.device)
    for expert in sorted(set(experts.tolist())):
        here = (experts == expert).nonzero().squeeze(1)
        out[here] = h[here] @ dequantize_weights(l2.weight[expert], l2.sf[expert]).T
    return out
