"""CUDA source to cubin inside this process, through NVRTC: needs its library and no toolkit."""

from __future__ import annotations

import ctypes
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megamoe.jit.cache import CompileError

_INSTALL = "pip install 'nvidia-cuda-nvrtc==13.0.*' 'cuda-bindings==13.0.*', or set MEGAMOE_COMPILER=nvcc"


def compile_to_cubin(source: Path, arguments: Sequence[str]) -> tuple[bytes, str]:
    """The cubin and NVRTC's log, which has the lines of ptxas. Raises CompileError."""
    nvrtc = _bindings()
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(source.read_bytes(), str(source).encode(), 0, [], []))
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(arguments), [argument.encode() for argument in arguments])[0]
        size = _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        buffer = bytearray(size)
        _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.rstrip(b"\0").decode(errors="replace")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(shlex.join(["nvrtc", *arguments, str(source)]), f"{result.name}\n{log}")
        cubin = bytearray(_check(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        _check(nvrtc, nvrtc.nvrtcDestroyProgram(program))
    return bytes(cubin), log


@cache
def identity() -> tuple[str, ...]:
    """What tells this NVRTC from another: its path, its version, and the library's size and time."""
    nvrtc = _bindings()
    major, minor = _check(nvrtc, nvrtc.nvrtcVersion())
    path = _library()
    status = path.stat()
    return str(path), f"{major}.{minor}", str(status.st_size), str(status.st_mtime_ns)


@cache
def _library() -> Path:
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        library = Path(load_nvidia_dynamic_lib("nvrtc").abs_path).resolve()
    except DynamicLibNotFoundError as error:
        raise FileNotFoundError(f"the NVRTC library was not found: {_INSTALL}") from error
    # At every compilation NVRTC opens its builtins by their bare name. That failed now and then, although they lie
    # beside it (twice in some thousand compilations, always with several threads); a library that is loaded is found.
    for builtins in library.parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins))
    return library


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ModuleNotFoundError(f"cuda.bindings does not import ({error}): {_INSTALL}") from error
    _library()  # the bindings load it at their first call, with a message that does not say what to install
    return nvrtc


def _check(nvrtc: Any, returned: tuple[Any, ...]) -> Any:
    result, *values = returned
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {result.name}")
    return values[0] if len(values) == 1 else tuple(values)
