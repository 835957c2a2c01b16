"""``--from``, ``--rerun failed``, ``--keep``: what is run again, and which earlier passes still hold."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.plan import Request
from harness.runner import Places, plan_run
from tests.harness_project import PASSING, HarnessCall, Project

COUNTED = 'open(f"ran{phase}", "a").write("x"); pass_all()'
FAILS_WHERE_ASKED = 'sys.exit("broken") if os.path.exists("broken") else pass_all()'


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Three phases, each resting on the one before; 2 fails while there is a file ``broken``."""
    made = Project(tmp_path)
    made.phase(1, PASSING)
    made.phase(2, FAILS_WHERE_ASKED, requires=[1])
    made.phase(3, PASSING, requires=[2])
    return made


def _kept(call: HarnessCall) -> dict[int, str]:
    return {step["phase"]: step["kept_from"] for step in call.steps()}


def _gates(call: HarnessCall) -> dict[int, bool]:
    return {step["phase"]: step["is_gate"] for step in call.steps()}


def test_from_keeps_gates_that_still_hold_and_says_so(project: Project) -> None:
    first = project.call("run", "--target", "host")
    assert first.code == 0, first.output
    run = first.run_folder.name
    assert _kept(first) == {1: "", 2: "", 3: ""}
    call = project.call("run", "--target", "host", "--from", "3")
    assert call.code == 0, call.output
    assert _kept(call) == {1: run, 2: run, 3: ""}
    assert call.output.count(f"kept from run {run}") == 2
    assert call.output.splitlines()[-1] == "3 passed (2 kept from earlier runs), 0 failed"
    cases = ElementTree.parse(call.run_folder / "junit.xml").getroot().findall(".//testcase")
    assert [case.findtext("system-out") for case in cases] == [f"kept from run {run}"] * 2 + [None]
    # A kept pass is no run: the next one names the run that ran it.
    assert _kept(project.call("run", "--target", "host", "--from", "3")) == {1: run, 2: run, 3: ""}
    # Nothing is kept unless that is asked for.
    assert _kept(project.call("run", "--target", "host", "--phases", "2")) == {1: "", 2: ""}


def test_what_a_pass_depends_on(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of later phases and unimportant variables do not matter; the rest does."""
    for name, value in project.environment().items():
        monkeypatch.setenv(name, value)  # as in the call
    run = project.call("run", "--target", "host", "--phases", "1,2").run_folder.name
    places = Places(project.root / "phases", project.runs_folder)

    def kept_gates() -> list[str]:
        steps = plan_run(Request(phases=(3,), target="host", keep=True), places).plan.steps
        assert {step.kept_from for step in steps} <= {run, ""}
        return [str(step.spec.number) for step in steps if step.kept_from]

    assert kept_gates() == ["1", "2"]
    project.phase(3, COUNTED, requires=[2])
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(project.root / "cache"))
    assert kept_gates() == ["1", "2"]
    monkeypatch.setenv("PYTHONPATH", str(project.root))  # as `make` has it; steps get the same
    assert kept_gates() == ["1", "2"]
    monkeypatch.setenv("MEGAMOE_HOST_OPTIONS", "-DMEGAMOE_MUTATION=relaxed_mask")
    assert kept_gates() == []
    monkeypatch.delenv("MEGAMOE_HOST_OPTIONS")
    script = project.root / "phases" / "phase2" / "script.py"
    before = script.read_text()
    script.write_text(before + "\n# changed\n")
    assert kept_gates() == ["1"]
    plan = project.call("plan", "--target", "host", "--from", "3").output
    assert "gates that run: phase2-host-1-single; no earlier pass has the same sources" in " ".join(plan.split())
    script.write_text(before)
    assert kept_gates() == ["1", "2"]
    source = project.root / "csrc" / "a.hpp"
    source.parent.mkdir()
    source.write_text("int a;\n")
    assert kept_gates() == []


def test_sources_that_change_while_a_step_runs_give_no_key(project: Project) -> None:
    project.phase(1, f"open({str(project.root / 'phases' / 'shared.py')!r}, 'a').write('# more\\n'); pass_all()")
    call = project.call("run", "--target", "host", "--phases", "1")
    assert [step["key"] for step in call.steps()] == [""]
    assert _kept(project.call("run", "--target", "host", "--phases", "1", "--keep")) == {1: ""}


def test_a_pass_does_not_hold_beside_a_failure_of_the_same_sources(project: Project) -> None:
    """What passes only sometimes has not passed. `broken` lies outside the sources."""
    project.call("run", "--target", "host", "--phases", "1,2")
    (project.root / "broken").touch()
    failed = project.call("run", "--target", "host", "--phases", "2")
    assert failed.statuses()["2-1-single"] == "failed"
    (project.root / "broken").unlink()
    call = project.call("run", "--target", "host", "--from", "3")
    assert call.code == 0
    assert [phase for phase, run in _kept(call).items() if run] == [1]
    assert f"same sources and toolchain failed in run {failed.run_folder.name}" in call.output


def test_rerun_failed(project: Project) -> None:
    """What failed and what it blocked, with gates that hold; then nothing is left."""
    (project.root / "broken").touch()
    first = project.call("run", "--target", "host", "--phases", "1-3", "--seconds", "30")
    assert first.statuses() == {"1-1-single": "passed", "2-1-single": "failed", "3-1-single": "blocked"}
    project.phase(2, PASSING, requires=[1])
    again = project.call("run", "--rerun", "failed", "--seconds", "30")
    assert again.code == 0, again.output
    assert _gates(again) == {1: True, 2: False, 3: False}
    assert _kept(again) == {1: first.run_folder.name, 2: "", 3: ""}
    nothing = project.call("run", "--rerun", "failed")
    assert nothing.code == 2
    assert f"nothing failed in the last run, {again.run_folder}" in nothing.output


def test_rerun_tries_a_flaky_step_as_often_again(project: Project) -> None:
    """One pass would not tell; and a flaky step ends the run with exit code 1 both times."""
    project.phase(
        1,
        """
        with open("counter", "a") as file:
            file.write("x")
        sys.exit("an even try") if os.path.getsize("counter") % 2 == 0 else pass_all()
        """,
    )
    first = project.call("run", "--target", "host", "--phases", "1", "--repeat", "3")
    assert (first.code, first.statuses()) == (1, {"1-1-single": "flaky"})
    again = project.call("run", "--rerun", "failed")
    assert again.code == 1
    (step,) = again.steps()
    assert (step["status"], step["attempts"]) == ("flaky", ["failed", "passed", "failed"])
    assert again.output.splitlines()[-1] == "0 passed, 1 failed (1 flaky)"


def test_rerun_takes_up_what_a_killed_harness_never_came_to(project: Project) -> None:
    call = project.call("run", "--target", "host")
    results = call.run_folder / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    (last,) = [number for number, line in enumerate(lines) if json.loads(line).get("phase") == 3]
    results.write_text("".join(lines[:last]))
    again = project.call("run", "--rerun", "failed")
    assert again.code == 0
    assert _gates(again) == {1: True, 2: True, 3: False}
    assert all(_kept(again)[phase] == call.run_folder.name for phase in (1, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "4"], "--from: no asked-for phase from 4 on; there are [1, 2, 3]"),
        (["--rerun", "passed"], "--rerun: expected failed, got 'passed'"),
        (["--rerun", "failed"], "no run is there"),
    ],
)
def test_bad_calls(project: Project, arguments: list[str], words: str) -> None:
    call = project.call("run", "--target", "host", *arguments)
    assert call.code == 2
    assert words in call.output
