"""A run: plan, build, pre-flight, every step in order, post-flight, results."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.display import Display, show_summary
from harness.earlier import narrow_to_undone
from harness.flight import post_flight, pre_flight
from harness.git import GitError, describe_commit
from harness.keys import EarlierSteps, StepKeys, keep_passes, toolchain
from harness.launch import base_environment, run_supervised, step_command, step_environment
from harness.machine import Machine, look_at_machine
from harness.plan import BadRequest, Plan, Request, Step, make_plan, with_requirements
from harness.record import RECORD_FILE, judge, read_record
from harness.report import write_report
from harness.results import (
    STOPPED,
    BuildResult,
    StepResult,
    append_line,
    build_line,
    command_to_repeat,
    exit_code,
    flight_line,
    fresh_folder,
    log_tails,
    step_line,
    write_junit,
    write_run_file,
)
from harness.spec import PhaseSpec, load_specs
from harness.supervisor import LAUNCHER_LOG, StopRequest

DEFAULT_PHASES_ROOT = Path(__file__).resolve().parent.parent / "phases"
BUILD_SECONDS = 900.0


@dataclass(frozen=True)
class Places:
    """Where phases come from and results go. The folder above ``phases_root`` is where steps run."""

    phases_root: Path
    runs_folder: Path

    @property
    def project_root(self) -> Path:
        return self.phases_root.resolve().parent


def new_run_folder(runs_folder: Path) -> Path:
    """``<runs>/<time>``, made; a second run in the same second gets a number. Raises BadRequest where none can be."""
    try:
        return fresh_folder(runs_folder, time.strftime("%Y-%m-%dT%H-%M-%S"))
    except FileExistsError:
        raise
    except OSError as error:
        raise BadRequest(f"--runs-dir: no folder for results in {runs_folder}: {error}") from error


def build(
    target: str, folder: Path, project_root: Path, stop: StopRequest, seconds: float, max_ranks: int | None = None
) -> BuildResult:
    """Compile what groups of up to ``max_ranks`` ranks need of ``target``, or everything of it, in a supervised
    process, before and outside any step's limit."""
    log_folder = folder / f"build-{target}"
    outcome = run_supervised(
        (sys.executable, "-m", "harness.build_target", target, *([str(max_ranks)] if max_ranks is not None else [])),
        log_folder,
        seconds=seconds,
        num_ranks=0,
        environment=base_environment(project_root),
        project_root=project_root,
        stop=stop,
        on_tick=lambda elapsed_s: None,
    )
    if outcome.end == "exited" and outcome.exit_code == 0:
        return BuildResult(target, "passed", outcome.seconds)
    reason = outcome.message or f"exit code {outcome.exit_code}"
    status = "timed out" if outcome.end == "timed out" else "failed"
    tail = log_tails(log_folder).get(LAUNCHER_LOG, "")
    return BuildResult(target, status, outcome.seconds, (f"{reason} (log: {log_folder / LAUNCHER_LOG})",), tail)


class LastStep:
    """Set by SIGUSR2: the step that runs may end in order, and no other starts. Sent on a node whose owner is gone."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.asked = True


class Run:
    """The state of one run."""

    def __init__(
        self, request: Request, places: Places, keys: StepKeys, folder: Path, display: Display, stop: StopRequest
    ) -> None:
        self.request = request
        self.places = places
        self.keys = keys
        self.folder = folder
        self.display = display
        self.stop = stop
        self.last_step = LastStep()
        self.results: list[StepResult] = []
        self.builds: list[BuildResult] = []

    def build_for(self, plan: Plan, seconds: float) -> None:
        to_run = [step for step in plan.steps if not step.skip_reason and not step.kept_from]
        for target in sorted({step.target for step in to_run}):
            self.display.say(f"building target {target} …")
            max_ranks = max(step.num_ranks for step in to_run if step.target == target)
            result = build(target, self.folder, self.places.project_root, self.stop, seconds, max_ranks)
            self.builds.append(result)
            append_line(self.folder, build_line(result))
            self.display.say(f"build of target {target}: {result.status}, {result.seconds:.1f} s")

    def run_step(self, step: Step, specs: dict[int, PhaseSpec]) -> None:
        if step.skip_reason:
            result = StepResult(step, "skipped", (step.skip_reason,))
        elif self.stop.reason is not None:
            result = StepResult(step, "skipped", (f"{STOPPED} ({self.stop.reason})",))
        elif self.last_step.asked:
            result = StepResult(step, "skipped", (f"{STOPPED} (who started it is gone)",))
        elif reason := self._block_reason(step, specs):
            result = StepResult(dataclasses.replace(step, kept_from=""), "blocked", (reason,))
        elif step.kept_from:
            result = StepResult(step, "passed")
        else:
            key = self.keys.key(step)
            result = self._run_attempts(step)
            if self.stop.reason is None and self.keys.key(step) == key:
                result = dataclasses.replace(result, key=key)
        self.results.append(result)
        append_line(self.folder, step_line(result))
        self.display.finished(result)

    def _block_reason(self, step: Step, specs: dict[int, PhaseSpec]) -> str:
        for build_result in self.builds:
            if build_result.target == step.target and build_result.status != "passed":
                return f"the build of target {step.target} {build_result.status}"
        if not self.request.with_gates:
            return ""
        gates = set(with_requirements((step.spec.number,), specs)) - {step.spec.number}
        failed = {r.step.spec.number for r in self.results if r.is_failing} & gates
        return f"gate phase {min(failed)} failed" if failed else ""

    def _run_attempts(self, step: Step) -> StepResult:
        attempts: list[StepResult] = []
        for number in range(1, step.repeat + 1):
            if self.stop.reason is not None or (self.last_step.asked and attempts):
                break
            attempts.append(self._attempt(step, number))
        statuses = tuple(attempt.status for attempt in attempts)
        worst = next((attempt for attempt in attempts if attempt.status != "passed"), attempts[-1])
        if step.repeat == 1:
            return worst
        was_stopped = worst.outcome is not None and worst.outcome.end == "interrupted"
        if worst.is_failing and "passed" in statuses and not was_stopped:
            note = f"passed {statuses.count('passed')} of {len(statuses)} times"
            return dataclasses.replace(worst, status="flaky", reasons=(note, *worst.reasons), attempts=statuses)
        return dataclasses.replace(worst, attempts=statuses)

    def _attempt(self, step: Step, number: int) -> StepResult:
        folder = self.folder / (step.name if step.repeat == 1 else f"{step.name}/{number}")
        outcome = run_supervised(
            step_command(step, folder),
            folder,
            seconds=step.seconds,
            num_ranks=step.num_ranks if step.group == "process" else 1,
            environment=step_environment(step, self.places.project_root),
            project_root=self.places.project_root,
            stop=self.stop,
            on_tick=lambda elapsed_s: self.display.running(step, number, elapsed_s),
        )
        verdict = judge(step, outcome, read_record(folder / RECORD_FILE))
        is_failing = verdict.status in ("failed", "timed out")
        result = StepResult(
            step=step,
            status=verdict.status,
            reasons=verdict.reasons,
            failed_cases=verdict.failed_cases,
            num_cases=verdict.num_cases,
            skipped_cases=verdict.skipped_cases,
            views=verdict.views,
            figures=verdict.figures,
            dumps=verdict.dumps,
            outcome=outcome,
            folder=folder,
            log_tails=log_tails(folder) if is_failing else {},
            again=self._again(step, verdict.failed_cases),
        )
        if is_failing:
            with suppress(IsADirectoryError):  # the step may have made a folder of that name
                text = result.failure_text() + "\n"
                (folder / "failure.txt").write_text(text, encoding="utf-8", errors="replace")
        return result

    def _again(self, step: Step, failed_cases: Sequence[str]) -> str:
        root = self.places.phases_root
        other_root = None if root.resolve() == DEFAULT_PHASES_ROOT else root
        return command_to_repeat(step, failed_cases, self.request.seconds, other_root)


def _commit(folder: Path) -> str:
    """See describe_commit; in words where there is none. A copy on a node is no checkout: there MEGAMOE_COMMIT says
    which commit it was made from."""
    if sent_with := os.environ.get("MEGAMOE_COMMIT"):
        return sent_with
    try:
        return describe_commit(folder)
    except GitError as error:
        return f"unknown ({error})"


@dataclass(frozen=True)
class PlannedRun:
    """What a run would do. ``notes``: passes of earlier runs that do not hold, in words."""

    plan: Plan
    specs: dict[int, PhaseSpec]
    machine: Machine
    keys: StepKeys
    notes: tuple[str, ...]


def plan_run(request: Request, places: Places) -> PlannedRun:
    """Load the specs and lay out the steps. Raises SpecError or BadRequest."""
    specs = load_specs(places.phases_root)
    if request.rerun is not None:
        request = narrow_to_undone(request, places.runs_folder)
    machine = look_at_machine(with_gpus=request.target != "host")
    keys = StepKeys(places.phases_root, machine)
    plan, notes = keep_passes(make_plan(request, specs, machine), request, keys, EarlierSteps(places.runs_folder))
    return PlannedRun(plan, specs, machine, keys, notes)


def run(request: Request, places: Places, display: Display, *, build_seconds: float = BUILD_SECONDS) -> int:
    """Do everything that was asked for; the exit code (0, 1 or 3). Raises SpecError or BadRequest before it starts."""
    stop = StopRequest()
    planned = plan_run(request, places)
    plan, specs = planned.plan, planned.specs
    folder = new_run_folder(places.runs_folder)
    this_run = Run(request, places, planned.keys, folder, display, stop)
    facts: dict[str, object] = {
        "request": request,
        "command": ["python", "-m", "harness", *sys.argv[1:]],
        "machine": planned.machine,
        "toolchain": toolchain(planned.machine, plan.target, places.project_root),
        "commit": _commit(places.project_root),
        "target": plan.target,
        "target_reason": plan.target_reason,
        "steps": [step.name for step in plan.steps],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    before, baseline = pre_flight(folder, planned.machine, with_gpus=plan.target == "sm90")
    append_line(folder, flight_line("pre_flight", before))
    for warning in before.warnings:
        display.say(f"pre-flight: {warning}")
    write_run_file(folder, {**facts, "pre_flight": before})
    this_run.build_for(plan, build_seconds)
    for note in planned.notes:
        display.say(note)
    display.begin(plan)
    try:
        for step in plan.steps:
            this_run.run_step(step, specs)
    finally:
        display.end()
    after = post_flight(folder, baseline)
    append_line(folder, flight_line("post_flight", after))
    for note in after.notes:
        display.say(f"post-flight: {note}")
    code = exit_code(this_run.results, this_run.builds, after.leftovers)
    if stop.reason is not None:
        display.say(f"{STOPPED} ({stop.reason})")
        code = 1
    write_junit(folder, this_run.results)
    finished = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_run_file(
        folder, {**facts, "pre_flight": before, "post_flight": after, "finished": finished, "exit_code": code}
    )
    write_report(folder)
    show_summary(display, this_run.results, this_run.builds, after.leftovers, folder)
    return code
