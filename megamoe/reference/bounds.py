"""How far a target may be from the oracle, by name.

`compare(name, actual, expected)` says whether a view is within the bound of that name, and where it is worst.

NaN and inf are part of the answer for every bound: they must stand in the same elements (hence rows) of both sides, inf
with the same sign, and are then left out of the numbers. Which side of the oracle each bound wants as `expected`:

=========================  ==========================================================================================
exact                      the same dtype, the same bits (+0 is not -0; a NaN is any NaN): copies, counts, metadata,
                           bitwise comparisons of two runs, y against `combine` of the target's own bf16 partials
l1_accum*                  `l1_gemm`, float64, with its magnitude
l2_acts*                   `quantize_h(l1_epilogue(...))`, which follows the kernel's roundings of h
combine, combine_fast      `l2_gemm` of the target's *own* l2_acts and l2_acts_sf, float64, not rounded to bf16
y, y_fast, y_*all_ranks    `moe_layer`, float64 with h quantised, partials and y not rounded to bf16
y_unquantised*             `moe_layer(quantize_hidden=False)`, float64 throughout
=========================  ==========================================================================================

Names that say why a bound is looser than its neighbour: `_tensor_core` and `_cancelling`: a tensor core adds e4m3
products with few bits below the largest of them; `_all_ranks`: one rounding of h that goes the other way is much of a
rank with one token; `_fast`: sums made with ``accumulate="fast"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from megamoe.quant import E4M3, E4M3_NAN_BITS, describe

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the item sizes."""


class Measure(Enum):
    """What a bound limits."""

    BITS = "bits that differ"
    OF_MAGNITUDE = "|actual - expected| / magnitude, every element"
    RELATIVE = "|actual - expected| / |expected|, every element"
    E4M3_STEPS = "e4m3 steps apart, every element"
    NORM = "||actual - expected|| / ||expected||, whole tensor"


@dataclass(frozen=True)
class Bound:
    """One row of the table."""

    name: str
    measure: Measure
    limit: float
    row_limit: float | None = None
    """NORM: the same for each row (last dimension) with a non-zero reference; a row of zeros must be zeros."""
    unequal_share: float | None = None
    """E4M3_STEPS: share of the elements that may differ within the bound (one element always may)."""
    near: float = 0.0
    """E4M3_STEPS: elements no further apart than this are within the bound whatever their steps: they are quotients by
    a scale, of which the largest in a scale group is 448."""
    all_ranks: bool = False
    """NORM: over all ranks' rows of a launch together: `compare` wants their squares."""
    min_rows: int = 0
    """The bound is a statement about averages and holds from this many rows on."""


@dataclass(frozen=True)
class Comparison:
    """The outcome of one `compare`."""

    name: str
    num_elements: int
    """Compared. 0 is `ok`; whether nothing to compare is a failure is for the caller to say."""
    num_wrong: int
    """Elements beyond the bound; where only a norm over the whole tensor is, all of them."""
    max_error: float
    """In the measure of the bound, over finite elements; inf where the reference is 0 and the actual value is not."""
    bound: float
    ok: bool
    worst: tuple[int, ...]
    """Index of the element furthest off; for a norm, of the row (no last dimension); () if nothing compared."""
    message: str
    """One line for a log."""
    max_row_error: float | None = None
    row_bound: float | None = None
    """NORM: of the row `worst`, which is furthest from its own limit (one whose NaN or inf are wrong comes first), and
    that limit."""
    own_error: float | None = None
    """`all_ranks`: the norm over the elements at hand, for information."""


@dataclass(frozen=True)
class Squares:
    """Sums of squares, of a difference and of what was expected. Those of several ranks add up."""

    difference: float
    expected: float
    undecided_square: float = 0.0
    """Square of the largest of `undecided_rounding`. That of several ranks is the largest, too."""

    def __add__(self, other: Squares) -> Squares:
        return Squares(
            self.difference + other.difference,
            self.expected + other.expected,
            max(self.undecided_square, other.undecided_square),
        )

    @property
    def norm_error(self) -> float:
        """||actual - expected|| / ||expected||; 0/0 is 0, anything else over 0 is inf."""
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.expected) if self.expected else math.inf


L1_ACCUM_LIMIT = 3e-4
L1_ACCUM_POSITIVE_LIMIT = 1.5e-3
HOST_TIGHTER = 10
"""The host target meets accumulator bounds that are this many times tighter."""
FAST_LOOSER = 2
"""``accumulate="fast"``: y may be off by so many times more."""
LARGEST_E4M3 = 448.0
Y_LIMIT, Y_ROW_LIMIT, Y_UNQUANTISED_LIMIT = 8e-3, 3e-2, 2.6e-2


def _y_bounds(suffix: str, looser: int) -> list[Bound]:
    norm, row, unquantised = looser * Y_LIMIT, looser * Y_ROW_LIMIT, looser * Y_UNQUANTISED_LIMIT
    return [
        Bound(f"y{suffix}", Measure.NORM, norm, row_limit=row),
        Bound(f"y{suffix}_all_ranks", Measure.NORM, norm, row_limit=row, all_ranks=True),
        Bound(f"y_unquantised{suffix}", Measure.NORM, unquantised, min_rows=48),
    ]


BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        bound.name: bound
        for bound in (
            Bound("exact", Measure.BITS, 0.0),
            Bound("l1_accum", Measure.OF_MAGNITUDE, L1_ACCUM_LIMIT),
            Bound("l1_accum_positive", Measure.OF_MAGNITUDE, L1_ACCUM_POSITIVE_LIMIT),
            Bound("l1_accum_cancelling", Measure.OF_MAGNITUDE, L1_ACCUM_POSITIVE_LIMIT),
            Bound("l1_accum_host", Measure.OF_MAGNITUDE, L1_ACCUM_LIMIT / HOST_TIGHTER),
            Bound("l1_accum_host_positive", Measure.OF_MAGNITUDE, L1_ACCUM_POSITIVE_LIMIT / HOST_TIGHTER),
            Bound("l1_accum_fast", Measure.NORM, 5e-3),
            Bound("l2_acts_sf", Measure.RELATIVE, 3e-3),
            Bound("l2_acts_sf_fast", Measure.RELATIVE, 2e-2),
            Bound("l2_acts", Measure.E4M3_STEPS, 1.0, unequal_share=0.02),
            Bound("l2_acts_tensor_core", Measure.E4M3_STEPS, 1.0, unequal_share=0.02, near=1e-3 * LARGEST_E4M3),
            # A clamp cuts the largest of a group and leaves the errors of the sums what they were.
            Bound("l2_acts_clamped", Measure.E4M3_STEPS, 1.0, unequal_share=0.02, near=2e-3 * LARGEST_E4M3),
            Bound("l2_acts_fast", Measure.E4M3_STEPS, 1.0, unequal_share=0.12, near=1e-2 * LARGEST_E4M3),
            # The limit of rows is y's; the table has none, and a norm over all rows does not see the tiny ones.
            Bound("combine", Measure.NORM, 2.5e-3, row_limit=Y_ROW_LIMIT),
            Bound("combine_fast", Measure.NORM, 5e-3, row_limit=FAST_LOOSER * Y_ROW_LIMIT),
            *_y_bounds("", 1),
            *_y_bounds("_fast", FAST_LOOSER),
        )
    }
)


def compare(
    name: str,
    actual: Tensor,
    expected: Tensor,
    *,
    magnitude: Tensor | None = None,
    all_ranks: Squares | None = None,
    undecided: Tensor | None = None,
) -> Comparison:
    """Compares what a target gave with what the oracle gave.

    Args:
        name: of a bound in `BOUNDS`.
        actual: what the target gave, any strides; moved to the device of `expected`.
        expected: what the oracle gave; same shape. For `exact` the same dtype, for `l2_acts*` both e4m3.
        magnitude: float64, same shape, for the `l1_accum` bounds that are limits of single elements, and for no other.
        all_ranks: for a bound with ``all_ranks``, and for no other: the sum of every rank's `squares`.
        undecided: float64, one for each row, for a bound with a limit for rows: what `undecided_rounding` gives. A row
            may be off by that beside its limit: ||actual - expected||^2 <= (row_limit * ||expected||)^2 + undecided^2.
            (One column of the L2 weight lies nearly at a right angle to the sum of a row's other errors.) In the same
            way all rows together may be off by the largest of them beside their limit: with few rows one rounding is
            much of the norm. With `all_ranks` that is the largest of all ranks, `all_ranks.undecided_square`.

    Returns:
        The outcome; a difference is an outcome and raises nothing.

    Raises:
        ValueError: an unknown name, tensors that cannot be compared, or fewer rows than the bound is meant for.
    """
    if name not in BOUNDS:
        raise ValueError(f"name: got {name!r}, expected one of {', '.join(BOUNDS)}")
    bound = BOUNDS[name]
    _check_operands(bound, actual, expected, magnitude)
    if bound.all_ranks != (all_ranks is not None):
        wanted = "the squares of all ranks" if bound.all_ranks else "None"
        raise ValueError(f"all_ranks: got {all_ranks}, expected {wanted} for {bound.name}")
    if undecided is not None and (bound.row_limit is None or undecided.shape != expected.shape[:-1]):
        wanted = "None" if bound.row_limit is None else f"float64 {list(expected.shape[:-1])}"
        raise ValueError(f"undecided: got {describe(undecided)}, expected {wanted} for {bound.name}")
    if undecided is not None and not bool(undecided.isfinite().all()):
        raise ValueError(f"undecided: got {describe(undecided)} with NaN or inf, expected finite sizes")
    actual = actual.detach().to(expected.device)
    if actual.numel() == 0:
        return Comparison(
            name, 0, 0, 0.0, bound.limit, True, (), f"{name}: nothing to compare, shape {list(actual.shape)}"
        )
    match bound.measure:
        case Measure.BITS:
            return _compare_bits(bound, actual, expected)
        case Measure.OF_MAGNITUDE:
            assert magnitude is not None  # _check_operands saw to it
            return _compare_elements(bound, actual, expected, magnitude)
        case Measure.RELATIVE:
            return _compare_elements(bound, actual, expected, expected.to(torch.float64).abs())
        case Measure.E4M3_STEPS:
            return _compare_e4m3_steps(bound, actual, expected)
        case Measure.NORM:
            return _compare_norm(bound, actual, expected, all_ranks, undecided)


def norm_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| over all elements, float64; 0/0 is 0, anything else over 0 is inf."""
    return float(row_errors(actual.reshape(1, -1), expected.reshape(1, -1))[0])


def squares(actual: Tensor, expected: Tensor, undecided: Tensor | None = None) -> Squares:
    """Of one rank's elements, for a bound over all ranks. NaN and inf of either side are left out, as in `compare`;
    `undecided` as there."""
    got, want, _ = _without_specials(actual.detach().to(expected.device), expected)
    largest = 0.0 if undecided is None or undecided.numel() == 0 else float(undecided.max())
    return Squares(float((got - want).square().sum()), float(want.square().sum()), largest**2)


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """`norm_error` of every row (last dimension): float64, the shape without the last dimension."""
    expected = expected.to(torch.float64)
    difference = torch.linalg.vector_norm(actual.to(torch.float64) - expected, dim=-1)
    return _ratio(difference, torch.linalg.vector_norm(expected, dim=-1))


def as_bits(values: Tensor) -> Tensor:
    """The same memory, of any shape and dtype, as integers that torch can index, fill and compare."""
    return values.view(_RAW[values.element_size()])


def e4m3_ordinals(values: Tensor) -> Tensor:
    """int16, same shape: numbers e4m3 values so that neighbours differ by 1; -0 and +0 are both 0. NaN: +-127."""
    bits = values.view(torch.uint8).to(torch.int16)
    size = bits & 0x7F
    return torch.where(bits >= 0x80, -size, size)


def _check_operands(bound: Bound, actual: Tensor, expected: Tensor, magnitude: Tensor | None) -> None:
    if actual.shape != expected.shape:
        raise ValueError(f"actual: got {describe(actual)}, expected the shape of the oracle's {list(expected.shape)}")
    if bound.measure is Measure.BITS and actual.dtype != expected.dtype:
        raise ValueError(f"actual: got {describe(actual)}, expected the dtype of the other side, {expected.dtype}")
    if bound.measure is not Measure.BITS:
        wants = "e4m3" if bound.measure is Measure.E4M3_STEPS else "floating point"
        for side, tensor in (("actual", actual), ("expected", expected)):
            fits = tensor.dtype == E4M3 if bound.measure is Measure.E4M3_STEPS else tensor.dtype.is_floating_point
            if not fits:
                raise ValueError(f"{side}: got {describe(tensor)}, expected {wants} for the bound {bound.name}")
    if bound.measure is Measure.OF_MAGNITUDE and (magnitude is None or magnitude.shape != expected.shape):
        raise ValueError(
            f"magnitude: got {describe(magnitude)}, expected float64 {list(expected.shape)} for {bound.name}"
        )
    if bound.measure is not Measure.OF_MAGNITUDE and magnitude is not None:
        raise ValueError(
            f"magnitude: got {describe(magnitude)}, expected None for {bound.name}, which has no use for it"
        )
    num_rows = math.prod(expected.shape[:-1])
    if num_rows < bound.min_rows:
        raise ValueError(f"actual: got {num_rows} rows, expected at least {bound.min_rows} for {bound.name}")


def _compare_bits(bound: Bound, actual: Tensor, expected: Tensor) -> Comparison:
    wrong = as_bits(actual) != as_bits(expected)
    if actual.dtype.is_floating_point:
        wrong &= ~(_is_nan(actual) & _is_nan(expected))
    if not bool(wrong.any()):
        return _outcome(bound, wrong, 0.0, _first(torch.ones_like(wrong)), "all equal")
    # As bytes: torch can neither index nor subtract every dtype there is.
    got, want = as_bits(actual)[wrong].view(actual.dtype), as_bits(expected)[wrong].view(expected.dtype)
    difference = (got.to(torch.float64) - want.to(torch.float64)).abs()
    difference = difference[difference.isfinite()]
    largest = float(difference.max()) if len(difference) else 0.0
    worst = _first(wrong)
    detail = f"first at {worst}: got {_bits_and_value(got[:1])}, expected {_bits_and_value(want[:1])}"
    return _outcome(bound, wrong, largest, worst, detail)


def _compare_elements(bound: Bound, actual: Tensor, expected: Tensor, scale: Tensor) -> Comparison:
    """|actual - expected| <= limit * scale, element by element."""
    got, want, special_wrong = _without_specials(actual, expected)
    difference = (got - want).abs_()
    scale = scale.to(device=want.device, dtype=torch.float64)
    # Not "difference > limit": a scale that is NaN beside finite values must count as wrong.
    settled = difference == 0
    wrong = special_wrong | ~(settled | (difference <= bound.limit * scale))
    error = _ratio(difference, scale)
    worst = _first(special_wrong) if bool(special_wrong.any()) else _largest(error)
    largest = float(error.nan_to_num(nan=math.inf, posinf=math.inf).max())
    detail = (
        f"worst at {worst}: got {float(actual[worst])!r}, expected {float(expected[worst])!r}, "
        f"error {largest:.3g}, bound {bound.limit:.3g} ({bound.measure.value})"
    )
    return _outcome(bound, wrong, largest, worst, detail + _nan_report(actual, expected, special_wrong))


def _compare_e4m3_steps(bound: Bound, actual: Tensor, expected: Tensor) -> Comparison:
    nan_actual, nan_expected = _is_nan(actual), _is_nan(expected)
    special_wrong = nan_actual != nan_expected
    steps = (e4m3_ordinals(actual) - e4m3_ordinals(expected)).abs().masked_fill(nan_actual | nan_expected, 0)
    near = (actual.float() - expected.float()).abs() <= bound.near
    num_near = int((near & (steps > bound.limit)).sum())
    steps = torch.where(near, steps.clamp(max=1), steps)
    unequal = steps == 1
    num_unequal = int(unequal.sum())
    assert bound.unequal_share is not None
    allowed = max(1, math.floor(bound.unequal_share * actual.numel()))
    wrong = special_wrong | (steps > bound.limit)
    if num_unequal > allowed:
        wrong |= unequal
    worst = _first(special_wrong) if bool(special_wrong.any()) else _largest(steps)
    largest = int(steps.max())
    values = f"got {_bits_and_value(actual[worst])}, expected {_bits_and_value(expected[worst])}"
    within = f", {num_near} of them within {bound.near:.3g}" if bound.near else ""
    detail = f"{num_unequal} one step apart{within}, {allowed} may be; worst at {worst}: {largest} steps, {values}"
    return _outcome(bound, wrong, float(largest), worst, detail + _nan_report(actual, expected, special_wrong))


def _compare_norm(
    bound: Bound, actual: Tensor, expected: Tensor, all_ranks: Squares | None, undecided: Tensor | None
) -> Comparison:
    got, want, special_wrong = _without_specials(actual, expected)
    own_error = norm_error(got, want)
    error = own_error if all_ranks is None else all_ranks.norm_error
    errors_of_rows = row_errors(got, want)
    wrong = special_wrong.clone()
    limit = bound.limit
    if undecided is not None:
        together = squares(actual, expected, undecided) if all_ranks is None else all_ranks
        limit = (
            math.hypot(limit, math.sqrt(together.undecided_square / together.expected)) if together.expected else limit
        )
    if not error <= limit:
        wrong |= True
    limits = torch.full_like(errors_of_rows, math.inf if bound.row_limit is None else bound.row_limit)
    if undecided is not None:
        rounding = undecided.to(device=want.device, dtype=torch.float64)
        sizes = torch.linalg.vector_norm(want, dim=-1)
        limits = torch.hypot(limits, torch.where(sizes == 0, 0.0, rounding / sizes))  # a row of zeros must be zeros
    wrong |= ~(errors_of_rows <= limits).unsqueeze(-1)
    furthest = errors_of_rows if bound.row_limit is None else errors_of_rows / limits
    worst = _first(special_wrong.any(dim=-1)) if bool(special_wrong.any()) else _largest(furthest)
    worst_row = float(errors_of_rows[worst])
    row_bound = None if bound.row_limit is None else float(limits[worst])
    beside = "" if row_bound is None else f", bound {row_bound:.3g}"
    if undecided is not None:
        beside += f" (all rows {bound.limit:.3g}, a row {bound.row_limit:.3g}, and one rounding of h)"
    over = "" if all_ranks is None else f" over all ranks (here {own_error:.3g})"
    detail = f"norm-wise {error:.3g}{over}, bound {limit:.3g}; worst row {worst}: {worst_row:.3g}{beside}"
    detail += _nan_report(actual, expected, special_wrong)
    outcome = replace(_outcome(bound, wrong, error, worst, detail, worst_row), bound=limit, row_bound=row_bound)
    return outcome if all_ranks is None else replace(outcome, own_error=own_error)


def _outcome(
    bound: Bound, wrong: Tensor, error: float, worst: tuple[int, ...], detail: str, row_error: float | None = None
) -> Comparison:
    num_elements, num_wrong = wrong.numel(), int(wrong.sum())
    verdict = f"{num_elements} elements within" if num_wrong == 0 else f"{num_wrong} of {num_elements} elements beyond"
    return Comparison(
        name=bound.name,
        num_elements=num_elements,
        num_wrong=num_wrong,
        max_error=error,
        bound=bound.limit,
        ok=num_wrong == 0,
        worst=worst,
        message=f"{bound.name}: {verdict} the bound; {detail}",
        max_row_error=row_error,
        row_bound=bound.row_limit,
    )


def _without_specials(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float64 copies with NaN and inf of either side set to 0 in both, and where NaN and inf do not agree."""
    got, want = actual.to(torch.float64), expected.to(torch.float64)
    special = ~(got.isfinite() & want.isfinite())
    agree = (got.isnan() & want.isnan()) | (got == want)
    return got.masked_fill(special, 0.0), want.masked_fill(special, 0.0), special & ~agree


def _nan_report(actual: Tensor, expected: Tensor, special_wrong: Tensor) -> str:
    """Which rows (last dimension) hold NaN or inf that the other side does not have, or nothing."""
    if not bool(special_wrong.any()):
        return ""
    unexpected = special_wrong & ~_is_finite(actual)
    missing = special_wrong & ~_is_finite(expected)
    parts = []
    for what, where in (("unexpected", unexpected), ("missing or different", missing)):
        rows = where if where.dim() == 0 else where.any(dim=-1)
        if bool(rows.any()):
            parts.append(f"{what} NaN or inf in {int(rows.sum())} rows, first {_first(rows)}")
    return "; " + ", ".join(parts)


def _is_nan(values: Tensor) -> Tensor:
    return (values.view(torch.uint8) & 0x7F) == E4M3_NAN_BITS if values.dtype == E4M3 else values.isnan()


def _is_finite(values: Tensor) -> Tensor:
    return ~_is_nan(values) if values.dtype == E4M3 else values.isfinite()


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator with 0 / 0 = 0."""
    return torch.where(numerator == 0, 0.0, numerator / denominator)


def _first(mask: Tensor) -> tuple[int, ...]:
    """Index of the first true element."""
    return _largest(mask.to(torch.uint8))


def _largest(values: Tensor) -> tuple[int, ...]:
    """Index of the first largest element; NaN counts as the largest."""
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))


def _bits_and_value(element: Tensor) -> str:
    bits = int(as_bits(element).item()) & ((1 << (8 * element.element_size())) - 1)
    if not element.dtype.is_floating_point:
        return str(int(element.item()))
    return f"{float(element.item())!r} ({bits:#0{2 + 2 * element.element_size()}x})"
