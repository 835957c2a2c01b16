"""Builds everything of one target: ``python -m harness.build_target host``. Runs under a supervisor of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time

from harness.spec import TARGETS


def has_target(target: str) -> bool:
    """Whether this checkout has the target at all."""
    try:
        return importlib.util.find_spec(f"megamoe.targets.{target}") is not None
    except ModuleNotFoundError:  # of one of its parents
        return False


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in TARGETS:
        print(f"usage: python -m harness.build_target {'|'.join(TARGETS)}", file=sys.stderr)
        return 2
    target = arguments[0]
    if not has_target(target):
        print(f"target {target}: there is no module megamoe.targets.{target} on {sys.path}", file=sys.stderr)
        return 1
    start = time.monotonic()
    importlib.import_module(f"megamoe.targets.{target}").build_all()
    print(f"target {target}: built in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
