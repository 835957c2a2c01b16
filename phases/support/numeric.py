"""Launches a workload up to a phase's stage and compares every view that the phase lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from megamoe import DebugWindow, Stage
from megamoe.config import ACCUM_DEBUG_EDGE, MegaMoEConfig
from megamoe.reference import BOUNDS, Measure, Pool, Squares, as_bits, squares
from phases.support.checks import CaseChecks
from phases.support.inputs import Workload, kinds_of, make_tokens
from phases.support.launches import Launch, Options
from phases.support.oracle import UNQUANTISED, Expected, RankOracle, RankReference, layer_answers
from phases.support.places import places
from phases.support.runner import Phase, Variant
from phases.support.view_specs import ORACLE, ViewSpec
from phases.support.workloads import TILES, make_config, numeric_cases, tile_name, tokens_of

CLAMP = 0.5
"""Well inside the range of gate and up here, so that both ends of the clamp are used."""

_EMPTY_WITH = {"all": "", "tokens": "tokens", "routes": "routes", "window": "routes", "slots": "routes"}


def numeric_variants(phase: Phase) -> dict[str, list[Variant]]:
    """The cases that all phases from 2 on share."""
    variants = {
        case: [Variant(work.name, partial(run_workload, work=work)) for work in works]
        for case, works in numeric_cases(phase.ranks, phase.stage).items()
    }
    target = phase.ranks.target
    variants["tiles"] += [
        Variant(tile_name(tiles, 128), None, f"target {target} has tiles {TILES[target][0]}; target host runs it")
        for tiles in TILES["host"]
        if target != "host"
    ]
    return variants


def activation_clamp_variants(phase: Phase) -> list[Variant]:
    """SwiGLU with a clamp, for both granularities."""
    ranks = phase.ranks
    works = [
        Workload(
            f"activation_clamp[l2_sf_granularity={granularity}]",
            make_config(ranks, tiles=1, granularity=granularity),
            tokens_of(ranks),
            activation_clamp=CLAMP,
        )
        for granularity in (64, 128)
    ]
    return [Variant(work.name, partial(run_workload, work=work)) for work in works]


def run_workload(phase: Phase, checks: CaseChecks, *, work: Workload) -> None:
    """Launch a workload and compare; in the phase of the L1 accumulators once for the last and once for another window.
    The first one is a matter of the case ``windows``."""
    comparison = WorkloadComparison(phase, checks, work)
    for window in (1, 2) if phase.stage is Stage.L1_GEMM else (1,):
        comparison.launch_and_compare(window)


class WorkloadComparison:
    """A workload with its oracle on every rank here."""

    def __init__(self, phase: Phase, checks: CaseChecks, work: Workload) -> None:
        self.phase, self.checks, self.work = phase, checks, work
        self.tokens = make_tokens(work)
        self.inputs = [given.quantised() for given in self.tokens]
        self.references = {
            rank: RankReference(
                work.config,
                self.inputs,
                rank,
                phase.launcher.weights(work.config, rank, work.weights_kind),
                work.activation_clamp,
            )
            for rank in phase.ranks.local
        }

    def launch_and_compare(self, window: int = 0) -> Launch:
        """One launch and its views. ``window``: number of the window of L1 accumulators, see `all_windows`."""
        phase, work = self.phase, self.work
        windows = None
        if "l1_accum_debug" in phase.views:
            windows = {
                rank: choose_window(work.config, reference.pool, window) for rank, reference in self.references.items()
            }
        options = Options(phase.stage, windows, work.weights_kind, work.activation_clamp)
        launch = phase.launcher.launch(work.config, self.tokens, options)
        compare_views(phase, self.checks, launch, work, self.references)
        return launch


def all_windows(config: MegaMoEConfig, pool: Pool) -> list[DebugWindow]:
    """Every 128x128 window of the L1 product that holds a row in use: the first, the last, the middle one, the others.
    The first of an empty pool."""
    row_blocks = sorted(set((pool.rows // ACCUM_DEBUG_EDGE).tolist())) or [0]
    columns = range(config.l1_columns // ACCUM_DEBUG_EDGE)
    windows = [DebugWindow(row, column) for row in row_blocks for column in columns]
    first, last, middle = windows[0], windows[-1], windows[len(windows) // 2]
    return list(dict.fromkeys([first, last, middle, *windows]))


def choose_window(config: MegaMoEConfig, pool: Pool, number: int) -> DebugWindow:
    windows = all_windows(config, pool)
    return windows[number % len(windows)]


def compare_views(
    phase: Phase, checks: CaseChecks, launch: Launch, work: Workload, references: Mapping[int, RankReference]
) -> None:
    """Compare every view of the phase on every rank here. Collective where y is among them."""
    answers = _layer_answers(phase, launch, work)
    for reference in references.values():
        oracle = RankOracle(launch, reference)
        rank = oracle.rank
        phase.coverage.add(launch, oracle)
        if launch.windows:
            phase.coverage.add_window(launch, oracle)
        for spec in phase.views.values():
            _compare_view(checks, launch, work, oracle, spec, answers)
        if launch.stage >= Stage.L2_GEMM:
            unwritten = as_bits(oracle.unwritten_slots())
            checks.require(
                bool((unwritten == -1).all()), f"rank {rank}: combine was written in a slot that no route names"
            )
    save_views(phase, checks, launch, work)


def save_views(phase: Phase, checks: CaseChecks, launch: Launch, work: Workload) -> None:
    """Leave the views of every rank for `megamoe diff` when a comparison failed on any. Collective."""
    launcher = phase.launcher
    if not launcher.dumps.may_save:
        return
    failed = any(phase.ranks.gather(bool(checks.failures)))
    if not launcher.dumps.wants(failed):
        return
    bounds = {view: spec.bounds(work.kinds).get(ORACLE, "") for view, spec in phase.views.items()}
    facts = launch.facts(checks.name, phase.ranks.target, [given.num_tokens for given in launch.inputs], bounds)
    weights = {rank: launcher.weights(launch.config, rank, launch.options.weights_kind) for rank in launch.buffers}
    saved = launcher.dumps.save(facts, launch.buffers, launch.y, weights)
    if failed:
        checks.dumps += saved


@dataclass(frozen=True)
class _Answers:
    """y by the oracle of every rank here, and what a bound over all ranks needs to know of them."""

    of_rank: Mapping[int, Tensor]
    all_ranks: Squares | None


def _with_squares(phase: Phase, launch: Launch, of_rank: Mapping[int, Tensor], bound: str) -> _Answers:
    if not BOUNDS[bound].all_ranks:
        return _Answers(of_rank, None)
    nothing = Squares(0.0, 0.0)
    here = sum((squares(launch.answer(rank), answer) for rank, answer in of_rank.items()), nothing)
    return _Answers(of_rank, sum(phase.ranks.gather(here), nothing))


def _layer_answers(phase: Phase, launch: Launch, work: Workload) -> Mapping[str, _Answers]:
    """y by the oracle for what views.yaml compares it with."""
    if "y" not in phase.views:
        return {}
    bounds = phase.views["y"].bounds(work.kinds)
    answers = {}
    if ORACLE in bounds:
        answers[ORACLE] = _with_squares(phase, launch, layer_answers(launch, phase.launcher), bounds[ORACLE])
    enough = max((given.num_tokens for given in launch.inputs), default=0)
    if UNQUANTISED in bounds and enough >= BOUNDS[bounds[UNQUANTISED]].min_rows:
        unquantised = layer_answers(launch, phase.launcher, quantize_hidden=False)
        answers[UNQUANTISED] = _with_squares(phase, launch, unquantised, bounds[UNQUANTISED])
    return answers


def compare_answers(phase: Phase, checks: CaseChecks, launch: Launch) -> None:
    """y of every rank here with the oracle's alone, by the bound of views.yaml. Collective."""
    bound = phase.views["y"].bounds(kinds_of(launch.config))[ORACLE]
    answers = _with_squares(phase, launch, layer_answers(launch, phase.launcher), bound)
    for rank, answer in answers.of_rank.items():
        checks.compare("y", bound, launch.answer(rank).cpu(), answer, rank=rank, all_ranks=answers.all_ranks)


def _compare_view(
    checks: CaseChecks,
    launch: Launch,
    work: Workload,
    oracle: RankOracle,
    spec: ViewSpec,
    answers: Mapping[str, _Answers],
) -> None:
    rank, num_tokens = oracle.rank, oracle.own.num_tokens
    whole = launch.y[rank] if spec.name == "y" else launch.buffers[rank].view(spec.name)
    for error in spec.layout_errors(whole, launch.config, num_tokens):
        checks.require(False, f"rank {rank}: {error}")
    actual = oracle.select(spec.name, spec.rows)
    for against, bound in spec.bounds(work.kinds).items():
        if num_tokens < BOUNDS[bound].min_rows:
            continue  # a statement about averages
        whole_layer = answers.get(against)
        expected = Expected(whole_layer.of_rank[rank]) if whole_layer else oracle.expected(spec.name, against)
        checks.compare(
            spec.name,
            bound,
            actual,
            expected.values,
            magnitude=expected.magnitude if BOUNDS[bound].measure is Measure.OF_MAGNITUDE else None,
            all_ranks=whole_layer.all_ranks if whole_layer else None,
            rank=rank,
            against=against,
            expect_empty=_EMPTY_WITH[spec.rows] in work.empty,
            where=places(oracle, spec.name, spec.rows),
        )
