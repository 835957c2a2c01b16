"""What a pass depends on, as one hash, and the passes of earlier runs that still hold.

A key is the SHA-256 of the sources that a step can reach, of its spec, target, ranks, group, cases and limit, and of
the toolchain and the machine. A pass of an earlier run holds for a step with the same key, unless a run with that key
failed: what passes only sometimes has not passed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.jsonlines import read_sound_lines
from harness.launch import base_environment
from harness.machine import Machine
from harness.plan import Plan, Request, Step
from harness.results import FAILING, RESULTS_FILE

_HARNESS = Path(__file__).resolve().parent
_PACKAGES = ("torch", "numpy", "safetensors", "PyYAML", "psutil", "nvidia-cuda-cccl")
_GPU_PACKAGES = ("nvidia-cuda-nvrtc", "cuda-bindings", "nvidia-nccl-cu13")
_STEERING = re.compile(r"(MEGAMOE|CUDA|NCCL|TORCH|GLOO|OMP|MKL|OPENBLAS)_.*|CXX|CPATH|PYTHONPATH")
"""Variables that a step's answer may depend on."""
_NOT_STEERING = re.compile(r"MEGAMOE_(CACHE_.*|CI|COMMIT|RUN_DIR|STEP_ID)")
_IGNORED_SUFFIXES = (".pyc", ".so", ".o")
COMMAND_SECONDS = 20


def _command_output(command: list[str]) -> str:
    """What a command says of itself; why it says nothing where it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout + done.stderr


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def toolchain(machine: Machine, target: str, project_root: Path) -> dict[str, Any]:
    """Versions of what compiles and runs a target's steps, and the variables that steer them, as steps get them."""
    packages = (*_PACKAGES, *_GPU_PACKAGES) if target == "sm90" else _PACKAGES
    compiler = shlex.split(os.environ.get("CXX", "g++")) or ["g++"]
    found: dict[str, Any] = {
        "host": machine.hostname,
        "cores": machine.num_cores,
        "python": machine.python_version,
        "packages": {name: _package_version(name) for name in packages},
        "c++": _command_output([*compiler, "--version"]),
        "environment": {
            name: value
            for name, value in sorted(base_environment(project_root).items())
            if _STEERING.fullmatch(name) and not _NOT_STEERING.fullmatch(name)
        },
    }
    if target == "sm90":
        driver = Path("/proc/driver/nvidia/version")
        found["gpus"] = [dataclasses.asdict(gpu) for gpu in machine.gpus]
        found["driver"] = driver.read_text() if driver.is_file() else "none"
        found["nvcc"] = _command_output(["nvcc", "--version"])
    return found


def _source_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in _IGNORED_SUFFIXES and "__pycache__" not in path.parts:
            yield path


def _phase_number(phases_root: Path, path: Path) -> int:
    """Of the phase folder that a file lies in; 0 for what phases share."""
    match = re.fullmatch(r"phase(\d+)", path.relative_to(phases_root).parts[0])
    return int(match.group(1)) if match else 0


class StepKeys:
    """Keys of the steps of one run."""

    def __init__(self, phases_root: Path, machine: Machine) -> None:
        self._phases_root = phases_root.resolve()
        self._machine = machine
        self._toolchains: dict[str, dict[str, Any]] = {}

    def sources(self, phase: int) -> str:
        """Hash of all that a phase's script can reach: the packages, csrc/, and the phases up to it."""
        digest = hashlib.sha256()
        project = self._phases_root.parent
        roots = [self._phases_root, project / "megamoe", project / "csrc", _HARNESS]
        for root in dict.fromkeys(root for root in roots if root.is_dir()):
            for path in _source_files(root):
                if root == self._phases_root and _phase_number(root, path) > phase:
                    continue
                name = f"{root.name}/{path.relative_to(root)}"
                digest.update(json.dumps([name, hashlib.sha256(path.read_bytes()).hexdigest()]).encode())
        return digest.hexdigest()

    def key(self, step: Step) -> str:
        """The key of a step, from the files as they are now."""
        if step.target not in self._toolchains:
            self._toolchains[step.target] = toolchain(self._machine, step.target, self._phases_root.parent)
        spec = step.spec
        parts = {
            "sources": self.sources(spec.number),
            "step": [step.name, spec.name, step.cases, step.seconds],
            "toolchain": self._toolchains[step.target],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class EarlierSteps:
    """The steps of all runs in one folder, by key. Steps that were kept there have none."""

    runs_folder: Path

    @cached_property
    def _by_key(self) -> Mapping[str, list[tuple[str, str]]]:
        """key -> (run, status), the newest run last."""
        found: dict[str, list[tuple[str, str]]] = {}
        for path in sorted(self.runs_folder.glob(f"*/{RESULTS_FILE}"), key=lambda path: run_order(path.parent.name)):
            for line in read_sound_lines(path):
                key = line.get("key")
                if line.get("kind") == "step" and isinstance(key, str) and key:
                    found.setdefault(key, []).append((path.parent.name, str(line.get("status"))))
        return found

    def verdict(self, key: str) -> tuple[str, str]:
        """(run whose pass holds, or "", and why a pass does not hold, or "")."""
        tried = self._by_key.get(key, [])
        passed = [run for run, status in tried if status == "passed"]
        failed = [f"{status} in run {run}" for run, status in tried if status in FAILING]
        if not passed:
            return "", ""
        if failed:
            return "", f"passed in run {passed[-1]}, but with the same sources and toolchain {failed[-1]}"
        return passed[-1], ""


def run_order(name: str) -> tuple[str, int]:
    """Sorts the folders ``<time>`` and ``<time>.<number>`` of runs by age."""
    stamp, _, number = name.partition(".")
    return stamp, int(number) if number.isdigit() else 1


def keep_passes(plan: Plan, request: Request, keys: StepKeys, earlier: EarlierSteps) -> tuple[Plan, tuple[str, ...]]:
    """The plan with ``kept_from`` set where an earlier pass holds, and in words where one does not.

    Gates are kept with ``--from``, ``--rerun`` and ``--keep``, what was asked for with ``--keep`` only, and nothing
    that is to be repeated.
    """
    if not (request.keep or request.from_phase is not None or request.rerun is not None):
        return plan, ()
    steps, notes = [], []
    for step in plan.steps:
        if not step.skip_reason and step.repeat == 1 and (request.keep or step.is_gate):
            run, why_not = earlier.verdict(keys.key(step))
            step = dataclasses.replace(step, kept_from=run)
            if why_not:
                notes.append(f"{step.name} is run again: {why_not}")
        steps.append(step)
    anew = [step.name for step in steps if step.is_gate and not step.skip_reason and not step.kept_from]
    if anew:
        notes.append(f"gates that run: {', '.join(anew)}; no earlier pass has the same sources, toolchain and machine")
    return dataclasses.replace(plan, steps=tuple(steps)), tuple(notes)
