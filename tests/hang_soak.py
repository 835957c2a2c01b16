"""Hangs a step on purpose, many times, and looks for what is left: ``python -m tests.hang_soak --runs 50 --seconds 6``.

Runs take turns between two kinds of 8-rank steps: ``virtual``, where ranks of one process wait in a real launch, and
``process``, where torchrun's ranks ignore SIGTERM, hold shared memory and each have a daemon. (Eight processes that
import torch take longer than 6 s on two cores: ``--kind launch`` has eight of those hang in a launch, with 60 s.)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness import processes
from harness.hang import HANG_FOLDER, SUMMARY_TEXT
from harness.holdings import shared_memory_of, shm_snapshot
from tests.hang_project import NUM_RANKS, HangProject
from tests.harness_project import HarnessCall, processes_in

LIMIT_S = 6.0
EMPTY_S = 10.0

KINDS: Mapping[str, Callable[[HangProject], None]] = {
    "virtual": HangProject.virtual,
    "process": HangProject.stubborn_processes,
}
LAUNCH = "launch"


def _mappings(mark: str) -> list[str]:
    """Shared memory with a mark in its name that any process of this machine has open or mapped."""
    found = []
    for process in processes.all_processes().values():
        names = {name for _, name in shared_memory_of(process.pid)}
        found += [f"{processes.describe(process)} holds {name}" for name in names if mark in name]
    return found


def _complaints(call: HarnessCall, limit_s: float) -> list[str]:
    """What is wrong with how the step ended and was explained."""
    (step,) = call.steps()
    wrong = [f"the step is {step['status']}: {step['reasons']}"] if step["status"] != "timed out" else []
    outcome = step["outcome"]
    if outcome["seconds"] > limit_s + 1:
        wrong.append(f"ended {outcome['seconds']:.1f} s after its start")
    if outcome["seconds_to_empty"] > EMPTY_S:
        wrong.append(f"empty only {outcome['seconds_to_empty']:.1f} s after the limit")
    wrong += [f"outcome: {field}: {outcome[field]}" for field in ("survivors", "held_memfds") if outcome[field]]
    bundle = Path(step["folder"]) / HANG_FOLDER
    texts = {path.name: path.read_text() for path in bundle.glob("*.txt")}
    summary = texts.get(SUMMARY_TEXT, "")
    if "explained because: still running" not in summary:
        wrong.append(f"not explained: {summary!r}")
    # On a machine that is busy with something else the ranks may still have been starting then.
    elif "launched" in texts.get("rank0.txt", "").splitlines() and "wait in epoch 2 for rank" not in summary:
        wrong.append(f"explained wrongly: {summary!r}")
    return wrong


def hang_once(kind: str, folder: Path, limit_s: float) -> list[str]:
    """Run a step that hangs.

    Args:
        kind: of KINDS, or LAUNCH.
        folder: empty; receives the project and its run.
        limit_s: of the step.

    Returns:
        What was left (processes, mappings, files), and what else is wrong, in words; [] when all is as it should be.
    """
    project = HangProject(folder)
    if kind == LAUNCH:
        project.processes(NUM_RANKS)
    else:
        KINDS[kind](project)
    shm = shm_snapshot()
    with project.start("run", "--target", "host", "--seconds", f"{limit_s:g}") as harness:
        output, _ = harness.communicate(timeout=limit_s + 100)
    left = _complaints(HarnessCall(harness.returncode, output, tuple(project.runs_folder.iterdir())), limit_s)
    left += [f"process left: {text}" for text in processes_in(folder)]
    left += [f"mapping left: {text}" for text in _mappings(f"megamoe-hang-{folder.name}")]
    left += [f"file left: {name}" for key, name in shm_snapshot().items() if key not in shm and folder.name in name]
    left += [f"folder left: {path}" for path in Path(tempfile.gettempdir()).glob(f"megamoe-{harness.pid}.*")]
    return left


def _verdict(folder: Path) -> str:
    """What the bundle of the only step below ``folder`` says."""
    found = [path.read_text() for path in folder.glob(f"runs/*/*/{HANG_FOLDER}/{SUMMARY_TEXT}")]
    lines = [line for text in found for line in text.splitlines() if line.startswith("verdict: ")]
    return lines[0].removeprefix("verdict: ") if lines else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=LIMIT_S)
    parser.add_argument("--kind", choices=[*KINDS, LAUNCH], help="one kind instead of both in turn")
    arguments = parser.parse_args()
    kinds = [arguments.kind] if arguments.kind else list(KINDS)
    num_bad = 0
    started = time.monotonic()
    for number in range(arguments.runs):
        kind = kinds[number % len(kinds)]
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hang-soak-") as folder:
            left = hang_once(kind, Path(folder), arguments.seconds)
            verdict = _verdict(Path(folder))
        num_bad += bool(left)
        found = "; ".join(left) or "nothing left"
        took = time.monotonic() - begun
        print(f"run {number + 1} of {arguments.runs}, {kind}: {took:.1f} s: {found}; verdict: {verdict}", flush=True)
    seconds = time.monotonic() - started
    what = f"{arguments.runs} runs of {NUM_RANKS} ranks, limit {arguments.seconds:g} s"
    print(f"{what}: {num_bad} left something, {seconds:.0f} s")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
