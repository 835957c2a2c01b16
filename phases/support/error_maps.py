"""Where the errors of a comparison lie: a coarse picture of rows and columns, and the worst elements in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megamoe.inspect.tensors import values_of
from megamoe.quant import E4M3
from megamoe.reference import BOUNDS, Bound, Measure, as_bits
from megamoe.reference.bounds import e4m3_ordinals

MAX_EDGE = 32
"""Cells of a map along each side, at most."""
MAX_WORST = 5
BEYOND_ALL = 1e6
"""Stands for everything larger, and for a NaN or inf that only one side has."""

_UNITS = {Measure.BITS: "differ", Measure.NORM: "norm"}

Where = Callable[[tuple[int, ...]], str]
"""The place of an element in words, from its index in what is compared."""


def index_words(index: tuple[int, ...]) -> str:
    """For a comparison that knows no more of its elements."""
    return f"element {list(index)}"


@dataclass
class WorstSeen:
    """How far off the worst comparison of each view has been so far, in a step and on this process.

    Only a comparison that is worse gets its map: thousands are alike.
    """

    _of_view: dict[str, tuple[bool, float]] = field(default_factory=dict)

    def is_worse(self, view: str, ok: bool, max_error: float, bound: float) -> bool:
        """Whether to look closer; notes it. Nothing is seen where every bit is right."""
        share = max_error / bound if bound else max_error
        badness = (not ok, BEYOND_ALL if share != share else share)
        if badness <= self._of_view.get(view, (False, 0.0)):
            return False
        self._of_view[view] = badness
        return True


def error_map(bound: str, actual: Tensor, expected: Tensor, magnitude: Tensor | None, where: Where) -> dict[str, Any]:
    """What a record's view line holds as ``map``.

    Args:
        bound: name of the comparison's bound.
        actual, expected: what was compared, same shape, one dimension or more; neither is empty.
        magnitude: for bounds that are relative to one.

    Returns:
        rows, columns: of what was compared; leading dimensions count as rows, one dimension as one column.
        unit: ``bound`` (1 is the bound of each element), ``norm`` (1 is what the norm of a row, or of the whole, allows
            on average) or ``differ`` (elements whose bits differ, for exact comparisons).
        cells: lists of at most 32 numbers, at most 32 of them: the largest error in a cell (``norm``: the root of the
            mean square in the cell; ``differ``: the number of elements that do).
        worst: at most 5 elements, the worst first: where, got, expected, error.
    """
    chosen = BOUNDS[bound]
    actual = actual.detach().to(expected.device)
    errors = _errors(chosen, actual, expected, magnitude)
    num_columns = errors.shape[-1] if errors.dim() > 1 else 1
    flat = errors.reshape(-1, num_columns)
    return {
        "rows": flat.shape[0],
        "columns": num_columns,
        "unit": _UNITS.get(chosen.measure, "bound"),
        "cells": _cells(chosen, flat),
        "worst": _worst(errors, actual, expected, where),
    }


def _errors(bound: Bound, actual: Tensor, expected: Tensor, magnitude: Tensor | None) -> Tensor:
    """float64, same shape: 1 is the bound; for exact comparisons 1 is a difference."""
    if bound.measure is Measure.BITS:
        both_nan = values_of(actual).isnan() & values_of(expected).isnan()
        return ((as_bits(actual) != as_bits(expected)) & ~both_nan).to(torch.float64)
    got, want = values_of(actual), values_of(expected)
    special = ~(got.isfinite() & want.isfinite())
    agree = (got.isnan() & want.isnan()) | (got == want)
    difference = (got - want).abs()
    match bound.measure:
        case Measure.OF_MAGNITUDE:
            assert magnitude is not None
            errors = difference / (bound.limit * magnitude.to(expected.device))
        case Measure.RELATIVE:
            errors = difference / (bound.limit * want.abs())
        case Measure.E4M3_STEPS:
            assert actual.dtype == expected.dtype == E4M3
            steps = (e4m3_ordinals(actual) - e4m3_ordinals(expected)).abs().to(torch.float64) / bound.limit
            errors = torch.where(difference <= bound.near, steps.clamp(max=1.0), steps)
        case Measure.NORM:
            squares = want.masked_fill(special, 0.0).square()
            if bound.row_limit is None:
                errors = difference / (bound.limit * squares.mean().sqrt())
            else:
                errors = difference / (bound.row_limit * squares.mean(dim=-1, keepdim=True).sqrt())
    errors = errors.masked_fill(difference == 0, 0.0).masked_fill(special & agree, 0.0)
    return errors.masked_fill(special & ~agree, BEYOND_ALL).nan_to_num(BEYOND_ALL).clamp(max=BEYOND_ALL)


def _cells(bound: Bound, errors: Tensor) -> list[list[float]]:
    num_rows, num_columns = errors.shape
    height, width = min(MAX_EDGE, num_rows), min(MAX_EDGE, num_columns)
    row = torch.arange(num_rows, device=errors.device) * height // num_rows
    column = torch.arange(num_columns, device=errors.device) * width // num_columns
    cell = (row[:, None] * width + column[None, :]).reshape(-1)
    found = torch.zeros(height * width, dtype=torch.float64, device=errors.device)
    flat = errors.reshape(-1)
    match bound.measure:
        case Measure.BITS:
            found.scatter_add_(0, cell, flat)
        case Measure.NORM:
            found.scatter_reduce_(0, cell, flat.square(), "mean", include_self=False).sqrt_()
        case _:
            found.scatter_reduce_(0, cell, flat, "amax")
    return [[float(f"{value:.3g}") for value in line] for line in found.reshape(height, width).tolist()]


def _worst(errors: Tensor, actual: Tensor, expected: Tensor, where: Where) -> list[dict[str, Any]]:
    flat = errors.reshape(-1)
    num_worst = min(MAX_WORST, flat.numel())
    least = flat.topk(num_worst).values[-1]
    candidates = torch.cat([(flat > least).nonzero(), (flat == least).nonzero()[:num_worst]]).squeeze(1).sort().values
    order = candidates[flat[candidates].argsort(descending=True, stable=True)][:num_worst]  # of equals the first
    found = []
    for error, position in zip(flat[order].tolist(), order.tolist(), strict=True):
        if error == 0:
            break
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), errors.shape))
        got, want = (repr(values_of(side[index]).item()) for side in (actual, expected))
        found.append({"where": where(index), "got": got, "expected": want, "error": float(f"{error:.3g}")})
    return found
