"""What makes a step pass: each rule on a record of its own, and specs that cannot be used."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.holdings import HOLDINGS_FILE, FileKey, recorded_holdings
from harness.jsonlines import MAX_CHARACTERS
from harness.machine import Gpu, Machine
from harness.outcome import Outcome
from harness.plan import Plan, Request, Step, make_plan
from harness.processes import ProcessKey
from harness.record import Verdict, badness, judge, read_record
from harness.results import StepResult, exit_code, log_tails
from harness.spec import SpecError, load_spec, load_specs
from harness.watch import PROCESSES_FILE, recorded_processes
from tests.harness_project import PASSING, Project

CLEAN = Outcome("exited", exit_code=0)
CASE = {"kind": "case", "case": "small", "ok": True, "seconds": 0.1}
VIEW = {
    "kind": "view",
    "case": "small",
    "view": "x",
    "compared": 10,
    "wrong": 0,
    "max_error": 0.0,
    "bound": 1,
    "ok": True,
}
END = {"kind": "end", "ok": True}
MAP = {"rows": 1, "columns": 1, "cells": [[0.5]], "worst": [], "unit": "of the bound"}


def _judge(
    tmp_path: Path, lines: list[dict[str, Any]], outcome: Outcome = CLEAN, cases: tuple[str, ...] | None = None
) -> Verdict:
    spec = load_spec(Project(tmp_path).phase(1, PASSING))
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    step = Step(spec, "host", 1, "single", cases, 60.0, 1, is_gate=False)
    return judge(step, outcome, read_record(path))


def test_passes(tmp_path: Path) -> None:
    verdict = _judge(tmp_path, [CASE, VIEW, END])
    assert (verdict.status, verdict.reasons) == ("passed", ())


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([CASE, VIEW | {"compared": 0}, END], "case small, view x: compared 0 elements"),
        ([CASE, VIEW | {"compared": 0, "expect_empty": True}, END], "view x: compared 0 elements in the whole step"),
        ([CASE, END], "view x: compared 0 elements in the whole step"),
        ([CASE, VIEW | {"ok": False, "wrong": 2}, END], "case small, view x: 2 of 10 elements wrong"),
        ([CASE | {"ok": False, "message": "boom"}, VIEW, END], "case small: boom"),
        ([VIEW, END], "case small was not run"),
        ([CASE | {"case": "smaller"}, VIEW, END], "case small was not run"),
        ([CASE, VIEW], "the record has no end"),
        ([CASE, VIEW, END, CASE], "the record has no end"),
        ([CASE, VIEW, END | {"ok": False}], "the record ends with ok: false"),
        ([CASE, VIEW, {"kind": "vieww"}, END], "unknown kind 'vieww'"),
        ([CASE, {"kind": "view", "view": "x"}, END], "kind view without case, compared, wrong, ok"),
        ([CASE, VIEW | {"compared": "10"}, END], "kind view with a strange compared"),
        ([CASE, VIEW | {"compared": -10}, END], "kind view with a strange compared"),
        ([CASE, VIEW | {"compared": 1 << 64}, END], "kind view with a strange compared"),
        ([CASE, VIEW | {"max_error": 10**400, "bound": 10**400}, END], "kind view with a strange max_error, bound"),
        ([CASE, VIEW | {"map": MAP | {"cells": [[10**400]]}}, END], "kind view with a strange map"),
        ([CASE, VIEW | {"compared": 1e400, "wrong": None}, END], "kind view with a strange compared, wrong"),
        ([CASE, VIEW | {"max_error": "big"}, END], "kind view with a strange max_error"),
        ([CASE | {"case": ["small"], "ok": "no"}, VIEW, END], "kind case with a strange case, ok"),
        ([CASE | {"message": "\ud800"}, VIEW, END], "kind case with a strange message"),
        ([CASE, VIEW, {"kind": "figure", "name": "x", "value": [1]}, END], "kind figure with a strange value"),
        ([CASE, VIEW, END | {"ok": "false"}], "kind end with a strange ok"),
        ([], "the record has no end"),
    ],
)
def test_record_that_fails(tmp_path: Path, lines: list[dict[str, Any]], reason: str) -> None:
    verdict = _judge(tmp_path, lines)
    assert verdict.status == "failed"
    assert any(reason in text for text in verdict.reasons), verdict.reasons


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        (Outcome("exited", exit_code=1, broken_ranks=(3, 0)), "failed", "exit code 1; rank 3 ended first"),
        (Outcome("exited", exit_code=-11), "failed", "exit code -11"),
        (
            Outcome("exited", exit_code=0, left_behind=("pid 7",)),
            "failed",
            "left behind, and ended by the harness: pid 7",
        ),
        (Outcome("exited", exit_code=0, survivors=("pid 7",)), "failed", "COULD NOT BE ENDED: pid 7"),
        (Outcome("exited", exit_code=0, removed_files=("/dev/shm/a",)), "failed", "left files behind"),
        (Outcome("exited", exit_code=0, held_memfds=("pid 7 holds",)), "failed", "its shared memory is still held"),
        (Outcome("timed out", message="still running"), "timed out", "still running"),
        (Outcome("supervisor died", message="SIGKILL"), "failed", "SIGKILL"),
        (Outcome("interrupted", message="SIGTERM"), "failed", "SIGTERM"),
    ],
)
def test_ending_that_fails_in_spite_of_a_good_record(
    tmp_path: Path, outcome: Outcome, status: str, reason: str
) -> None:
    verdict = _judge(tmp_path, [CASE, VIEW, END], outcome)
    assert verdict.status == status
    assert any(reason in text for text in verdict.reasons), verdict.reasons


def test_empty_check_that_is_meant_passes_beside_a_full_one(tmp_path: Path) -> None:
    empty = VIEW | {"case": "small[tokens=0]", "compared": 0, "expect_empty": True}
    verdict = _judge(tmp_path, [CASE | {"case": "small[tokens=0]"}, empty, VIEW, END])
    assert verdict.status == "passed"
    assert verdict.views["x"].compared == 10


def test_narrowed_step_need_not_touch_every_view(tmp_path: Path) -> None:
    assert _judge(tmp_path, [CASE, END], cases=("small",)).status == "passed"
    assert _judge(tmp_path, [CASE, VIEW | {"compared": 0}, END], cases=("small",)).status == "failed"


def test_variants_of_a_case_are_blamed_on_it(tmp_path: Path) -> None:
    bad = CASE | {"case": "small[block_m=64]", "ok": False}
    assert _judge(tmp_path, [CASE, bad, VIEW, END]).failed_cases == ("small",)


def test_skipped_cases_are_told(tmp_path: Path) -> None:
    skipped = CASE | {"skipped": "needs 2 ranks"}
    verdict = _judge(tmp_path, [skipped, CASE, VIEW, END])
    assert (verdict.status, verdict.skipped_cases) == ("passed", {"small": "needs 2 ranks"})
    verdict = _judge(tmp_path, [skipped, END])
    assert (verdict.status, verdict.reasons) == ("skipped", ("needs 2 ranks",))
    assert _judge(tmp_path, [skipped, END], Outcome("exited", exit_code=1)).status == "failed"


def test_what_is_no_file_of_lines_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    os.mkfifo(path)  # reading it would wait for ever
    assert read_record(path).problem == f"{path}: not a regular file"
    path.unlink()
    path.mkdir()
    assert read_record(path).problem == f"{path}: not a regular file"
    path.rmdir()
    path.write_text("[" * 100_000 + "\n")
    assert f"{path}:1: not JSON" in read_record(path).problem
    with path.open("w") as file:
        file.truncate(MAX_CHARACTERS + 1)
    assert read_record(path).problem == f"{path}: longer than {MAX_CHARACTERS} characters"


def test_cleaning_up_reads_what_is_sound(tmp_path: Path) -> None:
    lines = ["garbage", "[]", '{"pid": "x"}', '{"pid": 7, "start_ticks": 8}', "[" * 100_000, '{"pid": 9, "start']
    (tmp_path / PROCESSES_FILE).write_text("\n".join(lines))
    assert recorded_processes(tmp_path) == [ProcessKey(7, 8)]
    lines = ["garbage", '{"device": 1, "inode": "x", "name": "n"}', '{"device": 1, "inode": 2, "name": "n"}']
    (tmp_path / HOLDINGS_FILE).write_text("\n".join(lines))
    assert recorded_holdings(tmp_path) == {FileKey(1, 2): "n"}


def test_logs_are_those_that_ranks_write(tmp_path: Path) -> None:
    (tmp_path / "rank1.log").write_text("one\n")
    (tmp_path / "rankX.log").write_text("not a rank's\n")
    (tmp_path / "rank2.log").mkdir()
    assert log_tails(tmp_path) == {"rank1.log": "one"}


def test_half_a_last_line_is_forgiven_and_half_a_first_is_not(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(json.dumps(CASE) + '\n{"kind": "vi')
    assert len(read_record(path).cases) == 1
    path.write_text('{"kind": "vi\n' + json.dumps(CASE) + "\n")
    assert f"{path}:1: not JSON" in read_record(path).problem


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stage": "lunch"}, "stage: expected one of interface, dispatch"),
        ({"requires": [1]}, "requires: expected a list of phase numbers below 1, got [1]"),
        ({"script": "none.py"}, "script: expected a file in"),
        ({"targets": {"tpu": {}}}, "targets: expected a mapping with keys of host, sm90"),
        ({"targets": {"host": {"ranks": {2: ["single"]}}}}, "group kind single with 1 rank only"),
        ({"targets": {"host": {"ranks": {"two": ["virtual"]}}}}, "expected a number of ranks from 1, got 'two'"),
        (
            {"targets": {"host": {"ranks": {2: ["threads"]}}}},
            "targets.host.ranks.2: expected a list of single, process",
        ),
        ({"targets": {"host": {}}}, "targets.host: expected {ranks:"),
        ({"cases": []}, "cases: expected at least one name"),
        ({"cases": ["a", "a"]}, "cases: expected each name once"),
        ({"seconds": 61}, "seconds: expected a number above 0 and up to 60, got 61"),
        ({"seconds": True}, "seconds: expected a number above 0"),
        ({"views": "x"}, "views: expected a list of names, got 'x'"),
        ({"holds": ""}, "holds: expected a text, got ''"),
        ({"colour": "red"}, "unknown fields: ['colour']"),
        ({"targets": {"host": {"ranks": {1: [["single"]]}}}}, "targets.host.ranks.1: expected a list of single"),
    ],
)
def test_spec_that_cannot_be_used(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = Project(tmp_path).phase(1, PASSING, **fields)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_spec_without_a_field_or_a_gate(tmp_path: Path) -> None:
    project = Project(tmp_path)
    path = project.phase(2, PASSING, requires=[1])
    with pytest.raises(SpecError, match="requires: no such phase: \\[1\\]"):
        load_specs(path.parent.parent)
    path.write_text("name: x\n")
    with pytest.raises(SpecError, match="missing fields: \\['stage', 'holds'"):
        load_spec(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="not YAML"):
        load_spec(path)
    path.write_text("a: [")
    with pytest.raises(SpecError, match="not YAML"):
        load_spec(path)


def _machine(num_hopper_gpus: int) -> Machine:
    gpus = (Gpu("NVIDIA H200", (9, 0)),) * num_hopper_gpus + (Gpu("NVIDIA L4", (8, 9)),)
    return Machine("here", "3.11", "2.13", 2, 1 << 34, gpus)


def _plan(tmp_path: Path, num_hopper_gpus: int, targets: dict[str, Any], **request: Any) -> Plan:
    project = Project(tmp_path)
    specs = load_specs(project.phase(1, PASSING, targets=targets).parent.parent)
    return make_plan(Request(**request), specs, _machine(num_hopper_gpus))


BOTH = {
    "host": {"ranks": {1: ["single"], 8: ["process", "virtual"]}},
    "sm90": {"ranks": {1: ["single"], 8: ["process", "virtual"]}},
}


def test_best_target(tmp_path: Path) -> None:
    assert _plan(tmp_path, 0, BOTH).target == "host"
    assert _plan(tmp_path, 1, BOTH).target == "sm90"
    plan = _plan(tmp_path, 1, {"host": BOTH["host"]})
    assert (plan.target, plan.target_reason) == ("host", "a Hopper GPU is here, but no phase lists target sm90")


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    """As processes 8 ranks need 8 GPUs; virtual ranks need one."""
    reasons = {step.group: step.skip_reason for step in _plan(tmp_path, 2, BOTH, target="sm90").steps}
    assert reasons == {"single": "", "process": "8 ranks as processes need 8 Hopper GPUs, here: 2", "virtual": ""}


def test_spread_ranks_need_two_gpus(tmp_path: Path) -> None:
    spread = {"sm90": {"ranks": {8: ["virtual", "spread"]}}}
    reasons = {step.group: step.skip_reason for step in _plan(tmp_path, 1, spread, target="sm90").steps}
    assert reasons == {"virtual": "", "spread": "ranks spread over GPUs need 2 Hopper GPUs, here: 1"}
    assert not any(step.skip_reason for step in _plan(tmp_path, 2, spread, target="sm90").steps)


def test_ranks_and_groups_narrow(tmp_path: Path) -> None:
    plan = _plan(tmp_path, 0, BOTH, ranks=(1, 8), groups=("virtual",))
    assert [step.name for step in plan.steps] == ["phase1-host-1-single", "phase1-host-8-virtual"]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["passed", "passed"], 0),
        (["passed", "skipped"], 3),
        (["skipped", "failed"], 1),
        (["passed", "timed out"], 1),
        (["passed", "flaky"], 1),
        (["passed", "blocked"], 1),
    ],
)
def test_exit_codes(tmp_path: Path, statuses: list[str], code: int) -> None:
    (step, *_) = _plan(tmp_path, 0, BOTH).steps
    results = [StepResult(step, status) for status in statuses]
    assert exit_code(results, [], []) == code
    assert exit_code(results, [], ["ended pid 7"]) == 1


def test_skipped_gate_is_not_an_asked_for_skip(tmp_path: Path) -> None:
    (step, *_) = _plan(tmp_path, 0, BOTH).steps
    gate = Step(step.spec, "host", 1, "single", None, 60.0, 1, is_gate=True)
    assert exit_code([StepResult(gate, "skipped"), StepResult(step, "passed")], [], []) == 0


def test_a_failure_is_worse_than_any_pass_and_nan_than_any_error() -> None:
    order = [
        (True, 3.0, 4.0),
        (True, 0.9, 1.0),
        (True, 7.0, 0.0),
        (True, math.nan, 1.0),
        (False, 0.1, 1.0),
        (False, 0.5, 1.0),
    ]
    assert all(badness(*better) < badness(*worse) for better, worse in pairwise(order))
