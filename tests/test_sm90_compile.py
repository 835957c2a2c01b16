"""The GPU half compiles here, without a GPU, and within its means: no spill, no stack frame, no remark of ptxas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.jit import CompileError, CubinArtifact, compile_cubin, csrc_dir, find_nvcc
from megamoe.targets import sm90

COMPILERS = [
    "nvrtc",
    pytest.param("nvcc", marks=pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine")),
]
MAX_REGISTERS = 128


def compile_proof(generated: dict[str, str]) -> CubinArtifact:
    folder = csrc_dir()
    return compile_cubin(
        "protocol_proof",
        folder / "sm90" / "protocol_proof.cu",
        generated=generated,
        include_dirs=(folder / "sm90", folder / "protocol"),
        compiler="nvrtc",
    )


@pytest.mark.parametrize("compiler", COMPILERS)
def test_protocol_kernel_compiles_within_its_means(compiler: str) -> None:
    artifact = sm90.build("protocol_proof", compiler=compiler)
    assert set(artifact.kernels) == {sm90.PROOF_KERNEL, sm90.IDENTITY_KERNEL}
    assert sm90.resource_faults(artifact) == []
    assert artifact.kernels[sm90.PROOF_KERNEL].registers <= MAX_REGISTERS


def test_spills_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "crowded.cu"
    source.write_text(
        'extern "C" __global__ void crowded(float* out) {\n'
        "  float values[64];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) values[i] = out[i * 32];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) out[i * 32 + 1] = values[i] * values[63 - i];\n"
        "}\n"
    )
    artifact = compile_cubin("crowded", source, options=("--maxrregcount=24",), compiler="nvrtc")
    faults = sm90.resource_faults(artifact)
    assert any("crowded spills" in fault for fault in faults), faults


def test_a_stack_frame_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "indexed.cu"
    source.write_text(
        'extern "C" __global__ void indexed(unsigned* out, unsigned n) {\n'
        "  unsigned values[16];\n"
        "  for (unsigned i = 0; i < 16; ++i) values[i] = out[i] * i;\n"
        "  for (unsigned i = 0; i < n; ++i) values[values[i & 15] & 15] += i;\n"
        "  out[threadIdx.x] = values[n & 15];\n"
        "}\n"
    )
    faults = sm90.resource_faults(compile_cubin("indexed", source, compiler="nvrtc"))
    assert any("indexed has a stack frame of" in fault for fault in faults), faults


def test_ignored_setmaxnreg_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "registers.cu"
    source.write_text(
        'extern "C" __global__ void registers(unsigned* out) {\n'
        '  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");\n'
        "  out[threadIdx.x] = threadIdx.x;\n"
        "}\n"
    )
    faults = sm90.resource_faults(compile_cubin("registers", source, compiler="nvrtc"))
    assert any("setmaxnreg" in fault for fault in faults), faults


def test_a_struct_that_differs_between_python_and_cpp_does_not_compile() -> None:
    generated = sm90.generated_headers()
    generated["buffer_layout.hpp"] = generated["buffer_layout.hpp"].replace(
        "uint32_t num_mask_words;", "uint64_t num_mask_words;"
    )
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_proof(generated)


def test_shared_memory_plan_is_checked() -> None:
    generated = sm90.generated_headers()
    text = generated["sm90_arguments.hpp"]
    generated["sm90_arguments.hpp"] = text.replace(f"{sm90.PROOF_SHARED_BYTES};", "1024;")
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_proof(generated)


def test_driver_says_that_there_is_no_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "megamoe.protocol_proof", "--gpus", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--gpus 1: this machine has 0" in done.stderr
