"""Error maps: where they say the errors are, and elements in words."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.outcome import Outcome
from harness.plan import Step
from harness.record import judge, read_record
from harness.spec import load_spec
from megamoe import DebugWindow, MegaMoEConfig
from megamoe.quant import E4M3
from megamoe.reference import BOUNDS
from phases.support.checks import CaseChecks, view_lines
from phases.support.error_maps import BEYOND_ALL, WorstSeen, error_map, index_words
from phases.support.inputs import Workload, make_tokens, make_weights
from phases.support.launches import Launch, Options
from phases.support.oracle import RankOracle, RankReference
from phases.support.places import places
from tests.harness_project import PASSING, Project

CONFIG = MegaMoEConfig(2, 8, 3, 640, 384, 48, block_m=32)


def _map(bound: str, actual: Tensor, expected: Tensor, magnitude: Tensor | None = None) -> dict[str, object]:
    return error_map(bound, actual, expected, magnitude, index_words)


def _hot_cells(found: dict[str, object], above: float = 0.0) -> list[tuple[int, int]]:
    cells = found["cells"]
    assert isinstance(cells, list)
    return [(i, j) for i, row in enumerate(cells) for j, value in enumerate(row) if value > above]


def test_exact_maps_count_what_differs() -> None:
    expected = torch.zeros(100, 70, dtype=torch.int64)
    actual = expected.clone()
    actual[50, 69] = 1
    actual[51, 69] = actual[99, 0] = -1
    found = _map("exact", actual, expected)
    assert (found["rows"], found["columns"], found["unit"]) == (100, 70, "differ")
    assert _hot_cells(found) == [(16, 31), (31, 0)]
    cells = found["cells"]
    assert isinstance(cells, list)
    assert (len(cells), len(cells[0]), cells[16][31]) == (32, 32, 2.0)
    worst = found["worst"]
    assert isinstance(worst, list)
    assert len(worst) == 3
    assert {"where": "element [99, 0]", "got": "-1.0", "expected": "0.0", "error": 1.0} in worst


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64, torch.bfloat16, E4M3])
def test_exact_maps_of_every_dtype(dtype: torch.dtype) -> None:
    """One dimension is one column; a NaN is any NaN."""
    expected = torch.tensor([0, 1, 2]).to(dtype)
    found = _map("exact", torch.tensor([0, 1, 3]).to(dtype), expected)
    assert (found["rows"], found["columns"], found["cells"]) == (3, 1, [[0.0], [0.0], [1.0]])
    if dtype is torch.bfloat16:
        nan = torch.tensor([float("nan")], dtype=dtype)
        assert _hot_cells(_map("exact", -nan, nan)) == []


def test_maps_of_elements_are_in_bounds() -> None:
    expected = torch.ones(10, 640, dtype=torch.float64)
    magnitude = 4 * expected
    actual = expected.clone()
    actual[3, 20] += 2 * BOUNDS["l1_accum"].limit * 4
    found = _map("l1_accum", actual, expected, magnitude)
    assert found["cells"][3][1] == pytest.approx(2.0)  # type: ignore[index]
    assert _hot_cells(found, above=1e-9) == [(3, 1)]
    found = _map("l2_acts_sf", 1.003 * expected, expected)
    assert found["cells"][9][31] == pytest.approx(1.0)  # type: ignore[index]


def test_maps_of_norms_are_root_mean_squares() -> None:
    bound = BOUNDS["combine"]
    limit = bound.row_limit or bound.limit
    expected = torch.randn(64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scale = expected.square().mean(dim=-1, keepdim=True).sqrt()
    found = _map("combine", expected + limit * scale, expected)
    assert all(value == pytest.approx(1.0, rel=1e-2) for row in found["cells"] for value in row)  # type: ignore[attr-defined]


def test_steps_of_e4m3() -> None:
    expected = torch.tensor([[1.0, 256.0]]).to(E4M3)
    found = _map("l2_acts", torch.tensor([[1.125, 320.0]]).to(E4M3), expected)
    assert found["cells"] == [[1.0, 2.0]]


def test_nan_and_inf() -> None:
    """On both sides they agree, on one they are beyond all."""
    expected = torch.tensor([[math.nan, math.inf, 1.0, 1.0, 0.0]], dtype=torch.float64)
    actual = torch.tensor([[math.nan, math.inf, math.nan, 1.0, 1e-30]], dtype=torch.float64)
    for bound in ("l2_acts_sf", "combine"):
        found = _map(bound, actual, expected)
        assert _hot_cells(found, above=10) == ([(0, 2), (0, 4)] if bound == "l2_acts_sf" else [(0, 2)])
        assert found["cells"][0][2] == BEYOND_ALL  # type: ignore[index]
        json.dumps(found, allow_nan=False)


def test_only_a_worse_comparison_gets_a_map() -> None:
    seen = WorstSeen()
    assert not seen.is_worse("x", True, 0.0, 0.0)
    assert seen.is_worse("y", True, 0.5, 1.0)
    assert not seen.is_worse("y", True, 0.5, 1.0)
    assert seen.is_worse("y", False, 0.4, 1.0)  # a failure, whatever its figure
    assert not seen.is_worse("y", True, 0.9, 1.0)
    assert seen.is_worse("y", False, math.nan, 1.0)
    assert not seen.is_worse("y", False, 7.0, 1.0)


def _oracle() -> RankOracle:
    work = Workload("normal", CONFIG, (40, 33))
    inputs = [given.quantised() for given in make_tokens(work)]
    reference = RankReference(CONFIG, inputs, 1, make_weights(CONFIG, 1, "normal", torch.device("cpu")))
    launch = Launch(CONFIG, Options(windows={1: DebugWindow(0, 2)}), inputs, {}, {}, {})
    return RankOracle(launch, reference)


def test_places_in_words() -> None:
    """An element's words lead back to the route that is there."""
    oracle = _oracle()
    pool = oracle.pool
    route = pool.num_routes - 1
    source, token, slot = int(pool.source[route]), int(pool.token[route]), int(pool.slot[route])
    expert = int(oracle.reference._inputs[source].topk_idx[token, slot])
    block, row = int(pool.rows[route]) // 32, int(pool.rows[route]) % 32
    words = f"rank 1, expert {expert}, pool block {block} row {row} = rank {source} token {token} slot {slot}"
    assert places(oracle, "l2_acts", "routes")((route, 130)) == f"{words}, column 130"
    assert places(oracle, "l1_topk_weights", "routes")((route,)) == words
    assert places(oracle, "combine", "slots")((route,)) == words  # a norm's worst is a row
    first = places(oracle, "l1_accum_debug", "window")((0, 5))
    assert first.startswith("rank 1, expert 4, pool block 0 row 0 = ")
    assert first.endswith(", column 261")
    assert places(oracle, "y", "tokens")((7, 3)) == "rank 1, token 7, column 3"
    assert places(oracle, "l1_arrival_count", "all")((block,)) == f"rank 1, expert {expert}, pool block {block}"
    beyond = places(oracle, "l2_arrival_mask", "all")((pool.num_blocks, 0))
    assert beyond == f"rank 1, pool block {pool.num_blocks}, which no expert uses, column 0"
    assert places(oracle, "expert_recv_count_sum", "all")((2,)) == "rank 1, expert 6"


def test_a_failure_says_where_and_its_map_comes_into_the_results(tmp_path: Path) -> None:
    """From the comparison over the record to the step's figures: the worst rank of the worst case."""
    seen = WorstSeen()
    lines = []
    for case, wrong in (("small[a]", 1), ("small[b]", 3)):
        checks = CaseChecks(case, seen)
        for rank in (0, 1):
            expected = torch.zeros(8, 4, dtype=torch.int64)
            actual = expected.clone()
            actual[: wrong * (rank + 1), 3] = 9 * (rank + 1)
            checks.compare("x", "exact", actual, expected, rank=rank, where=lambda index: f"token {index[0]}")
        assert checks.failures[1].startswith("rank 1: x against oracle, worst at token 0: exact: ")
        lines += [{"kind": "case", "case": case, "ok": False, "message": checks.failures[0]}]
        lines += view_lines(case, map(dataclasses.asdict, checks.views))
    lines += [{"kind": "end", "ok": False}]
    record = tmp_path / "record.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = load_spec(Project(tmp_path).phase(1, PASSING))
    step = Step(spec, "host", 1, "single", None, 60.0, 1, is_gate=False)
    total = judge(step, Outcome("exited", exit_code=1), read_record(record)).views["x"]
    assert total.wrong == 12
    assert total.map is not None
    assert (total.map["case"], total.map["rank"], total.map["against"]) == ("small[a]", 1, "oracle")
    assert total.map["worst"][0] == {"where": "token 0", "got": "18.0", "expected": "0.0", "error": 1.0}


@pytest.mark.parametrize(
    "damage",
    [
        {"cells": []},
        {"cells": [[1.0], [1.0, 2.0]]},
        {"cells": [[math.nan]]},
        {"cells": [["<b>"]]},
        {"cells": [[0.0]] * 65},
        {"worst": [{"got": 1}]},
        {"rows": "many"},
    ],
)
def test_a_map_that_no_report_can_draw_is_a_strange_record(tmp_path: Path, damage: dict[str, object]) -> None:
    found = _map("exact", torch.ones(2, 2), torch.zeros(2, 2))
    line = {"kind": "view", "case": "a", "view": "x", "compared": 4, "wrong": 4, "ok": False, "map": found}
    path = tmp_path / "record.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert read_record(path).problem == ""
    path.write_text(json.dumps(line | {"map": found | damage}) + "\n")
    assert "kind view with a strange map" in read_record(path).problem
