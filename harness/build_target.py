"""Builds what groups of up to so many ranks need of one target: ``python -m harness.build_target sm90 8``; all of it
without a number. Runs under a supervisor of its own."""

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
    target, *numbers = arguments or [""]
    if target not in TARGETS or len(numbers) > 1 or not all(number.isdecimal() for number in numbers):
        print(f"usage: python -m harness.build_target {'|'.join(TARGETS)} [MAX_RANKS]", file=sys.stderr)
        return 2
    if not has_target(target):
        print(f"target {target}: there is no module megamoe.targets.{target} on {sys.path}", file=sys.stderr)
        return 1
    start = time.monotonic()
    max_ranks = int(numbers[0]) if numbers else sys.maxsize
    importlib.import_module(f"megamoe.targets.{target}").build_all(max_ranks=max_ranks)
    print(f"target {target}: built in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
