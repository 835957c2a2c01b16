"""The GPU half compiles here, without a GPU, and within its means: no spill, no stack frame, no remark of ptxas."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megamoe
from megamoe import VirtualGroup
from megamoe.jit import CompileError, CubinArtifact, compile_cubin, csrc_dir, find_nvcc
from megamoe.jit.machine_code import kernel_code, moves_between_products
from megamoe.targets import sm90
from phases.support.inputs import make_tokens
from phases.support.workloads import TILE_HEIGHTS
from tests.device import racecheck, small_run

COMPILERS = [
    "nvrtc",
    pytest.param("nvcc", marks=pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine")),
]
MAX_REGISTERS = 128
MAX_COMPILE_CPU_S = 20.0
"""A build is to take less than 10 s; a test machine may be half as fast."""
FUSED_IN_CI = [
    sm90.FusedVariant(1, 128, False, False),
    sm90.FusedVariant(1, 64, False, False),
    sm90.FusedVariant(1, 128, True, False),
    sm90.FusedVariant(1, 128, False, True),
    sm90.FusedVariant(1, 64, False, True),
]
"""`harness build --target sm90 --all` compiles the others: they differ in the number of ranks a grid deals out."""


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


@pytest.mark.parametrize("variant", FUSED_IN_CI, ids=str)
def test_fused_kernel_compiles_within_its_means(variant: sm90.FusedVariant) -> None:
    assert variant in sm90.fused_variants()
    before = time.process_time()
    artifact = variant.build()
    cpu_s = time.process_time() - before
    assert set(artifact.kernels) == {sm90.FUSED_KERNEL}
    assert sm90.resource_faults(artifact) == []
    used = artifact.kernels[sm90.FUSED_KERNEL]
    assert used.shared_bytes == 0, "static shared memory beside the struct"
    assert sm90.SHARED_BYTES[sm90.FUSED_KERNEL] <= 232448, "more than a CTA can have"
    assert cpu_s < MAX_COMPILE_CPU_S, f"{cpu_s:.1f} s of CPU"


def test_ranks_ask_for_no_more_builds_than_theirs() -> None:
    assert {variant.ranks_here for variant in sm90.fused_variants()} == {1, 2, 4, 8}
    assert {variant.ranks_here for variant in sm90.fused_variants(3)} == {1, 2}


def test_registers_of_the_roles_fit_a_multiprocessor() -> None:
    roles = dict(re.findall(r"(\w+) (\d+)", sm90.role_registers()))
    assert set(roles) == {"dispatch", "math"}
    assert 128 * int(roles["dispatch"]) + 256 * int(roles["math"]) <= 65536


def test_fill_kernels_compile_within_their_means() -> None:
    artifact = sm90.build("fill")
    assert set(artifact.kernels) == set(sm90.FILL_KERNELS.values())
    assert sm90.resource_faults(artifact) == []


def without_bring_up(csrc: Path) -> None:
    """Cut what a bring-up build alone uses out of the sources."""
    math_role, fused = csrc / "sm90" / "roles" / "math.hpp", csrc / "sm90" / "fused.cu"
    text = math_role.read_text()
    text, functions = re.subn(
        r"template <uint32_t k\w+>\nMEGAMOE_FN void store_\w+_debug\(.*?\n}\n", "", text, flags=re.S
    )
    text, blocks = re.subn(r"\n    if constexpr \(kBringUp\) {\n.*?\n    }(?=\n)", "", text, flags=re.S)
    assert (functions, blocks) == (2, 2)  # tiles in place, and with swapped operands
    assert "debug" not in text
    math_role.write_text(text)
    text = fused.read_text()
    text, defaults = re.subn(r"if constexpr \(!kBringUp\) ", "", text)
    text, conditions = re.subn(r"\(!kBringUp \|\| [^)]*\)", "true", text)
    assert (defaults, conditions) == (1, 1)
    fused.write_text(text)


def test_nothing_of_the_debug_sources_is_in_the_production_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    production, bring_up = FUSED_IN_CI[0].build(), FUSED_IN_CI[2].build()
    shutil.copytree(csrc_dir(), tmp_path / "csrc")
    without_bring_up(tmp_path / "csrc")
    monkeypatch.setattr(sm90, "csrc_dir", lambda: tmp_path / "csrc")
    stripped = FUSED_IN_CI[0].build()
    assert stripped.path != production.path
    code = kernel_code(production.path.read_bytes())
    assert list(code) == [sm90.FUSED_KERNEL]
    assert len(code[sm90.FUSED_KERNEL]) > 10_000
    assert code == kernel_code(stripped.path.read_bytes())
    assert code != kernel_code(bring_up.path.read_bytes()), "a bring-up build has more"


def test_a_branch_that_may_part_lanes_between_tiles_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(csrc_dir(), tmp_path / "csrc")
    epilogue = tmp_path / "csrc" / "sm90" / "roles" / "l1_epilogue.hpp"
    text = epilogue.read_text()
    assert text.count("uniform(context_.problem->l2_sf_granularity)") == 1
    epilogue.write_text(
        text.replace("uniform(context_.problem->l2_sf_granularity)", "context_.problem->l2_sf_granularity")
    )
    monkeypatch.setattr(sm90, "csrc_dir", lambda: tmp_path / "csrc")
    faults = sm90.resource_faults(FUSED_IN_CI[3].build())
    assert any("look for a branch between two tiles of the math role" in fault for fault in faults), faults


def test_descriptors_may_be_made_before_a_group_of_products() -> None:
    product, product_of_registers, move, group, other = 0x0C1879F3, 0x0C187DF3, 0x572CA, 0x79C5, 0x7918
    good = (group, move, product, other, product_of_registers, group, move, move, group, product, move, group)
    assert moves_between_products(struct.pack("<24Q", *(word for first in good for word in (first, move)))) == 0
    bad = (group, product, move, other, move, product_of_registers, move, product, group)
    assert moves_between_products(struct.pack("<18Q", *(word for first in bad for word in (first, 0)))) == 3


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


def test_the_race_checker_knows_the_fields_of_a_tile_slot() -> None:
    """tests/device/racecheck.py takes reports of them, and of them only, for false ones."""
    struct_text = (csrc_dir() / "sm90/shared_storage.hpp").read_text().split("struct TileSlot {")[1].split("};")[0]
    code = re.sub(r"//.*", "", struct_text)
    fields = set(re.findall(r"\b(\w+)(?:\[\w+\])*\s*[,;]", code))
    (known,) = re.findall(r"\(\?:([\w|]+)\)", racecheck.FIELD)
    assert fields == set(known.split("|"))


def test_what_the_sanitizers_watch_has_tiles_of_every_height() -> None:
    opened = megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(1), *small_run.LAYER)
    config = opened.config
    opened.close()
    (given,) = make_tokens(small_run.workload(config))
    heights = set()
    for count in small_run.FEWER_TOKENS:
        rows = torch.bincount(given.topk_idx[:count].flatten() + 1, minlength=config.num_experts + 1)[1:]
        heights |= {min(height for height in TILE_HEIGHTS["sm90"] if n <= height) for n in rows.tolist() if n > 0}
    assert heights >= {8, 16, 32, 64}
    assert int(rows.max()) <= config.block_m


def access_at(file: str, text: str, kind: str) -> racecheck.Access:
    """An access in the only line of a source that holds ``text``."""
    (source,) = csrc_dir().rglob(file)
    (number,) = [n for n, line in enumerate(source.read_text().splitlines(), 1) if text in line]
    return racecheck.Access(kind, "megamoe_fused", 0, file, number)


def test_the_race_checker_finds_what_else_is_handed_over() -> None:
    """Its excuses go by names and lines of the sources; each is for a read and a write of one thing."""
    written = access_at("schedule.hpp", "shared_.partner_empty =", "Write")
    cleared = access_at("fused.cu", "shared.partner_empty =", "Write")
    for file in racecheck.READS_PARTNER_EMPTY:
        read = access_at(file, "uniform(shared.partner_empty)", "Read")
        elsewhere = access_at(file, "release_stage(shared, slot, partner_empty);", "Read")
        assert racecheck.handed_over(racecheck.Report(written, read))
        assert racecheck.handed_over(racecheck.Report(read, written))
        assert not racecheck.handed_over(racecheck.Report(written, elsewhere))
        assert not racecheck.handed_over(racecheck.Report(cleared, read))
        assert not racecheck.handed_over(racecheck.Report(written, replace(read, kind="Write")))
    amax = access_at("l1_epilogue.hpp", "all[place_.warpgroup][row] =", "Write")
    other = access_at("l1_epilogue.hpp", "all[1 - place_.warpgroup][row])", "Read")
    assert racecheck.handed_over(racecheck.Report(amax, other))
    assert not racecheck.handed_over(racecheck.Report(amax, amax))
    assert not racecheck.handed_over(racecheck.Report(amax, read))


def test_a_report_without_a_line_is_excused_only_if_every_access_at_its_offset_is() -> None:
    write = access_at("schedule.hpp", "slot.column = tile.column;", "Write")
    read = access_at("math.hpp", "const TileResult tile{slot.block,", "Read")
    unknown = replace(read, file="", line=0, offset=0x309A0)
    report = racecheck.Report(write, unknown)
    listing = f'\t//## File "/x/math.hpp", line {read.line}\n  /*309a0*/  @!P0 LDS R40, [UR17+0x351b8] ;\n'
    listing += '\t//## File "/x/products.hpp", line 2\n  /*309b0*/  FFMA R1, R2, R3, R4 ;\n'
    mine = racecheck.shared_accesses(listing)
    assert mine == {0x309A0: ("math.hpp", read.line)}
    for listings, excused in [
        ([], False),
        ([mine], True),
        ([mine, {}], True),
        ([mine, {0x309A0: ("products.hpp", 2)}], False),
        ([{0x309B0: ("math.hpp", read.line)}], False),
    ]:
        assert all(map(racecheck.handed_over, racecheck.readings(report, listings))) == excused
