"""Shared libraries and programs of the host target, compiled by g++ (or what CXX names)."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from megamoe.jit.cache import Artifact, get_or_build
from megamoe.jit.command import run_compiler
from megamoe.jit.sources import dependency_digests, is_toolchain_dir, write_generated

# -ffp-contract=off: a fused multiply-add would make answers depend on the machine. -march=native is the caller's to
# add, where sums have a fixed order; the key then holds what it means on this CPU, since machines may share a cache.
BASE_OPTIONS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-pthread")
# These change what g++ reads or links without showing in its command.
_ENVIRONMENT = ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH")


def build_shared_library(
    name: str,
    sources: Sequence[Path],
    *,
    generated: Mapping[str, str] = {},
    options: Sequence[str] = (),
    include_dirs: Sequence[Path] = (),
    executable: bool = False,
) -> Artifact:
    """Compiles `sources` with g++ into <name>.so, or into the program <name>, or finds it in the cache.

    generated: header name -> text; on the include path before `include_dirs`.
    options: after BASE_OPTIONS, so they win; given to both compiling and linking (-fsanitize=thread, -DNAME=1).
    Raises CompileError with the command and g++'s words, FileNotFoundError where there is no compiler.
    """
    if not sources:
        raise ValueError(f"{name}: no sources were given")
    compiler = _compiler()
    ingredients = {
        "kind": "g++",
        "program": executable,
        "sources": [source.name for source in sources],
        "texts": dependency_digests(sources, generated, include_dirs),
        "options": [*BASE_OPTIONS, *options],
        "compiler": [*compiler, _version(compiler)],
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "cpu": _native_flags(compiler) if any("=native" in option for option in options) else "",
    }
    file_name = name if executable else f"{name}.so"

    def build(folder: Path, scratch: Path) -> str:
        includes = [f"-I{write_generated(generated, folder)}"]
        for directory in include_dirs:
            includes += ["-isystem", str(directory)] if is_toolchain_dir(directory) else [f"-I{directory}"]
        flags = [*BASE_OPTIONS, *options]

        def compile_one(numbered: tuple[int, Path]) -> str:
            number, source = numbered
            return run_compiler([*compiler, *flags, *includes, "-c", str(source), "-o", str(scratch / f"{number}.o")])

        with ThreadPoolExecutor(max_workers=min(len(sources), os.cpu_count() or 1)) as pool:
            logs = list(pool.map(compile_one, enumerate(sources)))
        objects = [str(scratch / f"{number}.o") for number in range(len(sources))]
        kind = [] if executable else ["-shared"]
        logs.append(run_compiler([*compiler, *flags, *kind, *objects, "-o", str(folder / file_name)]))
        return "".join(logs)

    return get_or_build(name, ingredients, file_name, build)


def _compiler() -> tuple[str, ...]:
    """CXX (which may hold arguments), or g++, with the program's full path."""
    words = shlex.split(os.environ.get("CXX", "g++"))
    path = shutil.which(words[0]) if words else None
    if path is None:
        raise FileNotFoundError(
            f"no C++ compiler: CXX is {os.environ.get('CXX')!r} and must be on PATH"
            if "CXX" in os.environ
            else "no g++ on PATH; install g++ 11 or newer (Debian: apt-get install g++), or name a compiler with CXX"
        )
    return (path, *words[1:])


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return run_compiler([*compiler, "--version"]) + run_compiler([*compiler, "-dumpmachine"])


@cache
def _native_flags(compiler: tuple[str, ...]) -> str:
    """What -march=native means on this CPU."""
    return run_compiler([*compiler, "-march=native", "-mtune=native", "-Q", "--help=target"])
