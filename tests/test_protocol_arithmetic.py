"""Arithmetic of the protocol and of the host target by its C entry points; structs as both languages see them."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamoe import abi, jit, stress_program
from megamoe.layout import (
    BUFFER_LAYOUT_STRUCT,
    HOST_STATUS_STRUCT,
    LAUNCH_STRUCT,
    PROBLEM_STRUCT,
    REGION_STRUCT,
    cpp_header,
)
from megamoe.targets import host

L1, L2 = 0, 1
Tile = tuple[int, int, int]


# --- the order of tiles ----------------------------------------------------------------------------------------------


def tile_order(blocks: int, l1_tiles: int, l2_tiles: int, group: int, lag: int) -> list[Tile]:
    """(kind, block, column) of every tile, as they are claimed."""
    library = host.library()
    out = (ctypes.c_uint32 * 3)()
    tiles = []
    for index in range(library.megamoe_tile_count(blocks, l1_tiles, l2_tiles, group, lag)):
        library.megamoe_tile_at(blocks, l1_tiles, l2_tiles, group, lag, index, out)
        tiles.append((out[0], out[1], out[2]))
    return tiles


def check_order(tiles: list[Tile], blocks: int, l1_tiles: int, l2_tiles: int) -> None:
    every = {(L1, block, column) for block in range(blocks) for column in range(l1_tiles)}
    every |= {(L2, block, column) for block in range(blocks) for column in range(l2_tiles)}
    assert len(tiles) == len(every)
    assert set(tiles) == every
    missing = [l1_tiles] * blocks
    for kind, block, _ in tiles:
        if kind == L1:
            missing[block] -= 1
        else:  # the proof that one worker suffices rests on this
            assert missing[block] == 0, (
                f"an L2 tile of block {block} is claimed before {missing[block]} of its L1 tiles"
            )


@given(
    blocks=st.integers(0, 23),
    l1_tiles=st.integers(1, 5),
    l2_tiles=st.integers(0, 5),
    group=st.integers(1, 9),
    lag=st.integers(0, 30),
)
def test_every_tile_once_and_l2_after_its_l1(blocks: int, l1_tiles: int, l2_tiles: int, group: int, lag: int) -> None:
    check_order(tile_order(blocks, l1_tiles, l2_tiles, group, lag), blocks, l1_tiles, l2_tiles)


@pytest.mark.parametrize(
    ("blocks", "group", "lag"),
    [(0, 1, 1), (1, 4, 1), (4, 4, 1), (5, 4, 1), (7, 2, 100), (8, 2, 4), (8, 2, 3), (9, 2, 4), (8, 2, 0), (9, 4, 0)],
)
@pytest.mark.parametrize("l2_tiles", [0, 1, 3])
def test_edges_of_the_order(blocks: int, group: int, lag: int, l2_tiles: int) -> None:
    check_order(tile_order(blocks, 2, l2_tiles, group, lag), blocks, 2, l2_tiles)


def test_the_order_in_full() -> None:
    """Groups of two blocks, L2 one group behind, the block moving fastest: as the comment of TileOrder says."""
    assert tile_order(3, 2, 1, 2, 1) == [
        *[(L1, 0, 0), (L1, 1, 0), (L1, 0, 1), (L1, 1, 1)],
        *[(L1, 2, 0), (L1, 2, 1), (L2, 0, 0), (L2, 1, 0)],
        *[(L2, 2, 0)],
    ]


@given(st.data())
def test_the_order_of_a_large_pool(data: st.DataObject) -> None:
    """No product overflows 32 bits: tiles far apart in a pool of the largest size are distinct and within range."""
    blocks, l1_tiles, l2_tiles, group, lag = 14_400_000, 64, 64, 8, 2
    library = host.library()
    count = library.megamoe_tile_count(blocks, l1_tiles, l2_tiles, group, lag)
    assert count == blocks * (l1_tiles + l2_tiles)
    indices = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=20, unique=True))
    out = (ctypes.c_uint32 * 3)()
    seen = set()
    for index in indices:
        library.megamoe_tile_at(blocks, l1_tiles, l2_tiles, group, lag, index, out)
        assert out[1] < blocks
        assert out[2] < (l1_tiles if out[0] == L1 else l2_tiles)
        seen.add((out[0], out[1], out[2]))
    assert len(seen) == len(indices)


# --- number formats --------------------------------------------------------------------------------------------------


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def torch_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even, saturating; uint8. torch alone turns what is too large into NaN."""
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def check_to_e4m3(values: torch.Tensor) -> None:
    encode = host.library().megamoe_to_e4m3
    found = torch.tensor([encode(value) for value in values.tolist()], dtype=torch.uint8)
    is_nan = values.isnan()
    assert bool(((found[is_nan] & 0x7F) == 0x7F).all())
    wrong = found[~is_nan] != torch_e4m3(values[~is_nan])
    assert not bool(wrong.any()), values[~is_nan][wrong][:5].tolist()


def test_every_e4m3_pattern_decodes_as_torch_says() -> None:
    decode = host.library().megamoe_from_e4m3
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    found = torch.tensor([decode(bits) for bits in range(256)], dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())  # -0 is not 0


def test_every_bf16_pattern_becomes_the_e4m3_that_torch_says() -> None:
    check_to_e4m3(torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32))


def test_e4m3_about_every_boundary() -> None:
    """The values halfway between neighbours, where ties go to even, and the floats on either side of them."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    halfway = ((values[1:] + values[:-1]) / 2).to(torch.float32)
    edges = torch.cat([halfway, values.to(torch.float32), torch.tensor([464.0, 480.0, 2.0**-10, 2.0**-149, 0.0])])
    infinity = torch.tensor(torch.inf)
    about = torch.cat([edges, edges.nextafter(infinity), edges.nextafter(-infinity)])
    check_to_e4m3(torch.cat([about, -about, torch.tensor([torch.inf, -torch.inf, torch.nan])]))


@given(st.integers(0, (1 << 32) - 1))
def test_any_float_becomes_the_e4m3_and_bf16_that_torch_says(bits: int) -> None:
    value = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    check_to_e4m3(value)
    if not bool(value.isnan()):
        found = host.library().megamoe_to_bf16(float_of(bits))
        assert found == int(value.to(torch.bfloat16).view(torch.uint16).item())


def test_every_bf16_pattern_survives_both_ways() -> None:
    """bf16 -> fp32 -> bf16 is the identity; so is the tie to even of the value halfway to the next pattern."""
    encode = host.library().megamoe_to_bf16
    for bits in range(1 << 16):
        value = float_of(bits << 16)
        if value != value:
            found = encode(value)
            assert found & 0x7F80 == 0x7F80
            assert found & 0x7F != 0
            continue
        assert encode(value) == bits
        if bits & 0x7F80 != 0x7F80:
            assert encode(float_of(bits << 16 | 0x8000)) == bits + (bits & 1)
            assert encode(float_of(bits << 16 | 0x7FFF)) == bits
            assert encode(float_of(bits << 16 | 0x8001)) == bits + 1


# --- structs ---------------------------------------------------------------------------------------------------------

STRUCTS = [
    REGION_STRUCT,
    BUFFER_LAYOUT_STRUCT,
    PROBLEM_STRUCT,
    LAUNCH_STRUCT,
    HOST_STATUS_STRUCT,
    stress_program.OPTIONS_STRUCT,
    stress_program.RECORD_STRUCT,
    stress_program.RUN_STRUCT,
]


@pytest.fixture(scope="module")
def compiled_offsets(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library with ``offsets_NAME(uint64_t*)`` for each struct: sizeof, then offset and size of each member."""
    functions = []
    for declared in STRUCTS:
        members = "".join(
            f"*out++ = offsetof({declared.name}, {field.name}); *out++ = sizeof({declared.name}::{field.name});"
            for field in declared.fields
        )
        functions.append(
            f"void offsets_{declared.name}(uint64_t* out) {{ *out++ = sizeof({declared.name}); {members} }}"
        )
    source = tmp_path_factory.mktemp("structs") / "offsets.cpp"
    lines = ["#include <cstddef>", '#include "stress_structs.hpp"', "using namespace megamoe;", 'extern "C" {']
    source.write_text("\n".join([*lines, *functions, "}", ""]))
    artifact = jit.build_shared_library(
        "megamoe_test_offsets",
        [source],
        generated={"buffer_layout.hpp": cpp_header(), "stress_structs.hpp": stress_program.structs_header()},
        include_dirs=host.include_dirs(),
        options=["-Wno-invalid-offsetof"],
    )
    return ctypes.CDLL(str(artifact.path))


@pytest.mark.parametrize("declared", STRUCTS, ids=lambda declared: declared.name)
def test_struct_is_the_same_for_both_languages(declared: abi.StructType, compiled_offsets: ctypes.CDLL) -> None:
    found = (ctypes.c_uint64 * (1 + 2 * len(declared.fields)))()
    getattr(compiled_offsets, f"offsets_{declared.name}")(found)
    expected = [ctypes.sizeof(declared.ctype)]
    for field in declared.fields:
        member = getattr(declared.ctype, field.name)
        expected += [member.offset, member.size]
    assert list(found) == expected
