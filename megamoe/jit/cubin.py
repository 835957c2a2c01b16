"""Cubins for the GPU target, by NVRTC or nvcc, with what each kernel uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megamoe.jit import nvcc, nvrtc
from megamoe.jit.cache import Artifact, get_or_build
from megamoe.jit.resources import KernelResources, cubin_entry_names, parse_ptxas_report
from megamoe.jit.sources import cccl_include_dir, dependency_digests, toolkit_include_dir, write_generated

COMPILERS = ("nvrtc", "nvcc")


@dataclass(frozen=True)
class CubinArtifact(Artifact):
    """A cubin; `kernels` maps each kernel's name in it (mangled, unless extern "C") to what it uses."""

    kernels: Mapping[str, KernelResources]
    compiler: str


def compile_cubin(
    name: str,
    source: Path,
    *,
    generated: Mapping[str, str] = {},
    options: Sequence[str] = (),
    include_dirs: Sequence[Path] = (),
    arch: str = "sm_90a",
    compiler: str | None = None,
) -> CubinArtifact:
    """Compiles one .cu file to <name>.cubin, or finds it in the cache.

    generated: header name -> text; on the include path before `include_dirs`. libcu++, and a toolkit's headers where
    there is one, are added behind.
    options: as both compilers take them (-DNAME=1, -lineinfo, --maxrregcount=128, --ptxas-options=...).
    compiler: "nvrtc" or "nvcc"; None means MEGAMOE_COMPILER, or nvrtc.
    Raises CompileError with the command and the compiler's words; ValueError for an unknown compiler, or where its
    report on the kernels cannot be read; FileNotFoundError or ModuleNotFoundError where something must be installed.
    """
    chosen = compiler or os.environ.get("MEGAMOE_COMPILER") or "nvrtc"
    if chosen not in COMPILERS:
        origin = "compiler" if compiler else "MEGAMOE_COMPILER"
        raise ValueError(f"{origin} is {chosen!r}; expected one of {', '.join(COMPILERS)}")
    toolchain = [cccl_include_dir()]
    # nvcc brings the headers of its own toolkit; another's must not come before them.
    if chosen == "nvrtc" and (toolkit := toolkit_include_dir()):
        toolchain.append(toolkit)
    directories = [*include_dirs, *toolchain]
    flags = [f"-arch={arch}", "-std=c++20", "--ptxas-options=-v", *options]
    ingredients = {
        "kind": "cubin",
        "source": source.name,
        "texts": dependency_digests([source], generated, directories),
        "options": flags,
        "compiler": [chosen, *(nvrtc.identity() if chosen == "nvrtc" else nvcc.identity())],
    }
    file_name = f"{name}.cubin"

    def build(folder: Path, scratch: Path) -> str:
        searched = [source.resolve().parent, write_generated(generated, folder), *directories]
        arguments = [*flags, *(f"-I{directory}" for directory in searched)]
        if chosen == "nvrtc":
            cubin, log = nvrtc.compile_to_cubin(source, arguments)
        else:
            cubin, log = nvcc.compile_to_cubin(source, arguments, scratch)
        parse_ptxas_report(log, cubin_entry_names(cubin))  # what cannot be read back is not kept
        (folder / file_name).write_bytes(cubin)
        return log

    built = get_or_build(name, ingredients, file_name, build)
    kernels = parse_ptxas_report(built.log, cubin_entry_names(built.path.read_bytes()))
    return CubinArtifact(built.path, built.log, built.seconds, built.cached, kernels, chosen)
