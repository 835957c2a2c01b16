"""CUDA source to cubin through nvcc, for machines without NVRTC and to compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from megamoe.jit.command import run_compiler
from megamoe.jit.sources import find_nvcc


def compile_to_cubin(source: Path, arguments: Sequence[str], scratch: Path) -> tuple[bytes, str]:
    """The cubin and nvcc's log, which has the lines of ptxas. Raises CompileError."""
    cubin = scratch / "nvcc.cubin"
    log = run_compiler([str(_nvcc()), "-cubin", *arguments, "-o", str(cubin), str(source)])
    return cubin.read_bytes(), log


@cache
def identity() -> tuple[str, ...]:
    """What tells this nvcc from another: its path and what --version prints (release and build)."""
    path = _nvcc().resolve()
    return str(path), run_compiler([str(path), "--version"])


def _nvcc() -> Path:
    path = find_nvcc()
    if path is None:
        raise FileNotFoundError(
            "nvcc was not found on PATH, nor under CUDA_HOME, CUDA_PATH or /usr/local/cuda: "
            "install a CUDA 13 toolkit, or set MEGAMOE_COMPILER=nvrtc"
        )
    return path
