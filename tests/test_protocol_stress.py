"""The host target's sources under threads that only the protocol synchronises: plain, ThreadSanitizer, perturbed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megamoe import stress, stress_program
from megamoe.config import Stage
from megamoe.layout import num_route_chunks
from megamoe.stress_program import Build, Case, RunOptions


def explain(verdict: stress.Verdict) -> str:
    wrong = [f"{place}: {found}" for place, found in verdict.wrong.items()]
    return "\n".join([*wrong[:5], *verdict.faults[:5], verdict.reports[:8000]])


def test_the_cases_are_what_they_are_said_to_be() -> None:
    """With one chunk of routes there is no order of chunks to get wrong, with one tile no mask with a bit missing."""
    assert num_route_chunks(stress.SMALL) == 2
    assert sum(num_route_chunks(case.config) > 1 for case, _ in stress.PERTURB_CASES) >= 2
    assert stress.SMALL.num_l1_tiles == stress.WIDE.num_l1_tiles == stress.WIDE.num_l2_tiles == 2


def test_plain() -> None:
    verdict = stress.plain()
    assert verdict.ok, explain(verdict)
    assert verdict.num_runs == len(stress.PLAIN_CASES)


@pytest.mark.parametrize("case", stress.PLAIN_CASES[:2], ids=["small", "wide"])
def test_undisturbed_run_agrees_with_the_oracle(case: Case) -> None:
    lines = stress.check_against_reference(replace(case, epochs=6))
    assert len(lines) == 5


def test_thread_sanitizer() -> None:
    case = stress.TSAN_CASE
    assert case.config.num_ranks == 8
    expected = stress.undisturbed(case)
    epochs_with_y = {epoch for (epoch, _), record in expected.records.items() if record.stage is Stage.COMBINE}
    assert len(epochs_with_y) == 50
    counts = {len(record.y) for record in expected.records.values() if record.stage is Stage.COMBINE}
    assert 0 in counts
    assert len(counts) > 10
    verdict = stress.tsan()
    assert verdict.ok, explain(verdict)
    assert verdict.reports == ""


def test_perturbation() -> None:
    verdict = stress.perturb(num_seeds=300)
    print("hits:", ", ".join(f"{name} {count}" for name, count in verdict.hits.items()))
    assert verdict.ok, explain(verdict)
    assert verdict.num_runs == 300
    assert verdict.hits
    assert [name for name, count in verdict.hits.items() if count == 0] == []


def test_perturbation_is_only_in_its_own_build() -> None:
    outcome = stress_program.run(Case(stress.TINY, epochs=2), Build(), RunOptions())
    assert set(outcome.hits.values()) == {0}


# --- the driver itself must not call a run right that is not ---------------------------------------------------------

CASE = Case(stress.TINY, seed=5, epochs=3)


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "program"
    stress.undisturbed(CASE)  # with the true program
    monkeypatch.setattr(stress_program, "program", lambda build: path)
    return path


@pytest.mark.parametrize("status", [0, 1, 3, 139])
def test_a_program_without_results_is_wrong_for_every_seed(fake_program: Path, status: int) -> None:
    fake_program.write_text(f"#!/bin/sh\nexit {status}\n")
    fake_program.chmod(0o755)
    outcome = stress_program.run(CASE, Build(), RunOptions(), range(4, 7))
    assert [run.perturb_seed for run in outcome.runs] == [4, 5, 6]
    expected = stress.undisturbed(CASE)
    assert all(stress.difference(run, expected) for run in outcome.runs)


def test_difference_sees_a_bit_of_y_a_view_and_a_missing_epoch() -> None:
    expected = stress.undisturbed(CASE)
    assert stress.difference(expected, expected) == ""
    place = next(place for place, record in expected.records.items() if record.y)
    record = expected.records[place]
    flipped = bytes([record.y[0] ^ 1]) + record.y[1:]
    for other, words in (
        (replace(record, y=flipped), "y differs"),
        (replace(record, view_digest=record.view_digest ^ 1), "l2_acts or combine differ"),
    ):
        changed = replace(expected, records={**expected.records, place: other})
        assert words in stress.difference(changed, expected)
    fewer = {other: value for other, value in expected.records.items() if other != place}
    assert "no result" in stress.difference(replace(expected, records=fewer), expected)
