"""From what was asked for to a list of steps: which phases, gates first, and what is skipped for which reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.machine import Machine
from harness.spec import GROUPS, TARGETS, PhaseSpec


class BadRequest(ValueError):
    """What was asked for does not exist: the call is wrong, nothing was run."""


@dataclass(frozen=True)
class Rerun:
    """A step of an earlier run to run again: with which cases (None: all), and how often."""

    cases: tuple[str, ...] | None
    repeat: int


@dataclass(frozen=True)
class Request:
    """What was asked for. None means: all that the specs list."""

    phases: tuple[int, ...] | None = None
    target: str = "best"
    ranks: tuple[int, ...] | None = None
    groups: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    repeat: int = 1
    with_gates: bool = True
    seconds: float | None = None
    from_phase: int | None = None
    rerun: str | None = None
    keep: bool = False
    only: Mapping[str, Rerun] | None = None
    """By step name, for ``rerun``."""


@dataclass(frozen=True)
class Step:
    """One launch: a phase's script on a target with a number of ranks. ``cases`` None means all. ``kept_from``: the
    run whose pass is taken over, so that it is not run."""

    spec: PhaseSpec
    target: str
    num_ranks: int
    group: str
    cases: tuple[str, ...] | None
    seconds: float
    repeat: int
    is_gate: bool
    skip_reason: str = ""
    kept_from: str = ""

    @property
    def name(self) -> str:
        return f"phase{self.spec.number}-{self.target}-{self.num_ranks}-{self.group}"


@dataclass(frozen=True)
class Plan:
    """Steps in the order they run: gates before what rests on them."""

    target: str
    target_reason: str
    steps: tuple[Step, ...]

    @property
    def phases(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(step.spec.number for step in self.steps))


def with_requirements(numbers: tuple[int, ...], specs: Mapping[int, PhaseSpec]) -> tuple[int, ...]:
    """``numbers`` and everything they rest on, in order."""
    found: set[int] = set()
    waiting = list(numbers)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting.extend(specs[number].requires)
    return tuple(sorted(found))


def choose_target(wanted: str, specs: list[PhaseSpec], machine: Machine) -> tuple[str, str]:
    """The target to run on and why. ``best``: sm90 where torch sees a Hopper GPU and a phase lists it, else host."""
    if wanted in TARGETS:
        return wanted, "asked for"
    if wanted != "best":
        raise BadRequest(f"--target: expected best, {' or '.join(TARGETS)}, got {wanted!r}")
    if machine.num_hopper_gpus == 0:
        return "host", machine.problem or "torch sees no Hopper GPU"
    if not any("sm90" in spec.targets for spec in specs):
        return "host", "a Hopper GPU is here, but no phase lists target sm90"
    return "sm90", f"torch sees {machine.num_hopper_gpus} Hopper GPUs"


def check_limit(seconds: float, option: str) -> None:
    """Raises BadRequest for a limit that never comes or has passed before the start."""
    if not 0 < seconds < math.inf:
        raise BadRequest(f"{option}: expected a number above 0, got {seconds}")


def _check(request: Request, specs: Mapping[int, PhaseSpec], asked: tuple[int, ...]) -> None:
    absent = [number for number in asked if number not in specs]
    if absent:
        raise BadRequest(f"--phases: no phase {absent}; there are {list(specs)}")
    unknown = [group for group in request.groups or () if group not in GROUPS]
    if unknown:
        raise BadRequest(f"--groups: expected some of {', '.join(GROUPS)}, got {unknown}")
    if request.repeat < 1:
        raise BadRequest(f"--repeat: expected at least 1, got {request.repeat}")
    if request.seconds is not None:
        check_limit(request.seconds, "--seconds")
    if request.only is not None:
        return  # the rest was checked in the run that is taken up again
    offered = {n for number in asked for ranks in specs[number].targets.values() for n in ranks}
    strange = [n for n in request.ranks or () if n not in offered]
    if strange:
        raise BadRequest(f"--ranks: no asked-for phase runs with {strange} ranks; there are {sorted(offered)}")
    known = {case for number in asked for case in specs[number].cases}
    strange_cases = [case for case in request.cases or () if case not in known]
    if strange_cases:
        raise BadRequest(f"--cases: no asked-for phase has {strange_cases}; there are {sorted(known)}")


def _skip_reason(target: str, num_ranks: int, group: str, machine: Machine) -> str:
    if target != "sm90":
        return ""
    if machine.num_hopper_gpus == 0:
        return machine.problem or "torch sees no Hopper GPU"
    if group == "process" and num_ranks > machine.num_hopper_gpus:
        return f"{num_ranks} ranks as processes need {num_ranks} Hopper GPUs, here: {machine.num_hopper_gpus}"
    if group == "spread" and machine.num_hopper_gpus < 2:
        return f"ranks spread over GPUs need 2 Hopper GPUs, here: {machine.num_hopper_gpus}"
    return ""


def _steps_of_phase(spec: PhaseSpec, request: Request, target: str, machine: Machine, is_gate: bool) -> list[Step]:
    cases = None
    if request.cases is not None and not is_gate:
        cases = tuple(case for case in request.cases if case in spec.cases)

    def step(num_ranks: int, group: str, reason: str) -> Step:
        seconds = spec.seconds if request.seconds is None else request.seconds
        return Step(
            spec=spec,
            target=target,
            num_ranks=num_ranks,
            group=group,
            cases=cases,
            seconds=seconds,
            repeat=1 if is_gate else request.repeat,
            is_gate=is_gate,
            skip_reason=reason,
        )

    offered = spec.targets.get(target, {})
    # The first rank count and group stand for all when the target is not there: one line says it.
    if not offered:
        return [step(1, "single", f"phase {spec.number} does not list target {target}")]
    steps = []
    for num_ranks in request.ranks or tuple(offered):
        if num_ranks not in offered:
            reason = f"phase {spec.number} does not list {num_ranks} ranks on target {target}"
            steps.append(step(num_ranks, "virtual", reason))
        for group in offered.get(num_ranks, ()):
            # One rank alone has no group to choose.
            if request.groups is not None and group != "single" and group not in request.groups:
                continue
            reason = _skip_reason(target, num_ranks, group, machine)
            if cases == ():
                reason = f"phase {spec.number} has none of the cases {', '.join(request.cases or ())}"
            steps.append(step(num_ranks, group, reason))
    return steps


def _asked_phases(request: Request, specs: Mapping[int, PhaseSpec]) -> tuple[int, ...]:
    asked = tuple(sorted(set(request.phases))) if request.phases is not None else tuple(specs)
    if request.from_phase is not None:
        first = request.from_phase
        if not any(number >= first for number in asked):
            raise BadRequest(f"--from: no asked-for phase from {first} on; there are {list(asked)}")
        asked = tuple(number for number in asked if number >= first)
    if request.only is not None:
        named = [number for number in asked if any(name.startswith(f"phase{number}-") for name in request.only)]
        if not named:
            raise BadRequest(f"--rerun: nothing is left to run again of phases {list(asked)}")
        asked = tuple(named)
    return asked


def _only_undone(
    steps: list[Step], only: Mapping[str, Rerun], request: Request, specs: Mapping[int, PhaseSpec]
) -> list[Step]:
    """The steps of ``only``; the others of their phases stay as gates where something asked for rests on them."""
    rests_on = {
        gate
        for step in steps
        if step.name in only
        for gate in set(with_requirements((step.spec.number,), specs)) - {step.spec.number}
    }
    chosen = []
    for step in steps:
        if step.name in only:
            again = only[step.name]
            cases = again.cases if request.cases is None else step.cases
            chosen.append(replace(step, is_gate=False, cases=cases, repeat=max(request.repeat, again.repeat)))
        elif step.spec.number in rests_on and request.with_gates:
            chosen.append(replace(step, is_gate=True, cases=None, repeat=1))
    return chosen


def _gates_without_cases(asked: tuple[int, ...], request: Request, specs: Mapping[int, PhaseSpec]) -> set[int]:
    """Asked-for phases that have none of the asked-for cases, and on which one rests that has: they are run whole, as
    gates, or the other would run without them."""
    if request.cases is None or not request.with_gates:
        return set()
    with_cases = tuple(number for number in asked if set(request.cases) & set(specs[number].cases))
    return set(with_requirements(with_cases, specs)) & set(asked) - set(with_cases)


def make_plan(request: Request, specs: Mapping[int, PhaseSpec], machine: Machine) -> Plan:
    """Check the request and lay out its steps. Raises BadRequest, naming the option, for what does not exist."""
    asked = _asked_phases(request, specs)
    _check(request, specs, asked)
    phases = with_requirements(asked, specs) if request.with_gates else asked
    target, reason = choose_target(request.target, [specs[number] for number in asked], machine)
    gates = set(phases) - set(asked) | _gates_without_cases(asked, request, specs)
    steps = [
        step
        for number in phases
        for step in _steps_of_phase(specs[number], request, target, machine, is_gate=number in gates)
    ]
    if request.only is not None:
        steps = _only_undone(steps, request.only, request, specs)
        if not any(not step.is_gate for step in steps):
            raise BadRequest("--rerun: with these options nothing is left to run again")
    if not any(not step.is_gate for step in steps):
        raise BadRequest(f"--groups: no asked-for phase runs with {', '.join(request.groups or ())} at these ranks")
    return Plan(target, reason, tuple(steps))
