"""The phase scripts as the harness and a user start them, and that they fail when something is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.record import read_record
from harness.spec import load_specs
from megamoe import L1Weights, L2Weights, Stage, launch_mega_moe
from phases.phase2 import dispatch_only_correctness as phase2
from phases.phase3 import l1_wgmma_correctness as phase3
from phases.phase4 import l1_epilogue_correctness as phase4
from phases.phase6 import end_to_end_correctness as phase6
from phases.support import launches, runner
from phases.support.numeric import numeric_variants
from phases.support.runner import CaseList, Phase, Variant, run_phase
from phases.support.view_specs import load_views

ROOT = Path(__file__).resolve().parent.parent
SPECS = load_specs(ROOT / "phases")
CASES: Mapping[int, Callable[[Phase], CaseList]] = {
    2: phase2.make_cases,
    3: phase3.make_cases,
    4: phase4.make_cases,
    5: numeric_variants,
    6: phase6.make_cases,
}


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Phases set the number of torch's threads for a process of their own."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_script(number: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, str(SPECS[number].script), *arguments],
        env={**clean, "MEGAMOE_TIMEOUT_S": "2", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_here(number: int, *arguments: str) -> int:
    return run_phase(SPECS[number].script.parent, CASES[number], list(arguments))


def test_six_phases_rest_on_each_other() -> None:
    assert list(SPECS) == [1, 2, 3, 4, 5, 6]
    assert [SPECS[number].script.name for number in SPECS] == [
        "interface_smoke.py",
        "dispatch_only_correctness.py",
        "l1_wgmma_correctness.py",
        "l1_epilogue_correctness.py",
        "l2_gemm_correctness.py",
        "end_to_end_correctness.py",
    ]
    for number, spec in SPECS.items():
        assert spec.requires == tuple(range(1, number))
        assert dict(spec.targets["host"]) == {1: ("single",), 2: ("process", "virtual"), 8: ("process", "virtual")}


@pytest.mark.parametrize("number", sorted(SPECS))
def test_scripts_pass_and_record_what_the_harness_needs(number: int, tmp_path: Path) -> None:
    record_file = tmp_path / "record.jsonl"
    ended = run_script(number, "--ranks", "2", "--group", "virtual", "--record", str(record_file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed" in ended.stdout.splitlines()[-1]
    record = read_record(record_file)
    assert not record.problem
    assert record.end_ok is True
    assert all(line["ok"] for line in (*record.cases, *record.views))
    for view in SPECS[number].views:
        assert sum(line["compared"] for line in record.views if line["view"] == view) > 0, view
    names = [str(line["case"]) for line in record.cases]
    for case in SPECS[number].cases:
        assert any(name == case or name.startswith(case + "[") for name in names), case
    for line in record.cases:
        assert not line.get("skipped") or line["case"] in ("different_configs", "real_size", "graph_replay")


def test_alone_without_arguments() -> None:
    ended = run_script(1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 ranks single: passed" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cases", "nothing"), ("--cases", "nothing", "token_counts")),
        (("--ranks", "2", "--group", "single"), ("--group single", "2")),
        (("--ranks", "2", "--group", "process"), ("--group process", "torch.distributed.run")),
        (("--target", "tpu"), ("--target", "tpu")),
    ],
)
def test_bad_calls_end_with_2(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    ended = run_script(2, *arguments)
    assert ended.returncode == 2
    for word in words:
        assert word in ended.stderr


def test_only_the_cases_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(2, "--cases", "masked,one_expert") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["masked[0%]", "masked[30%]", "masked[100%]", "one_expert"]


# --- what is broken on purpose must be seen -------------------------------------------------------------------------


def _with_last_scale(l1: L1Weights, factor: float) -> L1Weights:
    """The weights with the last scale of the last expert too large."""
    sf = l1.sf.clone()
    sf[-1, -1, -1] *= factor
    return L1Weights(l1.weight, sf)


def _broken(monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, ...]]) -> None:
    """Let the phases launch with ``change(y, l1, l2, buffer)`` instead of what the oracle knows of."""

    def launch(y: torch.Tensor, l1: L1Weights, l2: L2Weights, buffer: Any, *rest: Any, **options: Any) -> None:
        launch_mega_moe(*change(y, l1, l2, buffer), *rest, **options)

    monkeypatch.setattr(launches, "launch_mega_moe", launch)


@pytest.mark.parametrize("number", [3, 4, 6])
def test_a_wrong_l1_scale_fails(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    factor = 3.0 if number == 6 else 1.01  # one scale of many: y's bound sees only what is coarse
    _broken(monkeypatch, lambda y, l1, l2, buffer: (y, _with_last_scale(l1, factor), l2, buffer))
    case = "windows" if number == 3 else "normal"  # the windows include the last columns
    expected = {3: "l1_accum_debug", 4: "l1_accum_debug", 6: "y against"}[number]
    assert run_here(number, "--cases", case) == 1
    assert expected in capsys.readouterr().out


def test_a_wrong_l2_scale_fails_in_phase_5_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _broken(monkeypatch, lambda y, l1, l2, buffer: (y, l1, L2Weights(l2.weight, l2.sf * 1.01), buffer))
    assert run_here(4, "--cases", "normal") == 0
    capsys.readouterr()
    assert run_here(5, "--cases", "normal") == 1
    out = capsys.readouterr().out
    assert "combine against oracle" in out
    assert "l2_acts against" not in out


def test_a_wrong_weight_of_a_route_fails_in_phase_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(*arguments: Any) -> tuple[Any, ...]:
        buffer = arguments[3]
        buffer.topk_weights[0, 0] *= 1.0001
        return arguments

    _broken(monkeypatch, change)
    assert run_here(2, "--cases", "normal", "--ranks", "2") == 1
    out = capsys.readouterr().out
    assert re.search(r"rank 0: topk_weights against oracle, worst at rank 0, token 0, .*: exact: 1 of", out)
    assert re.search(r"l1_topk_weights against oracle, worst at .*: exact: ", out)
    assert "l1_acts against" not in out


def test_a_y_that_is_nearly_right_fails_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = launches.wait

    def nudge(buffers: Any) -> None:
        waits(buffers)
        (launch,) = prepared
        launch.y[0].view(torch.int16)[0, 0] += 1

    prepared: list[launches.Launch] = []
    queue = launches.Launcher.queue

    def remember(self: launches.Launcher, launch: launches.Launch) -> None:
        prepared[:] = [launch]
        queue(self, launch)

    monkeypatch.setattr(launches, "wait", nudge)
    monkeypatch.setattr(launches.Launcher, "queue", remember)
    assert run_here(6, "--cases", "one_expert", "--ranks", "2") == 1
    out = capsys.readouterr().out
    assert re.search(r"rank 0: y against own_partials, worst at rank 0, token 0, .*: exact: 1 of", out)
    assert "y against oracle" not in out  # one bit is within that bound


@pytest.mark.parametrize(("factor", "seen"), [(1.010, False), (1.013, True)])
def test_on_a_gpu_the_norm_of_y_is_over_all_ranks(
    factor: float, seen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of two ranks is off by that much: with 1 % it alone is beyond the bound, with 1.3 % both together are."""
    waits = launches.wait
    queue = launches.Launcher.queue
    prepared: list[launches.Launch] = []

    def remember(self: launches.Launcher, launch: launches.Launch) -> None:
        prepared[:] = [launch]
        queue(self, launch)

    def scale(buffers: Any) -> None:
        waits(buffers)
        prepared[0].y[0].mul_(factor)

    monkeypatch.setattr(launches, "wait", scale)
    monkeypatch.setattr(launches.Launcher, "queue", remember)
    monkeypatch.setattr(runner, "load_views", lambda folder, target: load_views(folder, "sm90"))
    assert run_here(6, "--cases", "one_expert", "--ranks", "2") == 1
    out = capsys.readouterr().out
    assert "rank 0: y against own_partials" in out  # which is what the failure is about with 1 %
    for rank in (0, 1):
        assert bool(re.search(rf"rank {rank}: y against oracle.*: y_all_ranks: ", out)) == seen


def test_views_that_nobody_writes_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A launch that stops too early leaves poison, not the answer of the launch before."""
    queue = launches.Launcher.queue
    seen: list[int] = []

    def stop_early(self: launches.Launcher, launch: launches.Launch) -> None:
        seen.append(1)
        options = launch.options
        if len(seen) > 2:
            options = launches.Options(stage=Stage.INTERFACE)
        queue(self, launches.Launch(**{**vars(launch), "options": options}))

    monkeypatch.setattr(launches.Launcher, "queue", stop_early)
    assert run_here(2, "--cases", "masked,normal") == 1
    out = capsys.readouterr().out
    assert "ok  masked[30%]" in out
    assert "FAILED  normal" in out


@pytest.mark.parametrize(
    ("mutation", "number", "cases", "words"),
    [
        ("arrival_one_too_many", 2, "normal", "l1_arrival_count against oracle"),
        ("bank_not_cleared", 2, "masked,token_counts", "FAILED  masked[100%]"),
        ("mask_bit_missing", 4, "normal", "l2_arrival_mask"),
        ("arrival_one_too_few", 5, "normal", "rows arrived"),
    ],
)
def test_faults_of_the_protocol_fail_in_their_phase(mutation: str, number: int, cases: str, words: str) -> None:
    options = f"-DMEGAMOE_MUTATION={mutation}"
    ended = run_script(number, "--ranks", "2", "--cases", cases, MEGAMOE_HOST_OPTIONS=options)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert words in ended.stdout


def test_a_hang_is_explained_with_counters() -> None:
    options = "-DMEGAMOE_MUTATION=arrival_one_too_few"
    ended = run_script(5, "--cases", "normal", MEGAMOE_HOST_OPTIONS=options, MEGAMOE_TIMEOUT_S="1")
    assert ended.returncode == 1
    assert "a worker of this rank stopped on the way" in ended.stdout
    assert "rank 0 of 1: epoch 1 ended" in ended.stdout
    assert "rows arrived, 0 of" in ended.stdout


# --- the case loop --------------------------------------------------------------------------------------------------


def _loop(bodies: Mapping[str, Callable[..., None] | None], tmp_path: Path) -> tuple[int, Any]:
    """Run phase 2 with these bodies for its first cases, and nothing to do in the others."""

    def make_cases(phase: Phase) -> CaseList:
        cases = {name: [Variant(name, bodies[name], "no reason")] for name in bodies}
        return {**{name: [Variant(name, None, "left out")] for name in phase.spec.cases}, **cases}

    record = tmp_path / "record.jsonl"
    code = run_phase(SPECS[2].script.parent, make_cases, ["--record", str(record), "--cases", ",".join(bodies)])
    return code, read_record(record)


def test_a_case_that_compares_nothing_fails(tmp_path: Path) -> None:
    code, record = _loop({"normal": lambda phase, checks: None}, tmp_path)
    assert (code, record.end_ok) == (1, False)
    assert record.cases[0]["message"] == "the case compared and required nothing"


def test_an_empty_comparison_fails_unless_it_is_meant(tmp_path: Path) -> None:
    nothing = torch.empty(0)

    def body(meant: bool) -> Callable[..., None]:
        return lambda phase, checks: checks.compare("x", "exact", nothing, nothing, rank=0, expect_empty=meant) and None

    code, record = _loop({"normal": body(False), "masked": body(True)}, tmp_path)
    assert code == 1
    assert [line["ok"] for line in record.cases] == [False, True]
    assert [line["ok"] for line in record.views] == [False, True]
    one = torch.ones(1)
    code, record = _loop(
        {"normal": lambda phase, checks: checks.compare("x", "exact", one, one, rank=0, expect_empty=True) and None},
        tmp_path,
    )
    assert code == 1, "something was compared where the case says that there is nothing"


def test_an_exception_fails_its_case_and_the_next_one_runs(tmp_path: Path) -> None:
    def explode(phase: Phase, checks: Any) -> None:
        raise ZeroDivisionError("of this test")

    code, record = _loop({"normal": explode, "masked": lambda phase, checks: checks.require(True, "")}, tmp_path)
    assert code == 1
    assert [line["ok"] for line in record.cases] == [False, True]
    assert "ZeroDivisionError: of this test" in record.cases[0]["message"]


def test_a_skipped_case_says_why(tmp_path: Path) -> None:
    code, record = _loop({"normal": None, "masked": lambda phase, checks: checks.require(True, "")}, tmp_path)
    assert code == 0
    assert record.cases[0]["skipped"] == "no reason"
