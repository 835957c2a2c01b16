"""What the phase scripts share: expressions, views, inputs, coverage."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml

from megamoe import MegaMoEConfig, VirtualGroup
from megamoe.config import Stage, ceil_div
from megamoe.reference import BOUNDS, as_bits, moe_layer, squares, undecided_rounding
from phases.support.checks import CaseChecks, view_lines
from phases.support.coverage import Coverage
from phases.support.expressions import config_values, evaluate
from phases.support.inputs import (
    ACTIVATIONS,
    Workload,
    concatenate,
    make_tokens,
    make_weights,
    natural_weights,
    split,
)
from phases.support.ranks import Ranks, open_ranks
from phases.support.view_specs import load_views
from phases.support.workloads import TILE_HEIGHTS, numeric_cases

PHASES = Path(__file__).resolve().parent.parent / "phases"
CONFIG = MegaMoEConfig(2, 8, 3, 640, 384, 48, block_m=32)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("hidden", 640),
        ("round_up(hidden_scales, 4)", 8),
        ("ceil_div(num_l1_tiles, 64) * 2 - 1", 1),
        ("intermediate_hidden // l2_sf_granularity % 2", 1),
        ("min(num_topk, max(2, 1)) + 1", 3),
    ],
)
def test_expressions(expression: int | str, value: int) -> None:
    assert evaluate(expression, config_values(CONFIG)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "hidden.real",
        "(lambda: 1)()",
        "[1][0]",
        "nobody",
        "hidden ** 9",
        "min(num_topk, key=1)",
        "1.5",
        "True",
        "1 +",
        "'x'",
    ],
)
def test_nothing_but_arithmetic_is_evaluated(expression: str) -> None:
    with pytest.raises(ValueError, match=r"cannot evaluate|not an expression"):
        evaluate(expression, config_values(CONFIG))


def test_views_of_every_phase_fit_the_buffer_that_they_describe() -> None:
    from megamoe.layout import buffer_layout

    layout = buffer_layout(CONFIG)
    values = {**config_values(CONFIG), "num_tokens": 5}
    for number in range(1, 7):
        for target in ("host", "sm90"):
            for name, spec in load_views(PHASES / f"phase{number}", target).items():
                if name == "y":
                    continue
                region = layout[name]
                dropped = 1 if region.banked else 0
                assert [evaluate(size, values) for size in spec.shape] == list(region.shape[dropped:]), name
                assert [evaluate(stride, values) for stride in spec.strides] == list(region.strides[dropped:]), name


def test_bounds_of_targets() -> None:
    host, gpu = (load_views(PHASES / "phase3", target)["l1_accum_debug"] for target in ("host", "sm90"))
    for kinds, host_bound, gpu_bound in (
        ((), "l1_accum_host", "l1_accum"),
        (("zero_rows",), "l1_accum_host", "l1_accum"),
        (("all_positive",), "l1_accum_host_positive", "l1_accum_positive"),
        (("heavy_tailed",), "l1_accum_host", "l1_accum_cancelling"),
        (("fast", "heavy_tailed"), "l1_accum_fast", "l1_accum_fast"),
    ):
        assert host.bounds(kinds) == {"oracle": host_bound}
        assert gpu.bounds(kinds) == {"oracle": gpu_bound}
    expected = {
        "l2_acts": ("l2_acts", "l2_acts_tensor_core", "l2_acts_fast", "l2_acts_fast"),
        "l2_acts_sf": ("l2_acts_sf", "l2_acts_sf", "l2_acts_sf_fast", "l2_acts_sf_fast"),
        "combine": ("combine", "combine", "combine_fast", "combine_fast"),
        "y": ("y", "y_all_ranks", "y_fast", "y_fast_all_ranks"),
    }
    for name, bounds in expected.items():
        number = 6 if name == "y" else 5
        views = [load_views(PHASES / f"phase{number}", target)[name] for target in ("host", "sm90")]
        assert tuple(view.bounds(kinds)["oracle"] for kinds in ((), ("fast",)) for view in views) == bounds
    clamped = [load_views(PHASES / "phase4", target)["l2_acts"] for target in ("host", "sm90")]
    assert [view.bounds(("clamped", "normal"))["oracle"] for view in clamped] == ["l2_acts", "l2_acts_clamped"]
    y = load_views(PHASES / "phase6", "host")["y"]
    assert y.bounds() == {"oracle": "y", "own_partials": "exact", "unquantised": "y_unquantised"}
    assert y.bounds(("fast",)) == {"oracle": "y_fast", "own_partials": "exact", "unquantised": "y_unquantised_fast"}


def test_layout_errors_name_what_differs() -> None:
    spec = load_views(PHASES / "phase2", "host")["l1_acts_sf"]
    rows = CONFIG.num_pool_rows
    right = torch.zeros(5, rows).T
    assert spec.layout_errors(right, CONFIG, 0) == []
    assert "strides" in spec.layout_errors(right.contiguous(), CONFIG, 0)[0]
    assert "float64" in spec.layout_errors(right.double(), CONFIG, 0)[0]
    assert str(rows) in spec.layout_errors(right[1:], CONFIG, 0)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "f16"}, "dtype"),
        ({"rows": "some"}, "rows"),
        ({"compare": "nearly"}, "no bound"),
        ({"compare": {"sm90": "exact"}}, "no bound for target host"),
        ({"where": {"fast": "nearly"}}, "no bound"),
        ({"where": {"quick": "exact"}}, "where: expected some of fast, clamped, normal"),
        ({"strides": [1]}, "strides"),
        ({"other": 1}, "expected the fields"),
    ],
)
def test_bad_views_are_refused(change: dict[str, object], words: str, tmp_path: Path) -> None:
    entry = {"dtype": "f32", "shape": ["hidden", 1], "strides": [1, 1], "rows": "all", "compare": "exact", **change}
    (tmp_path / "views.yaml").write_text(yaml.safe_dump({"views": {"x": entry}}))
    with pytest.raises(ValueError, match=words):
        load_views(tmp_path, "host")


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str) -> None:
    tokens = make_tokens(Workload("a", CONFIG, (12, 7), activations=kind))
    again = make_tokens(Workload("a", CONFIG, (12, 7), activations=kind))
    assert [given.num_tokens for given in tokens] == [12, 7]
    x = concatenate(tokens).x.float()
    assert torch.equal(x, concatenate(again).x.float())
    sizes = x.abs().amax(dim=1)
    if kind == "all_positive":
        assert bool((x > 0).all())
    elif kind == "tiny_and_huge":
        assert bool((sizes[::2] < 1e-5).all())
        assert bool((sizes[1::2] > 1e4).all())
    elif kind == "zero_rows":
        assert (sizes == 0).tolist() == [row % 3 == 0 for row in range(19)]
    elif kind == "heavy_tailed":
        assert int((x.std(dim=0) > 15).sum()) in range(3, 6)


def test_routes() -> None:
    def ids(**options: object) -> torch.Tensor:
        return concatenate(make_tokens(Workload("r", CONFIG, (40, 30), **options))).topk_idx  # type: ignore[arg-type]

    assert all(len(set(row)) == 3 for row in ids().tolist())
    assert bool((ids(routing="one_expert") == 7).all())
    assert bool((ids(routing="duplicate")[:, 0] == ids(routing="duplicate")[:, 2]).all())
    assert bool((ids(masked=1.0) == -1).all())
    assert 0.2 < float((ids(masked=0.3) == -1).float().mean()) < 0.4
    counts = (0, 1, 31, 32, 33)
    counted = ids(routing="counts", counts=counts)
    assert torch.bincount(counted[counted >= 0], minlength=8).tolist() == [*counts, 0, 0, 0]


def test_splitting_keeps_the_tokens() -> None:
    whole = concatenate(make_tokens(Workload("s", CONFIG, (9, 4))))
    parts = split(whole, (5, 0, 8))
    assert [part.num_tokens for part in parts] == [5, 0, 8]
    assert torch.equal(concatenate(parts).topk_idx, whole.topk_idx)


def test_weights_belong_to_the_expert_and_not_to_the_rank() -> None:
    alone = MegaMoEConfig(1, 4, 1, 256, 128, 8)
    four = MegaMoEConfig(4, 4, 1, 256, 128, 8)
    whole = make_weights(alone, 0)
    for rank in range(4):
        for pair, of_rank in zip(whole, make_weights(four, rank), strict=True):
            for tensor, part in zip(pair, of_rank, strict=True):
                assert torch.equal(as_bits(tensor)[rank], as_bits(part)[0])
    assert not torch.equal(as_bits(whole[0].weight)[0], as_bits(whole[0].weight)[1])
    assert not torch.equal(whole[0].sf[0], whole[0].sf[1])
    assert bool((natural_weights(alone, 0, "positive")[0][0].float() >= 0).all())


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("stage", [Stage.DISPATCH, Stage.COMBINE])
def test_numeric_cases_hold_what_numerics_asks_for(num_ranks: int, stage: Stage) -> None:
    ranks = open_ranks("single" if num_ranks == 1 else "virtual", "host", num_ranks)
    cases = numeric_cases(ranks, stage)
    works = [work for group in cases.values() for work in group]
    assert len({work.name for work in works}) == len(works)
    assert {work.config.block_m for work in works} == {32, 64, 128}
    assert {work.activations for work in works} == set(ACTIVATIONS)
    fast = [work for work in works if work.config.accumulate == "fast"]
    fast_of_many = [work for work in cases["many_blocks"] if work.config.accumulate == "fast"]
    assert len(fast_of_many) == (stage is Stage.COMBINE)
    assert fast == fast_of_many + cases["accumulate_fast"] if stage is Stage.COMBINE else not fast
    for work in cases["many_blocks"]:
        held, block_m = work.config.experts_per_rank, work.config.block_m
        blocks = [
            sum(ceil_div(rows, block_m) for rows in work.counts[first : first + held])
            for first in range(0, len(work.counts), held)
        ]
        assert min(blocks) > 2 * held, "target sm90 takes them one by one"
    assert all(work.kinds == ("fast", "normal") for work in fast)
    assert {work.masked for work in cases["masked"]} == {0.0, 0.3, 1.0}
    assert {0, 1, 8, 48, 192} <= {tokens for work in cases["token_counts"] for tokens in work.tokens}
    for work in cases["edge_counts"]:
        edge = work.config.block_m
        assert work.counts == (0, 1, edge - 1, edge, edge + 1)
    if stage is Stage.COMBINE:
        heights = {(work.config.block_m, work.config.l2_sf_granularity) for work in cases["tiles"]}
        assert heights == {(m, g) for m in (32, 64, 128) for g in (64, 128)}


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_gpu_has_the_shapes_and_counts_that_were_asked_for(num_ranks: int) -> None:
    ranks = Ranks("virtual", "sm90", num_ranks, tuple(range(num_ranks)), VirtualGroup(num_ranks), 0)
    cases = numeric_cases(ranks, Stage.COMBINE)
    shapes = {
        name: {(work.config.hidden, work.config.intermediate_hidden) for work in cases[name]}
        for name in ("tiles", "accumulate_fast")
    }
    assert shapes == {"tiles": {(640, 384), (1024, 256), (7168, 2048)}, "accumulate_fast": {(7168, 2048), (640, 384)}}
    counts = [work.tokens for work in cases["token_counts"]]
    assert {0, 1, 8, 48, 192, 1000} <= {tokens for of_ranks in counts for tokens in of_ranks}
    edges = {192, *TILE_HEIGHTS["sm90"]}
    assert {work.counts for work in cases["edge_counts"]} == {(0, 1, edge - 1, edge, edge + 1) for edge in edges}
    assert num_ranks == 1 or any(1000 in of_ranks and len(set(of_ranks)) > 1 for of_ranks in counts)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_no_edge_case_of_a_gpu_hangs_on_one_rounding(num_ranks: int) -> None:
    """Their rows are few, and a kernel may round an element of h near the middle of two e4m3 values either way."""
    ranks = Ranks("virtual", "sm90", num_ranks, tuple(range(num_ranks)), VirtualGroup(num_ranks), 0)
    bound = BOUNDS["y_all_ranks"]
    assert bound.row_limit is not None
    for work in numeric_cases(ranks, Stage.COMBINE)["edge_counts"]:
        weights = [make_weights(work.config, rank) for rank in range(num_ranks)]
        inputs = [given.quantised() for given in make_tokens(work)]
        answers = moe_layer(work.config, inputs, weights)
        size = math.sqrt(sum(float(y.square().sum()) for y in answers))
        for y, rounding in zip(answers, undecided_rounding(work.config, inputs, weights), strict=True):
            assert bool((rounding <= 0.9 * bound.row_limit * y.norm(dim=1)).all()), work.name
            # Beside 4e-3 of all else; squares add.
            assert bool((rounding <= 0.75 * bound.limit * size).all()), work.name


# --- coverage and lines ----------------------------------------------------------------------------------------------


def test_an_empty_step_lacks_everything() -> None:
    assert len(Coverage().lacks(Stage.DISPATCH, "host")) >= 6
    assert len(Coverage().lacks(Stage.L2_GEMM, "host")) > len(Coverage().lacks(Stage.DISPATCH, "host"))


def test_a_step_has_to_compare_blocks_for_every_tile_height() -> None:
    for rows, wanting in [({3, 9, 17, 33, 100}, []), ({3, 8, 17, 33, 100}, ["sm90"]), ({3, 17}, ["host", "sm90"])]:
        heights = Coverage(block_rows=rows)
        lacks = {target: " ".join(heights.lacks(Stage.DISPATCH, target)) for target in ("host", "sm90")}
        assert [target for target, words in lacks.items() if "blocks for tiles of" in words] == wanting


def test_coverage_of_processes_is_put_together() -> None:
    merged = Coverage(experts={1}).merge([Coverage(experts={4}, tokens={8})])
    assert (merged.experts, merged.tokens) == ({1, 4}, {8})


def test_lines_of_a_view_add_up_over_ranks() -> None:
    checks = CaseChecks("case")
    for rank, value in enumerate((1.0, 1.0, 2.0)):
        checks.compare("x", "exact", torch.full((2,), value), torch.ones(2), rank=rank)
    (line,) = view_lines("case", [vars(check) for check in checks.views])
    assert (line["compared"], line["wrong"], line["max_error"], line["ok"]) == (6, 2, 1.0, False)
    assert len(checks.failures) == 1
    assert checks.failures[0].startswith("rank 2: x against oracle")
    assert "max_rank_error" not in line


def test_lines_of_a_norm_over_all_ranks_say_the_worst_of_one_rank_too() -> None:
    checks = CaseChecks("case")
    pairs = [(torch.full((n, 8), 1 + error), torch.ones(n, 8)) for n, error in ((1, 0.01), (99, 0.001))]
    everyone = squares(*pairs[0]) + squares(*pairs[1])
    for rank, pair in enumerate(pairs):
        checks.compare("y", "y_all_ranks", *pair, rank=rank, all_ranks=everyone)
    (line,) = view_lines("case", [vars(check) for check in checks.views])
    assert (line["ok"], line["bound"]) == (True, 8e-3)
    assert line["max_error"] == pytest.approx(1.41e-3, rel=1e-2)
    assert line["max_rank_error"] == pytest.approx(0.01, rel=1e-3)


def test_what_failed_is_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_RUN_DIR", str(tmp_path))
    checks = CaseChecks("case[a=1]")
    checks.compare("x", "exact", torch.zeros(2), torch.ones(2), rank=3)
    (path,) = checks.dumps
    dump = torch.load(path)
    assert dump["rank"] == 3
    assert torch.equal(dump["actual"], torch.zeros(2))
