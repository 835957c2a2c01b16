"""The benchmark without a GPU: routes, floors, plans, rows, and a whole run whose clock is made up."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench import moe
from bench.__main__ import main
from bench.floors import Load, Machine, floor, measure_load
from bench.fused import FusedContender
from bench.report import HEADER, compact_table, format_row, write_json
from bench.routes import ROUTINGS, draw_route_weights, draw_routes
from bench.shapes import SHAPES
from bench.timing import MIN_REPETITIONS, Contender, Timing, plan_repetitions, summarize
from megamoe import MegaMoEFault
from tests.bench_worlds import SMALL, HostWorld


def test_shapes_are_those_of_the_models() -> None:
    widths = {name: (shape.hidden, shape.intermediate, shape.topk) for name, shape in SHAPES.items()}
    assert widths == {
        "deepseek-v3": (7168, 2048, 8),
        "v4-flash": (4096, 2048, 6),
        "v4-pro": (7168, 3072, 6),
        "qwen3-235b": (4096, 1536, 8),
        "qwen3-30b": (2048, 768, 8),
    }


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_are_distinct_experts(routing: str) -> None:
    idx = draw_routes(routing, 300, 64, 8, 2, torch.Generator().manual_seed(1))
    assert idx.shape == (300, 8)
    assert idx.dtype == torch.int64
    assert int(idx.min()) >= 0
    assert int(idx.max()) < 64
    assert all(len(set(row)) == 8 for row in idx.tolist())
    counts = torch.bincount(idx.flatten(), minlength=64)
    if routing == "balanced":
        assert int(counts.max()) < 70  # 37.5 expected
    if routing == "zipf":
        assert int(counts.max()) > 150
    if routing == "hot":
        assert int(counts.max()) == 300
    if routing == "idle":
        assert int(counts[32:].sum()) == 0


def test_routes_follow_the_seed() -> None:
    def draw(seed: int) -> torch.Tensor:
        return draw_routes("balanced", 20, 64, 8, 2, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_routes_that_cannot_be_drawn() -> None:
    generator = torch.Generator()
    with pytest.raises(ValueError, match="expected one of"):
        draw_routes("uniform", 1, 8, 2, 1, generator)
    with pytest.raises(ValueError, match="needs two ranks"):
        draw_routes("idle", 1, 8, 2, 1, generator)
    with pytest.raises(ValueError, match="top-5 of 4"):
        draw_routes("idle", 1, 8, 5, 2, generator)


def test_route_weights_sum_to_one() -> None:
    weights = draw_route_weights(50, 8, torch.Generator().manual_seed(1))
    assert float((weights.sum(dim=1) - 1).abs().max()) < 1e-6
    assert float(weights.min()) > 0


def test_load_counts_the_busiest_gpu() -> None:
    # experts 0, 1 on rank 0; 2, 3 on rank 1
    routes = [torch.tensor([[0, 2], [0, 3]]), torch.tensor([[2, 3], [2, -1]])]
    load = measure_load(SMALL, routes, 2, [0, 1])
    assert load.routes == 5
    assert load.weight_bytes == 2 * SMALL.expert_bytes
    # rank 0 sends two rows away and gets their two bf16 results back; rank 1 sends none
    assert load.link_bytes == SMALL.hidden * 2 * 2
    together = measure_load(SMALL, routes, 2, [0, 0])
    assert together == Load(7, 3 * SMALL.expert_bytes, 0)


def test_the_largest_floor_binds() -> None:
    shape = SHAPES["deepseek-v3"]
    decode = floor(Machine(), shape, Load(256, 32 * shape.expert_bytes, 1000))
    assert decode.binds == "weights"
    assert decode.us == pytest.approx(333, abs=1)  # machine.md
    prefill = floor(Machine(), shape, Load(65536, 32 * shape.expert_bytes, 1000))
    assert prefill.binds == "arithmetic"
    assert prefill.us == pytest.approx(6 * 65536 * 7168 * 2048 / 1174e6)
    assert floor(Machine(), shape, Load(1, 1, 365e3)).us == pytest.approx(1.0)
    assert floor(Machine(), shape, Load(1, 1, 365e3)).binds == "nvlink"


def test_repetitions_fit_the_time() -> None:
    for call_us in (60.0, 500.0, 7000.0):
        repetitions, calls = plan_repetitions(call_us, 10, 300, 0.4)
        assert repetitions >= MIN_REPETITIONS
        assert repetitions * (calls + 1) * call_us <= 0.45e6
    assert plan_repetitions(1e6, 10, 300, 0.4) == (MIN_REPETITIONS, 4)
    assert plan_repetitions(5.0, 1, 0, 10)[0] == 200


def test_summary_is_a_median() -> None:
    timing = summarize([5.0, 1.0, 3.0, 2.0, 100.0], 10, [20.0, 30.0, 40.0])
    assert (timing.us, timing.low_us, timing.high_us, timing.host_us) == (3.0, 1.0, 100.0, 30.0)


def test_variants() -> None:
    assert moe.parse_variants("") == (None,)
    assert moe.parse_variants("none;-DA=1 -DB=2") == ("", "-DA=1 -DB=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gpt"], "shape: got 'gpt'"),
        (["--tokens", "0"], "at least 1"),
        (["--routing", "even"], "routing"),
        (["--regime", "hot"], "regime"),
        (["--accumulate", "fp32,exact"], "accumulate: got 'exact', expected a list of fp32, fast"),
    ],
)
def test_bad_calls(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe.parse(arguments)


def test_command_line_without_a_gpu() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "bench", *words], capture_output=True, text=True)

    assert "python -m bench moe" in run().stdout
    assert run("other").returncode == 2
    assert "--regime" in run("moe", "--help").stdout
    if not torch.cuda.is_available():
        refused = run("moe")
        assert refused.returncode == 2
        assert "needs a GPU" in refused.stderr


class FakeTimer:
    """Runs what it should time, and makes the times up."""

    def __init__(self, world: HostWorld) -> None:
        self._timing = Timing(100.0, 90.0, 110.0, 7, 10, 25.0)

    def bursts(self, contenders: Sequence[Contender], num_sets: int, seconds: float) -> list[Timing]:
        for contender in contenders:
            contender.load(num_sets - 1)
            contender.call()
            contender.check()
        return [self._timing for _ in contenders]

    cold = bursts
    sustained = bursts


@pytest.fixture
def small_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> moe.Bench:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(moe, "Timer", FakeTimer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    words = "--shape small --tokens 1,5 --experts-per-rank 3 --routing balanced,idle --regime bursts,cold,sustained"
    options = moe.parse([*words.split(), "--sets", "2", "--out", str(tmp_path), "--beside", "", "--accumulate", "fp32"])
    return moe.Bench(options, HostWorld())


def test_a_run_on_the_host_target(small_bench: moe.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert small_bench.run() == 0
    rows = small_bench.rows
    assert len(rows) == 2 * 2 * 3
    assert {row.accumulate for row in rows} == {"fp32"}
    assert {row.combine for row in rows} == {"bf16"}
    assert rows[0].tflops == pytest.approx(1 * 2 * 6 * 256 * 128 / 100e-6 * 1e-12)
    written = json.loads((small_bench.options.out / "moe.json").read_text())
    assert len(written["rows"]) == len(rows)
    shown = capsys.readouterr().out
    assert HEADER in shown
    assert "small        idle     sustained     5 us:     100.0" in shown
    assert "A = megamoe fp32/bf16" in shown


def test_both_accumulations_in_turn_in_one_process(small_bench: moe.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert moe.parse([]).accumulations == ("fp32", "fast")
    small_bench.options = dataclasses.replace(small_bench.options, accumulations=("fp32", "fast"))
    assert small_bench.run() == 0
    assert [row.accumulate for row in small_bench.rows] == ["fp32", "fast"] * 12
    assert all(row.y_error == (None if row.accumulate == "fp32" else 0.0) for row in small_bench.rows)
    assert "B = megamoe fast/bf16" in capsys.readouterr().out


def test_a_fault_of_one_accumulation_leaves_the_rows_of_the_others(
    small_bench: moe.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_bench.options = dataclasses.replace(small_bench.options, accumulations=("fast", "fp32"))
    check = FusedContender.check

    def faulty(contender: FusedContender) -> None:
        check(contender)
        if contender.accumulate == "fast":
            raise MegaMoEFault("rank 0: a launch did not end")

    monkeypatch.setattr(FusedContender, "check", faulty)
    assert small_bench.run() == 1
    reasons = {row.accumulate: row.skipped for row in small_bench.rows}
    assert reasons == {"fast": "FAILED: MegaMoEFault: rank 0: a launch did not end", "fp32": None}
    assert len(small_bench.rows) == 24
    assert all(row.y_error is None for row in small_bench.rows)


def test_a_short_table_with_the_ratios_to_the_peer(
    small_bench: moe.Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_bench.run()
    capsys.readouterr()
    row = small_bench.rows[0]
    base = dataclasses.replace(row, shape="deepseek-v3", regime="sustained", tokens=8192, tflops=860.0)
    rows = [
        dataclasses.replace(base, us=950.0),
        dataclasses.replace(base, us=1060.0, tflops=899.0, accumulate="fast"),
        dataclasses.replace(base, us=1000.0, contender="deep_gemm 0.1.5", accumulate="own"),
        dataclasses.replace(base, us=430.0, tokens=128),
        dataclasses.replace(base, us=None, contender="deep_gemm 0.1.5", accumulate="own", tokens=128, skipped="broken"),
    ]
    write_json(tmp_path / "a.json", Machine(), {}, rows)
    assert main(["table", str(tmp_path / "a.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("| megamoe fp32/bf16 | megamoe fast/bf16 | deep_gemm 0.1.5 own/bf16 | ratios to the peer")
    assert lines[1].startswith("deepseek-v3 balanced sustained  8192 |       950.0   860 |      1060.0   899 |")
    assert lines[1].endswith("| 0.950  1.060  SLOWER")
    assert [cell.strip() for cell in lines[2].split("|")[1:]] == ["430.0   860", "-", "-", ""]
    assert lines[3] == "skipped: deep_gemm 0.1.5 own/bf16: broken"
    assert [line.split("  ")[0] for line in lines[4:]] == ["holds", "MISSED", "holds", "NOT MEASURED"]
    assert main(["table", str(tmp_path / "none.json")]) == 2
    (tmp_path / "b.json").write_text('{"rows": [{"us": 1.0}]}')
    assert main(["table", str(tmp_path / "b.json")]) == 2
    assert "b.json: not a file of python -m bench moe" in capsys.readouterr().err


def test_rows_fit_a_line(small_bench: moe.Bench) -> None:
    small_bench.run()
    assert all(len(format_row(row)) <= 132 for row in small_bench.rows)
    skipped = dataclasses.replace(small_bench.rows[0], us=None, skipped="there is none")
    assert format_row(skipped).endswith("skipped: there is none")
    assert compact_table(small_bench.rows)[-1].startswith("small")


class Other:
    """Gives an answer of its own, or fails."""

    name = "other"
    accumulate = "fast"
    combine = "bf16"
    tolerance = 0.1
    asynchronous = True

    def __init__(self, answer: dict[int, torch.Tensor] | None) -> None:
        self._answer = answer

    def use(self, sets: object) -> None:
        return None

    def load(self, index: int) -> None:
        return None

    def call(self) -> None:
        if self._answer is None:
            raise RuntimeError("no kernel for this")

    def check(self) -> None:
        return None

    def answer(self) -> dict[int, torch.Tensor]:
        assert self._answer is not None
        return self._answer

    def close(self) -> None:
        return None


@pytest.mark.parametrize("fails", [True, False])
def test_a_wrong_contender_is_left_out_and_told(
    fails: bool, small_bench: moe.Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = small_bench._contenders

    def with_another(shape: object) -> tuple[list[moe.Layer], list[moe.Absent]]:
        present, absent = usual(SMALL)
        zeros = torch.zeros(1, 256)
        present.append(Other(None if fails else {0: zeros, 1: zeros}))
        return present, absent

    monkeypatch.setattr(small_bench, "_contenders", with_another)
    assert small_bench.run() == 1
    skipped = [row for row in small_bench.rows if row.contender == "other"]
    assert len(skipped) == 12
    assert all(str(row.skipped).startswith("FAILED: RuntimeError: no kernel" if fails else "WRONG") for row in skipped)
    assert all(row.us for row in small_bench.rows if row.contender == "megamoe")
    assert "answers were WRONG" in capsys.readouterr().out
