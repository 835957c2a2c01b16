"""The buffer's layout against big integers, and against what a C++ compiler makes of the same structs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megamoe
from megamoe import MegaMoEConfig, VirtualGroup, jit
from megamoe.config import BLOCK_M_CHOICES, MAX_RANKS, MAX_TOPK
from megamoe.layout import (
    BUFFER_LAYOUT_STRUCT,
    CLAIM_NAMES,
    FAULT_RECORD,
    HOST_STATUS_STRUCT,
    ITEM_BYTES,
    LAUNCH_STRUCT,
    PROBLEM_STRUCT,
    REGION_STRUCT,
    BufferLayout,
    Region,
    buffer_layout,
    cpp_header,
    describe,
    problem_struct,
)
from tests.layers import open_buffer, small_config

STRUCTS = (REGION_STRUCT, BUFFER_LAYOUT_STRUCT, PROBLEM_STRUCT, LAUNCH_STRUCT, HOST_STATUS_STRUCT)


@st.composite
def configs(draw: st.DrawFn, max_tokens: int = 200_000) -> MegaMoEConfig:
    """Any layer, up to 72 ranks of 200,000 tokens with 32 routes each."""
    ranks, local = draw(st.integers(1, MAX_RANKS)), draw(st.integers(1, 16))
    granularity = draw(st.sampled_from([64, 128]))
    return MegaMoEConfig(
        num_ranks=ranks,
        num_experts=ranks * local,
        num_topk=draw(st.integers(1, min(MAX_TOPK, ranks * local))),
        hidden=128 * draw(st.integers(1, 64)),
        intermediate_hidden=128 * draw(st.integers(1, 64)),
        num_max_tokens_per_rank=draw(st.integers(1, max_tokens)),
        l2_sf_granularity=granularity,
        pool_rows=draw(st.none() | st.integers(1, 10**6)),
        block_m=draw(st.sampled_from(BLOCK_M_CHOICES)),
        l1_block_n=2 * granularity * draw(st.integers(1, 4)),
        l2_block_n=128 * draw(st.integers(1, 4)),
    )


LARGEST = MegaMoEConfig(MAX_RANKS, 4 * MAX_RANKS, MAX_TOPK, 8192, 8192, 200_000)


def extent(region: Region) -> tuple[int, int]:
    """First byte and one past the last, from the addresses of the corner elements."""
    corners = [0]
    for size, stride in zip(region.shape, region.strides, strict=True):
        corners += [corner + (size - 1) * stride for corner in corners]
    item = ITEM_BYTES[region.dtype]
    return region.offset + min(corners) * item, region.offset + (max(corners) + 1) * item


def check_regions(layout: BufferLayout) -> None:
    end = 0
    for region in layout.regions:
        first, last = extent(region)
        assert first == region.offset >= end, f"{region.name} overlaps what comes before"
        assert region.offset % 256 == 0, region.name
        assert last - first == region.num_bytes
        assert all(size >= 1 for size in region.shape)
        # No two elements share an address: sorted by stride, each dimension steps over all of the smaller ones.
        reach = 0
        for stride, size in sorted(zip(region.strides, region.shape, strict=True)):
            assert size == 1 or stride > reach, region.name
            reach += (size - 1) * stride
        end = last
    assert end <= layout.num_bytes < end + 256
    assert layout.num_bytes % 256 == 0


@given(configs())
def test_regions_do_not_overlap_and_fit(config: MegaMoEConfig) -> None:
    check_regions(buffer_layout(config))


@given(configs())
def test_rows_that_bulk_copies_move_are_16_byte_rows(config: MegaMoEConfig) -> None:
    layout = buffer_layout(config)
    for name in ("x", "x_sf", "l1_acts", "l2_acts", "combine"):
        region = layout[name]
        assert region.strides[-1] == 1
        for stride in region.strides[:-1]:
            assert stride * ITEM_BYTES[region.dtype] % 16 == 0, name
    for name in ("l1_acts_sf", "l2_acts_sf"):  # rows of a block adjacent, scale groups apart
        assert layout[name].strides[0] == 1
        assert layout[name].strides[1] * ITEM_BYTES["f32"] % 16 == 0


@given(configs())
def test_shapes_follow_the_config(config: MegaMoEConfig) -> None:
    layout = buffer_layout(config)
    tokens, topk, hidden, rows = config.num_max_tokens_per_rank, config.num_topk, config.hidden, config.num_pool_rows
    local = config.num_experts // config.num_ranks
    expected = {
        "x": (tokens, hidden),
        "x_sf": (tokens, hidden // 128),
        "topk_idx": (tokens, topk),
        "topk_weights": (tokens, topk),
        "route_count": (config.num_ranks, local),
        "route_list": (tokens * topk, 2),
        "expert_done": (config.num_experts,),
        "combine": (topk, tokens, hidden),
        "l1_acts": (rows, hidden),
        "l1_acts_sf": (rows, hidden // 128),
        "l2_acts": (rows, config.intermediate_hidden),
        "l2_acts_sf": (rows, config.intermediate_hidden // config.l2_sf_granularity),
        "token_src_metadata": (rows, 3),
        "l1_arrival_count": (2, rows // config.block_m),
    }
    assert {name: layout[name].shape for name in expected} == expected


def test_the_largest_group_overflows_nothing() -> None:
    layout = buffer_layout(LARGEST)
    check_regions(layout)
    assert layout.num_bytes > 2**42
    # 64-bit fields of the C++ struct hold what Python's integers say.
    values = layout.as_struct()
    for region in layout.regions:
        member = getattr(values, region.name)
        assert member.offset == region.offset
        assert tuple(member.stride)[: len(region.strides)] == region.strides
    problem = problem_struct(LARGEST)
    assert problem.num_pool_rows == LARGEST.num_pool_rows > 72 * 200_000 * 32
    assert problem.num_pool_blocks * problem.block_m == problem.num_pool_rows


def test_the_size_a_user_asks_for_is_the_layouts() -> None:
    size = megamoe.get_symm_buffer_size_for_sm90_mega_moe(8, 256, 4096, 8, 7168, 2048, pool_rows=50_000)
    config = megamoe.make_config(8, 256, 4096, 8, 7168, 2048, pool_rows=50_000)
    assert size == buffer_layout(config).num_bytes
    assert size < megamoe.get_symm_buffer_size_for_sm90_mega_moe(8, 256, 4096, 8, 7168, 2048)


def test_the_table_lists_every_region() -> None:
    config = small_config(2, hidden=640)
    layout, lines = buffer_layout(config), describe(config).splitlines()
    assert lines[-1] == f"total {layout.num_bytes} bytes a rank"
    for region, line in zip(layout.regions, lines[1:-1], strict=True):
        shape = "x".join(map(str, region.shape))
        assert re.split(r"\s{2,}", line) == [
            region.name,
            str(region.offset),
            str(region.num_bytes),
            region.dtype,
            shape,
            region.writer,
            region.reader,
        ]


# --- against C++ --------------------------------------------------------------------------------------------------


def cpp_type_size(name: str, field: str) -> str:
    return f'line("{name}.{field}", offsetof({name}, {field}), sizeof((({name}*)nullptr)->{field}));'


def program() -> str:
    """Prints size and offset of every member, then the values of structs that it reads as bytes."""
    facts = "\n".join(
        f'  line("{struct.name}", alignof({struct.name}), sizeof({struct.name}));\n'
        + "\n".join("  " + cpp_type_size(struct.name, field.name) for field in struct.fields)
        for struct in STRUCTS
    )
    regions = "\n".join(
        f'  line("{field.name}", layout.{field.name}.offset, layout.{field.name}.stride[0], '
        f"layout.{field.name}.stride[1], layout.{field.name}.stride[2]);"
        for field in BUFFER_LAYOUT_STRUCT.fields
    )
    numbers = "\n".join(f'  line("{field.name}", problem.{field.name});' for field in PROBLEM_STRUCT.fields)
    return f"""
#include <cstddef>
#include <cstdio>
#include "buffer_layout.hpp"
using namespace megamoe;
template <class... Numbers>
void line(const char* name, Numbers... numbers) {{
  std::printf("%s", name);
  (std::printf(" %llu", (unsigned long long)numbers), ...);
  std::printf("\\n");
}}
int main() {{
{facts}
  line("claims", Claim::number_of_claims);
  line("fault_words", FaultWord::number_of_words);
  static BufferLayout layout;
  static Problem problem;
  while (std::fread(&layout, sizeof layout, 1, stdin) == 1 && std::fread(&problem, sizeof problem, 1, stdin) == 1) {{
{regions}
{numbers}
  }}
}}
"""


@pytest.fixture(scope="module")
def printer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("layout") / "print_layout.cpp"
    source.write_text(program())
    return jit.build_shared_library(
        "print_layout",
        [source],
        generated={"buffer_layout.hpp": cpp_header()},
        include_dirs=[jit.cccl_include_dir()],
        executable=True,
    ).path


def ask(printer: Path, given_bytes: bytes = b"") -> list[tuple[str, tuple[int, ...]]]:
    output = subprocess.run([printer], input=given_bytes, capture_output=True, check=True, timeout=60).stdout.decode()
    lines = [line.split() for line in output.splitlines()]
    return [(name, tuple(map(int, numbers))) for name, *numbers in lines]


@lru_cache(maxsize=1)
def expected_facts() -> list[tuple[str, tuple[int, ...]]]:
    facts: list[tuple[str, tuple[int, ...]]] = []
    for struct in STRUCTS:
        facts.append((struct.name, (ctypes.alignment(struct.ctype), ctypes.sizeof(struct.ctype))))
        for field in struct.fields:
            member = getattr(struct.ctype, field.name)
            facts.append((f"{struct.name}.{field.name}", (member.offset, member.size)))
    return [*facts, ("claims", (len(CLAIM_NAMES),)), ("fault_words", (FAULT_RECORD.num_words,))]


def test_the_compiler_sees_the_structs_that_ctypes_sees(printer: Path) -> None:
    assert ask(printer) == expected_facts()


def test_a_struct_that_disagrees_does_not_compile(tmp_path: Path, private_cache: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text('#include "buffer_layout.hpp"\nint main() {}\n')
    size = ctypes.sizeof(HOST_STATUS_STRUCT.ctype)
    wrong = cpp_header().replace(f"sizeof(HostStatus) == {size}", f"sizeof(HostStatus) == {size + 8}")
    assert wrong != cpp_header()
    with pytest.raises(jit.CompileError, match="static assertion"):
        jit.build_shared_library(
            "wrong",
            [source],
            generated={"buffer_layout.hpp": wrong},
            include_dirs=[jit.cccl_include_dir()],
            executable=True,
        )


@settings(max_examples=20)
@given(config=st.just(LARGEST) | configs())
def test_the_compiler_reads_the_values_of_a_layout(printer: Path, config: MegaMoEConfig) -> None:
    layout = buffer_layout(config)
    said = ask(printer, bytes(layout.as_struct()) + bytes(problem_struct(config)))[len(expected_facts()) :]
    expected: list[tuple[str, tuple[int, ...]]] = []
    for region in layout.regions:
        strides = (*region.strides, 0, 0, 0)[:3]
        expected.append((region.name, (region.offset, *strides)))
    numbers = {
        **{name: value for name, value in vars(config).items() if name not in ("intermediate_hidden", "pool_rows")},
        "experts_per_rank": config.experts_per_rank,
        "intermediate": config.intermediate_hidden,
        "max_tokens": config.num_max_tokens_per_rank,
        "num_pool_rows": config.num_pool_rows,
        "num_pool_blocks": config.num_pool_blocks,
        "num_l1_tiles": config.num_l1_tiles,
        "num_l2_tiles": config.num_l2_tiles,
        "num_mask_words": config.num_mask_words,
    }
    expected += [(field.name, (numbers[field.name],)) for field in PROBLEM_STRUCT.fields]
    assert said == expected


# --- views --------------------------------------------------------------------------------------------------------


def test_views_are_the_regions_memory() -> None:
    buffers = open_buffer(VirtualGroup(2), small_config(2, hidden=640, l2_sf_granularity=64))
    buffer = buffers.ranks[1]
    start = buffer.view("x").data_ptr() - buffer.layout["x"].offset
    for region in buffer.layout.regions:
        view = buffer.view(region.name)
        shape, strides = (region.shape, region.strides) if not region.banked else (region.shape[1:], region.strides[1:])
        assert (tuple(view.shape), view.stride()) == (shape, strides), region.name
        assert view.element_size() == ITEM_BYTES[region.dtype]
        assert view.data_ptr() == start + region.offset  # epoch 0: bank 0
    assert buffer.view("x", rank=0).data_ptr() == buffers.ranks[0].x.data_ptr()
    buffers.close()


def test_a_new_capacity_changes_offsets_and_no_struct() -> None:
    config = small_config(2)
    header = cpp_header()
    assert buffer_layout(replace(config, num_max_tokens_per_rank=4096)).num_bytes > buffer_layout(config).num_bytes
    assert cpp_header() == header, "the header does not depend on a config, so nothing compiles anew"
