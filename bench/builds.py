"""Kernels of all variants, compiled at once and before any GPU waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from bench.fused import OPTIONS_VARIABLE

_PROGRAM = """
import sys
from megamoe.targets import sm90
for accumulate in sys.argv[2:]:
    artifact = sm90.build_fused(int(sys.argv[1]), 128, False, accumulate == "fast")
    print("; ".join(sm90.resource_faults(artifact)))
"""


def build_variants(variants: Sequence[str | None], ranks_here: int, accumulations: Sequence[str]) -> list[str]:
    """Compile the production kernel of every variant, one process each, into the cache.

    Args:
        variants: build options; None: those of the environment.
        ranks_here: ranks that share a GPU.
        accumulations: of the contenders.

    Returns:
        A line for each variant that the kernel's rules forbid (spills and the like); it is benchmarked all the same.

    Raises:
        RuntimeError: one does not compile; with the compiler's words.
    """
    running = []
    for variant in variants:
        environment = dict(os.environ)
        if variant is not None:
            environment[OPTIONS_VARIABLE] = variant
        command = [sys.executable, "-c", _PROGRAM, str(ranks_here), *accumulations]
        running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    lines, broken = [], []
    for variant, process in zip(variants, running, strict=True):
        output, errors = process.communicate()
        if process.returncode:
            broken.append(f"{variant or 'default'}: {errors.strip()[-2000:]}")
        elif output.strip():
            lines.append(f"{variant or 'default'}: {output.strip()}")
    if broken:
        raise RuntimeError("does not compile: " + "\n".join(broken))
    return lines


def timed_build(variants: Sequence[str | None], ranks_here: int, accumulations: Sequence[str]) -> str:
    """``build_variants`` and one sentence about it."""
    began = time.monotonic()
    lines = build_variants(variants, ranks_here, accumulations)
    return "\n".join([f"{len(variants)} builds in {time.monotonic() - began:.1f} s", *lines])
