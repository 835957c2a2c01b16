"""Runs the cases of a phase on the ranks of a step, prints what came of them, and writes the step's record."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from harness.spec import GROUPS, TARGETS, PhaseSpec, load_spec
from megamoe import MegaMoEFault, Stage
from phases.support.checks import CaseChecks, view_lines
from phases.support.coverage import Coverage
from phases.support.error_maps import WorstSeen
from phases.support.launches import Launcher
from phases.support.ranks import Ranks, open_ranks, under_torchrun
from phases.support.view_specs import ViewSpec, load_views


@dataclass
class Phase:
    """What a case works with."""

    spec: PhaseSpec
    views: Mapping[str, ViewSpec]
    ranks: Ranks
    launcher: Launcher
    coverage: Coverage = field(default_factory=Coverage)
    worst_seen: WorstSeen = field(default_factory=WorstSeen)

    @property
    def stage(self) -> Stage:
        return Stage[self.spec.stage.upper()]


@dataclass(frozen=True)
class Variant:
    """One entry of the record: a case, or one variant ``case[...]`` of it.

    ``body`` is None where it does not apply; ``why_not`` then says why.
    """

    name: str
    body: Callable[[Phase, CaseChecks], None] | None
    why_not: str = ""


CaseList = Mapping[str, Sequence[Variant]]


class Record:
    """JSON lines for the harness; nothing where no file was asked for, or not on the first process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.write_text("")

    def write(self, kind: str, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")


@dataclass
class _Tally:
    variants: int = 0
    failed: int = 0
    skipped: int = 0
    compared: int = 0


def _arguments(spec: PhaseSpec, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Phase {spec.number}, {spec.name}: {spec.holds}")
    parser.add_argument("--target", choices=TARGETS, default="host")
    parser.add_argument("--ranks", type=int, default=None, help="1 by default, under torchrun its world size")
    parser.add_argument("--group", choices=GROUPS, default=None, help="what --ranks and torchrun suggest by default")
    parser.add_argument("--cases", default="all", help="all, or names between commas: " + ", ".join(spec.cases))
    parser.add_argument("--record", type=Path, default=None, help="file that receives the record, as JSON lines")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    arguments = parser.parse_args(argv)
    if arguments.ranks is None:
        arguments.ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1
    if arguments.group is None:
        arguments.group = "process" if under_torchrun() else "single" if arguments.ranks == 1 else "virtual"
    return arguments


def _chosen(spec: PhaseSpec, text: str) -> tuple[str, ...]:
    if text == "all":
        return spec.cases
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in spec.cases]
    if unknown:
        raise ValueError(f"--cases: got {unknown}, expected some of {', '.join(spec.cases)}")
    return names


def main(script: str, make_cases: Callable[[Phase], CaseList]) -> NoReturn:
    """A script's whole life: `run_phase` of its folder, with all Python stacks on a crash and on SIGUSR1."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.exit(run_phase(Path(script).resolve().parent, make_cases))


def run_phase(folder: Path, make_cases: Callable[[Phase], CaseList], argv: Sequence[str] | None = None) -> int:
    """Run a phase's script.

    Args:
        folder: of the phase, with spec.yaml and views.yaml.
        make_cases: the variants of every case that spec.yaml names.
        argv: command line; None: the process's.

    Returns:
        The exit code: 0 passed, 1 failed, 2 bad call.
    """
    spec = load_spec(folder / "spec.yaml")
    arguments = _arguments(spec, argv)
    if arguments.list:
        print("\n".join(spec.cases))
        return 0
    try:
        chosen = _chosen(spec, arguments.cases)
        views = load_views(folder, arguments.target)
        ranks = open_ranks(arguments.group, arguments.target, arguments.ranks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    phase = Phase(spec, views, ranks, Launcher(ranks))
    record = Record(arguments.record if ranks.process == 0 else None)
    cases = make_cases(phase)
    if set(cases) != set(spec.cases):
        raise ValueError(f"{folder}/spec.yaml: cases: {sorted(set(spec.cases) ^ set(cases))} are not in both")
    ok = _run_cases(phase, {name: cases[name] for name in chosen}, record, whole=chosen == spec.cases)
    phase.launcher.close()
    record.write("end", ok=ok)
    ranks.close()
    return 0 if ok else 1


def _run_cases(phase: Phase, cases: CaseList, record: Record, *, whole: bool) -> bool:
    started = time.monotonic()
    tally = _Tally()
    aborted = False
    for variants in cases.values():
        for variant in variants:
            if aborted:
                tally.failed += 1
                _note(phase, record, variant.name, False, 0.0, "not run: the group was aborted by a fault")
            elif variant.body is None:
                tally.skipped += 1
                _note(phase, record, variant.name, True, 0.0, variant.why_not, skipped=variant.why_not)
            else:
                aborted = not _run_variant(phase, variant, record, tally)
    if whole and not aborted:
        _run_coverage(phase, record, tally)
    seconds = time.monotonic() - started
    record.write("figure", name="cases_seconds", value=round(seconds, 3), unit="s")
    if phase.ranks.process == 0:
        verdict = "FAILED" if tally.failed else "passed"
        counts = f"{tally.variants} cases, {tally.failed} failed, {tally.skipped} do not apply"
        print(
            f"phase {phase.spec.number} ({phase.spec.name}), target {phase.ranks.target}, {phase.ranks.num_ranks} "
            f"ranks {phase.ranks.kind}: {verdict}: {counts}, {tally.compared} elements compared, {seconds:.1f} s",
            flush=True,
        )
    return tally.failed == 0


def _run_variant(phase: Phase, variant: Variant, record: Record, tally: _Tally) -> bool:
    """False when the group can no longer be used."""
    assert variant.body is not None
    started = time.monotonic()
    checks = CaseChecks(variant.name, phase.worst_seen)
    phase.launcher.case = variant.name
    usable = True
    try:
        variant.body(phase, checks)
    except MegaMoEFault as fault:
        # Every rank of an aborted group gets its fault at the same launch, so all meet in the gathering below.
        usable = not fault.aborted_epoch
        checks.failures.append(f"process {phase.ranks.process}: {fault}")
    except Exception as error:
        traceback.print_exc()
        if not phase.ranks.all_here:
            raise  # the others are somewhere in this case: torchrun ends them
        checks.failures.append(f"{type(error).__name__}: {error}")
    parts = phase.ranks.gather({**checks.transferable(), "usable": usable})
    lines = view_lines(variant.name, [check for part in parts for check in part["views"]])
    failures = [failure for part in parts for failure in part["failures"]]
    failures += [
        f"{line['view']} against {line['against']}: {line['compared']} elements compared, expected "
        + ("none" if line.get("expect_empty") else "some")
        for line in lines
        if (line["compared"] == 0) != bool(line.get("expect_empty"))
    ]
    if not lines and not any(part["num_required"] for part in parts):
        failures.append("the case compared and required nothing")
    for line in lines:
        record.write(line.pop("kind"), **line)
    for part in parts:
        for dump in part["dumps"]:
            record.write("dump", path=dump)
    tally.variants += 1
    tally.failed += bool(failures)
    tally.compared += sum(line["compared"] for line in lines)
    detail = f"{sum(line['compared'] for line in lines)} elements of {len({line['view'] for line in lines})} views"
    message = "; ".join(failures[:3]) + (f"; and {len(failures) - 3} more" if len(failures) > 3 else "")
    _note(phase, record, variant.name, not failures, time.monotonic() - started, message or detail)
    for failure in failures if phase.ranks.process == 0 else []:
        print(f"    {failure}", flush=True)
    return all(part["usable"] for part in parts)


def _note(
    phase: Phase, record: Record, name: str, ok: bool, seconds: float, message: str, *, skipped: str = ""
) -> None:
    record.write(
        "case",
        case=name,
        ok=ok,
        seconds=round(seconds, 3),
        message=message,
        **({"skipped": skipped} if skipped else {}),
    )
    if phase.ranks.process == 0:
        word = "does not apply" if skipped else "ok" if ok else "FAILED"
        print(f"{word:>6}  {name}  {seconds:.2f} s  {message if ok else ''}".rstrip(), flush=True)


def _run_coverage(phase: Phase, record: Record, tally: _Tally) -> None:
    """Insist that the cases together compared several experts, blocks and tiles."""
    merged = Coverage().merge(phase.ranks.gather(phase.coverage))
    for name, value in merged.figures().items():
        record.write("figure", name=name, value=value, unit="")
    if phase.stage is Stage.INTERFACE:
        return
    lacks = merged.lacks(phase.stage, phase.ranks.target)
    tally.variants += 1
    tally.failed += bool(lacks)
    _note(phase, record, "coverage", not lacks, 0.0, "; ".join(f"lacks {what}" for what in lacks))
    if lacks and phase.ranks.process == 0:
        print("    lacks " + "; lacks ".join(lacks), flush=True)
