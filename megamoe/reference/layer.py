"""The whole layer, with no more than one expert's weights and rows in float64 at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config import MegaMoEConfig
from megamoe.quant import dequantize_weights
from megamoe.reference.bounds import BOUNDS
from megamoe.reference.combine import invalid_tokens
from megamoe.reference.dispatch import Pool, RankInputs, check_inputs, dispatch
from megamoe.reference.l1 import l1_epilogue, l1_gemm, quantize_h, undecided_steps
from megamoe.reference.l2 import l2_gemm, l2_gemm_unquantised
from megamoe.weights import L1Weights, L2Weights, check_transformed_weights


def moe_layer(
    config: MegaMoEConfig,
    inputs: Sequence[RankInputs],
    weights: Sequence[tuple[L1Weights, L2Weights]],
    *,
    activation_clamp: float | None = None,
    quantize_hidden: bool = True,
) -> list[Tensor]:
    """y of every rank, exact in float64 but for the quantisation of h.

    Experts that no route names are never converted. Partial results are added to y as they come (in float64 the order
    does not matter); everything else is `combine`.

    Args:
        config: the layer.
        inputs: those of every source rank.
        weights: transformed weights of every rank's experts.
        activation_clamp: as in `l1_epilogue`.
        quantize_hidden: False leaves h unquantised, for the bound `y_unquantised`.

    Returns:
        float64 [n, H] for each rank. A token's row is NaN where one of its experts is E or more, or where it has
        a valid route and NaN or inf in x or in that route's weight; +0 where all slots are masked.

    Raises:
        ValueError: an argument does not fit.
    """
    _check(config, inputs, weights)
    results = [
        torch.zeros((given.num_tokens, config.hidden), dtype=torch.float64, device=given.x.device) for given in inputs
    ]
    for part in _parts(config, inputs, weights, activation_clamp):
        if quantize_hidden:
            partial = l2_gemm(config, part.pool, *quantize_h(config, part.h), part.l2, part.rows)
        else:
            partial = l2_gemm_unquantised(config, part.pool, part.h, part.l2, part.rows)
        for y, tokens, here in part.by_source(results):
            y.index_add_(0, tokens, partial[here].to(y.device))
    for given, y in zip(inputs, results, strict=True):
        y[invalid_tokens(config, given.topk_idx)] = torch.nan
    return results


def undecided_rounding(
    config: MegaMoEConfig,
    inputs: Sequence[RankInputs],
    weights: Sequence[tuple[L1Weights, L2Weights]],
    *,
    activation_clamp: float | None = None,
) -> list[Tensor]:
    """By how much one rounding of h that may go either way changes each row of y at most.

    `moe_layer` takes one side where a target may rightly take the other: h is rounded to one of 8 values per power of
    two, and the target's h / scale differs from the exact one by what its sums lose (`near` of the bound of l2_acts for
    its kind of sums). The step of the largest elements is 1/14 of the largest, and where one of them is much of h, that
    is more than all other errors of the row together, and may be more than a row's limit.

    Returns:
        float64 [n] for each rank: the largest, over a row's elements of h that are that near to the middle between two
        e4m3 values, of ||the element's column of the L2 weight|| times the step between them. For `compare`.

    Raises:
        ValueError: an argument does not fit.
    """
    _check(config, inputs, weights)
    kind = "fast" if config.accumulate == "fast" else "tensor_core" if activation_clamp is None else "clamped"
    near = BOUNDS[f"l2_acts_{kind}"].near
    results = [torch.zeros(given.num_tokens, dtype=torch.float64, device=given.x.device) for given in inputs]
    for part in _parts(config, inputs, weights, activation_clamp):
        w2 = dequantize_weights(part.l2.weight[part.expert], part.l2.sf[part.expert])
        columns = torch.linalg.vector_norm(w2, dim=0)
        largest = (undecided_steps(config, part.h, near) * columns).amax(dim=1)
        for result, tokens, here in part.by_source(results):
            result.scatter_reduce_(0, tokens, largest[here].to(result.device), "amax")
    return results


@dataclass(frozen=True)
class _Part:
    """What one expert that a route names has to do: `rows` of its rank's pool, and their h."""

    pool: Pool
    expert: int
    rows: Tensor
    h: Tensor
    l2: L2Weights

    def by_source(self, results: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each source rank its result, the tokens there that have rows here, and which rows those are."""
        for source, result in enumerate(results):
            here = self.pool.source[self.rows] == source
            yield result, self.pool.token[self.rows[here]].to(result.device), here


def _check(config: MegaMoEConfig, inputs: Sequence[RankInputs], weights: Sequence[tuple[L1Weights, L2Weights]]) -> None:
    check_inputs(config, inputs)
    if len(weights) != config.num_ranks:
        raise ValueError(f"weights: got those of {len(weights)} ranks, expected {config.num_ranks}")


def _parts(
    config: MegaMoEConfig,
    inputs: Sequence[RankInputs],
    weights: Sequence[tuple[L1Weights, L2Weights]],
    activation_clamp: float | None,
) -> Iterator[_Part]:
    """Those of every rank, worked out one after the other."""
    for rank, (l1, l2) in enumerate(weights):
        check_transformed_weights(config, l1, l2)
        pool = dispatch(config, inputs, rank)
        for expert in sorted(set(pool.expert.tolist())):
            rows = (pool.expert == expert).nonzero().squeeze(1)
            acc, _ = l1_gemm(config, pool, l1, rows, magnitude=False)
            h = l1_epilogue(config, acc, pool.topk_weights[rows], activation_clamp=activation_clamp)
            yield _Part(pool, expert, rows, h, l2)
