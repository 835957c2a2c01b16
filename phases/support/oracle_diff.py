"""Where a saved launch first differs from the oracle: `megamoe diff DUMP --oracle`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megamoe import DebugWindow, L1Weights, L2Weights, Stage, SymmBuffer
from megamoe.config import ACCUM_DEBUG_EDGE
from megamoe.inspect.diff import (
    VIEW_STAGES,
    ViewDifference,
    extent,
    gate_and_up_words,
    last_stage,
    number_words,
)
from megamoe.inspect.dump import Dump, LaunchFacts
from megamoe.inspect.image import NotSaved
from megamoe.inspect.tensors import extra_tensor, region_tensor, values_of
from megamoe.reference import BOUNDS, Measure, RankInputs, Squares, compare, moe_layer, squares
from phases.support.dumps import WEIGHTS, checksum
from phases.support.inputs import kinds_of, make_weights
from phases.support.launches import Launch, Options
from phases.support.oracle import Expected, RankOracle, RankReference
from phases.support.places import places
from phases.support.view_specs import ORACLE, load_views

ROWS: Mapping[str, str] = {
    **dict.fromkeys(("x", "x_sf", "topk_idx", "topk_weights", "y"), "tokens"),
    **dict.fromkeys(("expert_recv_count_sum", "l1_arrival_count", "l2_arrival_mask"), "all"),
    "l1_accum_debug": "window",
    "combine": "slots",
}
"""Valid rows as views.yaml has them; of the other views the routes."""


class DumpedBuffer:
    """What `RankOracle` asks of a buffer, from the dumps of a launch."""

    def __init__(self, dumps: Mapping[int, Dump], rank: int) -> None:
        self._dumps = dumps
        self.rank = rank
        image = dumps[rank].image
        self.epoch = image.word("epoch") + image.is_under_way

    def view(self, name: str, *, rank: int | None = None) -> Tensor:
        of_rank = self.rank if rank is None else rank
        if of_rank not in self._dumps:
            raise NotSaved(f"rank {of_rank} left no dump")
        return region_tensor(self._dumps[of_rank].image, name)


class SavedLaunch:
    """A launch as its dumps have it. Raises ValueError where they do not say enough for the oracle."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dumps
        self.config = next(iter(dumps.values())).image.config
        missing = [rank for rank in range(self.config.num_ranks) if rank not in dumps]
        if missing:
            raise ValueError(f"the oracle needs the inputs of every rank: no dump of rank {missing}")
        facts = [dump.facts for dump in dumps.values()]
        if facts[0] is None:
            raise ValueError(f"{dumps[0].path} does not say how many tokens the ranks had: nobody told the harness")
        self.facts: LaunchFacts = facts[0]
        self.windows = {
            rank: window for dump in dumps.values() if dump.facts for rank, window in dump.facts.windows.items()
        }

    @cached_property
    def bounds(self) -> Mapping[str, str]:
        """By view, those of its phase; of a launch that was read while it hung those of the usual case."""
        if self.facts.bounds:
            return self.facts.bounds
        activations = "all_positive" if self.facts.weights_kind == "positive" else "normal"
        kinds = kinds_of(self.config, self.facts.activation_clamp, activations)
        folders = [Path(__file__).resolve().parents[1] / f"phase{number}" for number in (5, 6)]
        views = {name: spec for folder in folders for name, spec in load_views(folder, self.facts.target).items()}
        return {name: spec.bounds(kinds)[ORACLE] for name, spec in views.items()}

    @cached_property
    def inputs(self) -> list[RankInputs]:
        return [self._inputs(rank, count) for rank, count in enumerate(self.facts.num_tokens)]

    def _inputs(self, rank: int, num_tokens: int) -> RankInputs:
        image = self.dumps[rank].image
        x, x_sf, ids, weights = (
            region_tensor(image, name)[:num_tokens] for name in ("x", "x_sf", "topk_idx", "topk_weights")
        )
        return RankInputs(x, x_sf.contiguous(), ids, weights)

    def weights(self, rank: int) -> tuple[L1Weights, L2Weights]:
        """Those that were saved, or the phases' own made again.

        Raises:
            ValueError: neither can be had.
        """
        dump = self.dumps[rank]
        if set(WEIGHTS) <= set(dump.extras):
            l1_weight, l1_sf, l2_weight, l2_sf = (extra_tensor(dump.extras[name]) for name in WEIGHTS)
            return L1Weights(l1_weight, l1_sf), L2Weights(l2_weight, l2_sf)
        if not self.facts.weights_kind:
            raise ValueError(f"{dump.path} holds no weights, and does not say how to make them")
        l1, l2 = make_weights(self.config, rank, self.facts.weights_kind)
        made = dict(zip(WEIGHTS, (*l1, *l2), strict=True))
        wrong = [
            name for name, tensor in made.items() if dump.checksums.get(name, checksum(tensor)) != checksum(tensor)
        ]
        if wrong:
            raise ValueError(f"{dump.path}: {', '.join(wrong)} were others than this checkout makes")
        return l1, l2

    def oracles(self) -> dict[int, RankOracle]:
        stage = Stage(self.facts.stage)
        windows = {rank: DebugWindow(*window) for rank, window in self.windows.items()}
        y = {
            rank: extra_tensor(dump.extras["y"])[: self.facts.num_tokens[rank]]
            for rank, dump in self.dumps.items()
            if "y" in dump.extras
        }
        buffers = {rank: cast("SymmBuffer", DumpedBuffer(self.dumps, rank)) for rank in self.dumps}
        options = Options(stage, windows, self.facts.weights_kind, self.facts.activation_clamp)
        launch = Launch(self.config, options, self.inputs, buffers, y, {})
        clamp = self.facts.activation_clamp
        return {
            rank: RankOracle(launch, RankReference(self.config, self.inputs, rank, self.weights(rank), clamp))
            for rank in self.dumps
        }

    def answers(self) -> dict[int, Tensor]:
        """y by the oracle, of every rank."""
        weights = [self.weights(rank) for rank in range(self.config.num_ranks)]
        found = moe_layer(self.config, self.inputs, weights, activation_clamp=self.facts.activation_clamp)
        return dict(enumerate(found))


def diff_with_oracle(dumps: Mapping[int, Dump]) -> list[ViewDifference]:
    """Every view that the launch wrote and its phase compares, in pipeline order, on every rank.

    Raises:
        ValueError: the dumps do not hold what the oracle needs.
    """
    try:
        saved = SavedLaunch(dumps)
        oracles = saved.oracles()
    except NotSaved as missing:
        raise ValueError(f"the oracle needs the inputs: {missing}") from missing
    stage = last_stage(*dumps.values())
    found = []
    for view, written_from in VIEW_STAGES.items():
        if written_from > stage:
            continue
        bound = saved.bounds.get(view, "exact" if written_from <= Stage.DISPATCH else "")
        if not bound or (view == "l1_accum_debug" and not saved.windows):
            found += [ViewDifference(view, rank, skipped="its phase does not compare it") for rank in oracles]
        elif view == "y":
            found += _diff_y(saved, oracles, bound)
        else:
            found += [_diff_view(oracle, view, bound) for oracle in oracles.values()]
    return found


def _diff_view(oracle: RankOracle, view: str, bound: str) -> ViewDifference:
    if view == "l1_accum_debug" and oracle.rank not in oracle.launch.windows:
        return ViewDifference(view, oracle.rank, skipped=f"rank {oracle.rank} did not say where its window is")
    try:
        actual, expected = oracle.select(view, ROWS.get(view, "routes")), oracle.expected(view)
    except NotSaved as missing:
        return ViewDifference(view, oracle.rank, skipped=str(missing))
    return _judge(oracle, view, bound, actual, expected, None)


def _diff_y(saved: SavedLaunch, oracles: Mapping[int, RankOracle], bound: str) -> list[ViewDifference]:
    """Against the oracle's layer. What combine made of partial results that are right themselves is exact."""
    missing = [rank for rank, oracle in oracles.items() if rank not in oracle.launch.y]
    if missing:
        return [ViewDifference("y", rank, skipped="the dumps do not hold it") for rank in oracles]
    answers = saved.answers()
    total = sum((squares(oracles[rank].launch.y[rank], answer) for rank, answer in answers.items()), Squares(0.0, 0.0))
    needed = total if BOUNDS[bound].all_ranks else None
    found = []
    for rank, oracle in oracles.items():
        actual = oracle.select("y", "tokens")
        item = _judge(oracle, "y", bound, actual, Expected(answers[rank]), needed)
        if not item.wrong:
            item = _judge(oracle, "y", "exact", actual, Expected(oracle.y_of_own_partials()), None)
        found.append(item)
    return found


def _judge(
    oracle: RankOracle, view: str, bound: str, actual: Tensor, expected: Expected, all_ranks: Squares | None
) -> ViewDifference:
    measure = BOUNDS[bound].measure
    magnitude = expected.magnitude if measure is Measure.OF_MAGNITUDE else None
    outcome = compare(bound, actual, expected.values, magnitude=magnitude, all_ranks=all_ranks)
    if outcome.ok:
        return ViewDifference(view, oracle.rank, outcome.num_elements)
    got, want = values_of(actual.contiguous()), values_of(expected.values.contiguous())
    wrong = _clearly_wrong(bound, actual, expected)
    where = places(oracle, view, ROWS.get(view, "routes"))
    lines = [f"rank {oracle.rank}: {outcome.message}"]
    spots: dict[str, Sequence[int]] = {}
    if bool(wrong.any()):
        spots["first"] = wrong.nonzero()[0].tolist()
    worst = outcome.worst
    if len(worst) == got.dim():
        spots["worst"] = worst
    elif worst:  # a norm names a row
        column = int((got[worst] - want[worst]).abs().nan_to_num(torch.inf).argmax())
        spots["worst"] = (*worst, column)
    for name, index in spots.items():
        at = tuple(int(i) for i in index)
        found, wanted = (number_words(view, side[at]) for side in (actual, expected.values))
        lines.append(f"{name} at {where(at)}: got {found}, expected {wanted}")
    if bool(wrong.any()):
        window = oracle.launch.windows[oracle.rank] if view == "l1_accum_debug" else None
        first_column = window.column_block * ACCUM_DEBUG_EDGE if window is not None else 0
        lines.append(f"beyond: {extent(wrong, first_column)}{_ratios(got, want, wrong)}")
        if window is not None:
            lines.append(gate_and_up_words(wrong, first_column))
    return ViewDifference(view, oracle.rank, outcome.num_elements, max(1, outcome.num_wrong), tuple(lines))


def _clearly_wrong(bound: str, actual: Tensor, expected: Expected) -> Tensor:
    """bool, same shape: the elements to blame. Of a norm, which blames none, those off by more than it as a whole."""
    got, want = values_of(actual.contiguous()), values_of(expected.values.contiguous())
    distance = (got - want).abs()
    limit = BOUNDS[bound].limit
    special = got.isnan() != want.isnan()
    match BOUNDS[bound].measure:
        case Measure.BITS:
            both_nan = got.isnan() & want.isnan()
            return (got != want) & ~both_nan
        case Measure.OF_MAGNITUDE:
            assert expected.magnitude is not None
            return (distance > limit * expected.magnitude) | special
        case Measure.RELATIVE:
            return (distance > limit * want.abs()) | special
        case Measure.E4M3_STEPS:
            return (distance > want.abs().clamp(min=2.0**-6) * 2.0**-3) | special  # more than a step
        case _:
            row = want.square().mean(dim=-1, keepdim=True).sqrt()
            return (distance > 4 * limit * row) | special


def _ratios(got: Tensor, want: Tensor, wrong: Tensor) -> str:
    """got/expected over wrong elements whose expected value is not tiny: a wrong scale shows as a constant."""
    enough = wrong & (want.abs() > want.abs().mean()) & got.isfinite()
    if not bool(enough.any()):
        return ""
    ratios = got[enough] / want[enough]
    return f"; got/expected from {ratios.min().item():.4g} to {ratios.max().item():.4g}"
