"""``phases/phaseN/spec.yaml``: what a phase shows, what it rests on, and where it runs.

Fields: name, stage, holds (one sentence), requires (numbers of earlier phases), script, targets
(``{host: {ranks: {1: [single], 2: [process, virtual]}}}``), cases (names), seconds (limit of a step), views (names that
must be compared).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

STAGES = ("interface", "dispatch", "l1_gemm", "l1_epilogue", "l2_gemm", "combine")
TARGETS = ("host", "sm90")
GROUPS = ("single", "process", "virtual", "spread")
"""One rank; one process a rank; ranks of one process on the CPU or on one GPU; the same over all GPUs there are."""
MAX_SECONDS = 60.0
DEVICE_WAIT_S = 5.0
"""How long a wait on the device may take in a step: less than the process group's limit, and that than the step's."""
_FIELDS = ("name", "stage", "holds", "requires", "script", "targets", "cases", "seconds", "views")


class SpecError(ValueError):
    """A spec.yaml that cannot be used: names the file, the field, what came and what was expected."""


@dataclass(frozen=True)
class PhaseSpec:
    """One phase as its spec.yaml has it. ``targets``: target -> number of ranks -> group kinds."""

    number: int
    name: str
    stage: str
    holds: str
    requires: tuple[int, ...]
    script: Path
    targets: Mapping[str, Mapping[int, tuple[str, ...]]]
    cases: tuple[str, ...]
    seconds: float
    views: tuple[str, ...]


class _Reader:
    """Takes typed fields from one file's mapping."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def fail(self, field: str, expected: str, came: object) -> SpecError:
        return SpecError(f"{self.path}: {field}: expected {expected}, got {came!r}")

    def text(self, field: str, allowed: tuple[str, ...] = ()) -> str:
        value = self.values[field]
        if not isinstance(value, str) or not value.strip() or (allowed and value not in allowed):
            raise self.fail(field, f"one of {', '.join(allowed)}" if allowed else "a text", value)
        return value

    def names(self, field: str) -> tuple[str, ...]:
        value = self.values[field]
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self.fail(field, "a list of names", value)
        if len(set(value)) != len(value):
            raise self.fail(field, "each name once", value)
        return tuple(value)

    def requires(self, number: int) -> tuple[int, ...]:
        value = self.values["requires"]
        if not isinstance(value, list) or not all(type(n) is int and 1 <= n < number for n in value):
            raise self.fail("requires", f"a list of phase numbers below {number}", value)
        return tuple(sorted(set(value)))

    def seconds(self) -> float:
        value = self.values["seconds"]
        if type(value) not in (int, float) or not 0 < value <= MAX_SECONDS:
            raise self.fail("seconds", f"a number above 0 and up to {MAX_SECONDS:g}", value)
        return float(value)

    def script(self) -> Path:
        script = self.path.parent / self.text("script")
        if not script.is_file():
            raise self.fail("script", f"a file in {self.path.parent}", self.values["script"])
        return script

    def targets(self) -> Mapping[str, Mapping[int, tuple[str, ...]]]:
        value = self.values["targets"]
        if not isinstance(value, dict) or not value or not set(value) <= set(TARGETS):
            raise self.fail("targets", f"a mapping with keys of {', '.join(TARGETS)}", value)
        return MappingProxyType({target: self._ranks(f"targets.{target}", entry) for target, entry in value.items()})

    def _ranks(self, field: str, entry: object) -> Mapping[int, tuple[str, ...]]:
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if not isinstance(ranks, dict) or not ranks:
            raise self.fail(field, "{ranks: {<number>: [<group kind>, …]}}", entry)
        return MappingProxyType({n: self._groups(f"{field}.ranks", n, ranks[n]) for n in sorted(ranks, key=str)})

    def _groups(self, field: str, num_ranks: object, groups: object) -> tuple[str, ...]:
        if type(num_ranks) is not int or num_ranks < 1:
            raise self.fail(field, "a number of ranks from 1", num_ranks)
        if not isinstance(groups, list) or not groups or not all(group in GROUPS for group in groups):
            raise self.fail(f"{field}.{num_ranks}", f"a list of {', '.join(GROUPS)}", groups)
        if ("single" in groups) and num_ranks != 1:
            raise self.fail(f"{field}.{num_ranks}", "group kind single with 1 rank only", groups)
        return tuple(dict.fromkeys(groups))


def load_spec(path: Path) -> PhaseSpec:
    """Read and check one spec.yaml; its folder is named ``phase<number>``. Raises SpecError."""
    match = re.fullmatch(r"phase(\d+)", path.parent.name)
    if match is None:
        raise SpecError(f"{path}: its folder must be named phase<number>, got {path.parent.name!r}")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise SpecError(f"{path}: not YAML: {error}") from error
    if not isinstance(values, dict):
        raise SpecError(f"{path}: expected a mapping with the fields {', '.join(_FIELDS)}, got {values!r}")
    missing = [field for field in _FIELDS if field not in values]
    unknown = [field for field in values if field not in _FIELDS]
    if missing or unknown:
        raise SpecError(f"{path}: missing fields: {missing or 'none'}; unknown fields: {unknown or 'none'}")
    reader = _Reader(path, values)
    number = int(match.group(1))
    cases = reader.names("cases")
    if not cases or "all" in cases:
        raise reader.fail("cases", "at least one name, and none called 'all'", list(cases))
    return PhaseSpec(
        number=number,
        name=reader.text("name"),
        stage=reader.text("stage", STAGES),
        holds=reader.text("holds"),
        requires=reader.requires(number),
        script=reader.script(),
        targets=reader.targets(),
        cases=cases,
        seconds=reader.seconds(),
        views=reader.names("views"),
    )


def load_specs(phases_root: Path) -> dict[int, PhaseSpec]:
    """All phases below ``phases_root`` by number. Raises SpecError, also for a gate that does not exist."""
    specs = {}
    for path in sorted(phases_root.glob("phase*/spec.yaml")):
        spec = load_spec(path)
        if spec.number in specs:
            raise SpecError(f"{path}: phase {spec.number} is there twice")
        specs[spec.number] = spec
    if not specs:
        raise SpecError(f"{phases_root}: no phase<number>/spec.yaml below it")
    for spec in specs.values():
        absent = [number for number in spec.requires if number not in specs]
        if absent:
            raise SpecError(f"{phases_root}/phase{spec.number}/spec.yaml: requires: no such phase: {absent}")
    return dict(sorted(specs.items()))
