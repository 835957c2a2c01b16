"""What runs of the harness found, in a few lines: python3 tests/device/phase_table.py NAME=RUNS_FOLDER ...

For each run a line a step (status, cases, seconds), for each step that did not pass its failed cases and first reasons,
and for the views that have bounds the worst error. Reads results.jsonl, which is there also after a run was cut short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOUNDED = ("l1_accum_debug", "l2_acts", "l2_acts_sf", "combine", "y")


def steps_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The steps of the last run in a folder of runs."""
    for results in sorted(folder.glob("*/results.jsonl"))[-1:]:
        for line in results.read_text(errors="replace").splitlines():
            entry = json.loads(line)
            if entry.get("kind") == "step":
                yield entry


def main(arguments: list[str]) -> int:
    """Exit code 1: a step did not pass, or a run has none."""
    bad, reasons = 0, []
    for argument in arguments:
        name, _, folder = argument.partition("=")
        steps = list(steps_of(Path(folder)))
        if not steps:
            bad += 1
            print(f"{name}: no results")
        for step in steps:
            passed = step["status"] == "passed"
            bad += not passed
            views = step.get("views", {})
            worst = "  ".join(f"{view} {float(views[view]['max_error']):.2g}" for view in BOUNDED if view in views)
            kind = f"{step['ranks']} {step['group']}"
            what = f"phase {step['phase']} {kind:10} {step['status']:9} {step.get('num_cases', 0):3} cases"
            print(f"{name:11} {what} {step['seconds']:5.1f} s  {worst}")
            if not passed:
                failed = ", ".join(step.get("failed_cases", []))
                reasons.append(f"{name} phase {step['phase']} {kind}: failed cases: {failed}")
                reasons += [f"    {reason[:240]}" for reason in step.get("reasons", [])[:6]]
    print("\n".join(reasons))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
