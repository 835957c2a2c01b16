"""Run-time compilation: g++ for the host target, NVRTC or nvcc for sm_90a, into one cache that many processes share.

MEGAMOE_CACHE_DIR (default ~/.cache/megamoe), MEGAMOE_CACHE_MAX_BYTES (default 4 GiB), MEGAMOE_COMPILER (nvrtc or nvcc)
and CXX (default g++) are read at each call. Nothing is ever written into the installed package.
"""

from megamoe.jit.cache import Artifact, CompileError, cache_dir, cache_max_bytes
from megamoe.jit.cubin import CubinArtifact, compile_cubin
from megamoe.jit.gxx import build_shared_library
from megamoe.jit.resources import KernelResources
from megamoe.jit.sources import cccl_include_dir, csrc_dir, find_nvcc, toolkit_include_dir

__all__ = [
    "Artifact",
    "CompileError",
    "CubinArtifact",
    "KernelResources",
    "build_shared_library",
    "cache_dir",
    "cache_max_bytes",
    "cccl_include_dir",
    "compile_cubin",
    "csrc_dir",
    "find_nvcc",
    "toolkit_include_dir",
]
