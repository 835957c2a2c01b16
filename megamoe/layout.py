"""The symmetric buffer: every region listed once. Offsets, views, size and the C++ struct all come from the list."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from megamoe import abi
from megamoe.config import ACCUM_DEBUG_EDGE, INTERLEAVE, MAX_EXPERTS, SCALE_BLOCK, MegaMoEConfig, ceil_div, round_up

ITEM_BYTES = {"e4m3": 1, "bf16": 2, "f32": 4, "u32": 4, "i64": 8, "u64": 8}
REGION_ALIGNMENT = 256
BULK_COPY_BYTES = 16
"""Rows that a bulk copy moves start and end on this boundary."""

ROUTES_PER_CHUNK = 1024
"""Routes of one claim while a source sorts its routes by expert."""

NUM_BANKS = 2
"""Counters of a launch live in the bank of its epoch's parity; the other bank is cleared meanwhile."""

ROWS_PER_PULL = 4
"""Pool rows of one pull claim; half as many where the first block has more than these, and is at most half full."""

LAUNCH_DECISION_SLOTS = 8
"""Launches that are let in or refused on one buffer at the same time without waiting for each other: a slot holds the
decision, and how many workers have read it."""

MAX_FAULT_RECORDS = 32
CLAIM_NAMES = (
    "count_chunk",
    "counted_chunks",
    "list_chunk",
    "listed_chunks",
    "table",
    "pull",
    "tile",
    "combine",
    "clear",
    "exited_workers",
)
"""Counters of the claim region of a bank, one 128-byte line each."""
CLAIM_LINE_WORDS = 32


@dataclass(frozen=True)
class FaultRecordType:
    """Shape of a fault record: 32-bit words, so that device and host agree without padding."""

    words: tuple[str, ...]

    @property
    def num_words(self) -> int:
        return len(self.words)


FAULT_RECORD = FaultRecordType(
    (
        "written",  # the record is complete once this is not 0
        "kind",
        "wait",
        "rank",
        "peer",
        "index",
        "epoch_low",
        "epoch_high",
        "expected_low",
        "expected_high",
        "seen_low",
        "seen_high",
        "waited_us_low",
        "waited_us_high",
    )
)


@dataclass(frozen=True)
class Region:
    """One array of the buffer.

    ``shape`` and ``strides`` count elements, outermost dimension first as a user sees it; a column-major region has
    its smallest stride first. ``banked`` regions have the bank as their first dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writer: str
    reader: str
    banked: bool = False
    offset: int = 0

    @property
    def num_elements(self) -> int:
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


def _row_major(shape: Sequence[int], row_elements: int | None = None) -> tuple[int, ...]:
    """Strides of a row-major array whose innermost dimension is padded to ``row_elements``."""
    strides = [1]
    for position, size in enumerate(reversed(shape[1:])):
        inner = row_elements if position == 0 and row_elements is not None else size
        strides.append(strides[-1] * inner)
    return tuple(reversed(strides))


def _region(
    name: str, dtype: str, shape: tuple[int, ...], writer: str, reader: str, *, row_elements: int | None = None
) -> Region:
    return Region(name, dtype, shape, _row_major(shape, row_elements), writer, reader)


def _rows_fastest(name: str, dtype: str, rows: int, columns: int, writer: str, reader: str) -> Region:
    return Region(name, dtype, (rows, columns), (1, rows), writer, reader)


def _banked(name: str, dtype: str, shape: tuple[int, ...], writer: str, reader: str) -> Region:
    full = (NUM_BANKS, *shape)
    return Region(name, dtype, full, _row_major(full), writer, reader, banked=True)


def num_route_chunks(config: MegaMoEConfig) -> int:
    """Claims into which a full rank's routes are cut while they are sorted."""
    return ceil_div(config.max_routes_per_rank, ROUTES_PER_CHUNK)


def _regions(config: MegaMoEConfig) -> list[Region]:
    ranks, experts, local = config.num_ranks, config.num_experts, config.experts_per_rank
    tokens, topk, hidden = config.num_max_tokens_per_rank, config.num_topk, config.hidden
    intermediate, rows, blocks = config.intermediate_hidden, config.num_pool_rows, config.num_pool_blocks
    sf_row = round_up(config.hidden_scales, BULK_COPY_BYTES // ITEM_BYTES["f32"])
    inputs = [
        _region("x", "e4m3", (tokens, hidden), "host", "pull of every owner"),
        _region("x_sf", "f32", (tokens, config.hidden_scales), "host", "pull of every owner", row_elements=sf_row),
        _region("topk_idx", "i64", (tokens, topk), "host", "dispatch, combine"),
        _region("topk_weights", "f32", (tokens, topk), "host", "pull of every owner"),
    ]
    between_ranks = [
        _region("route_count", "u64", (ranks, local), "dispatch of every source", "table"),
        _region("route_base", "u32", (ranks, local), "dispatch of every source", "pull"),
        _region("route_list", "u32", (tokens * topk, 2), "dispatch", "pull of every owner"),
        _region("expert_done", "u64", (experts,), "L2 epilogue of every owner", "combine"),
        _region("combine", "bf16", (topk, tokens, hidden), "L2 epilogue of every owner", "combine"),
        _region("abort", "u64", (1,), "any wait of any rank", "every wait"),
    ]
    control = [
        _region("epoch", "u64", (1,), "exit", "enter, host"),
        _region("in_use", "u64", (1,), "enter, exit", "enter"),
        _region("launch_decisions", "u64", (LAUNCH_DECISION_SLOTS, 2), "enter", "enter"),
        _region("fault_count", "u32", (1,), "any role", "host"),
        _region("fault_records", "u32", (MAX_FAULT_RECORDS, FAULT_RECORD.num_words), "any role", "host"),
        _region("chunk_counts", "u32", (num_route_chunks(config), experts), "dispatch", "dispatch"),
        _region("list_bases", "u32", (experts + 1,), "dispatch", "dispatch"),
    ]
    pool = [
        _region("table_ready", "u64", (1,), "table", "pull, schedule"),
        _region("expert_recv_count_sum", "u64", (local,), "table", "host"),
        _region("source_rows", "u32", (local, ranks + 1), "table", "pull, schedule"),
        _region("expert_blocks", "u32", (local + 1,), "table", "pull, schedule"),
        _region("pool_blocks", "u32", (blocks, 2), "table", "every role"),
        _region("pair_blocks", "u32", (blocks // 2 + 1, 2), "table", "schedule"),
        _region("pair_groups", "u32", (blocks // 2 + 3,), "table", "schedule"),
        _region("l1_acts", "e4m3", (rows, hidden), "pull", "load"),
        _rows_fastest("l1_acts_sf", "f32", rows, config.hidden_scales, "pull", "load"),
        _region("l1_topk_weights", "f32", (rows,), "pull", "L1 epilogue"),
        _region("token_src_metadata", "u32", (rows, 3), "pull", "L2 epilogue"),
        _region("l2_acts", "e4m3", (rows, intermediate), "L1 epilogue", "load"),
        _rows_fastest("l2_acts_sf", "f32", rows, config.intermediate_scales, "L1 epilogue", "load"),
    ]
    counters = [
        _banked("claims", "u32", (len(CLAIM_NAMES), CLAIM_LINE_WORDS), "every role", "every role"),
        _banked("l1_arrival_count", "u32", (blocks,), "pull", "load"),
        _banked("l2_arrival_mask", "u64", (blocks, config.num_mask_words), "L1 epilogue", "load"),
        _banked("expert_progress", "u32", (local,), "pull or L2 epilogue", "the last of them"),
    ]
    debug = [_region("l1_accum_debug", "f32", (ACCUM_DEBUG_EDGE, ACCUM_DEBUG_EDGE), "L1 epilogue", "host")]
    return inputs + between_ranks + control + pool + counters + debug


@dataclass(frozen=True)
class BufferLayout:
    """Where each region of a rank's symmetric buffer lies. The same on every rank of a group."""

    config: MegaMoEConfig
    regions: tuple[Region, ...]
    num_bytes: int

    @cached_property
    def by_name(self) -> dict[str, Region]:
        return {region.name: region for region in self.regions}

    def __getitem__(self, name: str) -> Region:
        return self.by_name[name]

    @cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits that differ between versions of the package which lay a config out differently."""
        places = [(region.name, region.dtype, region.shape, region.strides, region.offset) for region in self.regions]
        return hashlib.sha256(repr(places).encode()).hexdigest()[:8]

    def as_struct(self) -> ctypes.Structure:
        """The values of the C++ ``BufferLayout`` for this layout."""
        values: Any = BUFFER_LAYOUT_STRUCT.ctype()
        for region in self.regions:
            member = getattr(values, region.name)
            member.offset = region.offset
            for dimension, stride in enumerate(region.strides):
                member.stride[dimension] = stride
        return values


@lru_cache(maxsize=64)
def buffer_layout(config: MegaMoEConfig) -> BufferLayout:
    """Lay out the buffer of one rank. All arithmetic is in Python integers, so no capacity overflows it."""
    placed: list[Region] = []
    offset = 0
    for region in _regions(config):
        offset = round_up(offset, REGION_ALIGNMENT)
        placed.append(Region(**{**vars(region), "offset": offset}))
        offset += region.num_bytes
    return BufferLayout(config, tuple(placed), round_up(offset, REGION_ALIGNMENT))


def describe(config: MegaMoEConfig) -> str:
    """A table of the regions: offset, bytes, dtype, shape, writer and reader of each."""
    layout = buffer_layout(config)
    rows = [("region", "offset", "bytes", "dtype", "shape", "written by", "read by")]
    for region in layout.regions:
        shape = "x".join(map(str, region.shape))
        rows.append(
            (region.name, str(region.offset), str(region.num_bytes), region.dtype, shape, region.writer, region.reader)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = {1, 2}
    lines = [
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, f"total {layout.num_bytes} bytes a rank"])


# --- what C++ sees -----------------------------------------------------------------------------------------------

MAX_DIMENSIONS = 3

REGION_STRUCT = abi.declare(
    "Region",
    (
        abi.Field("offset", "u64", comment="bytes from the start of a rank's buffer"),
        abi.Field("stride", "u64", MAX_DIMENSIONS, "elements, outermost dimension first"),
    ),
)

_ANY_CONFIG = MegaMoEConfig(1, 1, 1, SCALE_BLOCK, SCALE_BLOCK, 1)
BUFFER_LAYOUT_STRUCT = abi.declare(
    "BufferLayout",
    tuple(abi.Field(region.name, "Region", comment=region.dtype) for region in _regions(_ANY_CONFIG)),
    (REGION_STRUCT,),
)

PROBLEM_STRUCT = abi.declare(
    "Problem",
    (
        abi.Field("num_ranks", "u32"),
        abi.Field("num_experts", "u32"),
        abi.Field("experts_per_rank", "u32"),
        abi.Field("num_topk", "u32"),
        abi.Field("hidden", "u32"),
        abi.Field("intermediate", "u32"),
        abi.Field("max_tokens", "u32"),
        abi.Field("num_pool_rows", "u32"),
        abi.Field("num_pool_blocks", "u32"),
        abi.Field("block_m", "u32"),
        abi.Field("l1_block_n", "u32"),
        abi.Field("l2_block_n", "u32"),
        abi.Field("num_l1_tiles", "u32", comment="of a pool block"),
        abi.Field("num_l2_tiles", "u32", comment="of a pool block"),
        abi.Field("num_mask_words", "u32", comment="of a pool block"),
        abi.Field("l2_sf_granularity", "u32"),
    ),
)


LAUNCH_STRUCT = abi.declare(
    "LaunchArguments",
    (
        abi.Field("y", "u64", comment="address of bf16 [num_tokens, hidden]"),
        abi.Field("l1_weight", "u64", comment="address of e4m3 [experts_per_rank, 2 * intermediate, hidden]"),
        abi.Field("l1_sf", "u64", comment="address of f32 [experts_per_rank, 2 * intermediate / 128, hidden / 128]"),
        abi.Field("l2_weight", "u64", comment="address of e4m3 [experts_per_rank, hidden, intermediate]"),
        abi.Field("l2_sf", "u64", comment="address of f32 [experts_per_rank, hidden / 128, intermediate / 128]"),
        abi.Field("recv_stats", "u64", comment="address of i32 [experts_per_rank] to add to, or 0"),
        abi.Field("num_tokens_word", "u64", comment="address of an i32 that overrides num_tokens, or 0"),
        abi.Field("role_times", "u64", comment="address of u64 [roles], nanoseconds to add to, or 0"),
        abi.Field("timeout_ns", "u64"),
        abi.Field("launch", "u64", comment="unique among launches that can overlap, not 0"),
        abi.Field("num_tokens", "u32"),
        abi.Field("stage", "u32"),
        abi.Field("has_clamp", "u32"),
        abi.Field("activation_clamp", "f32"),
        abi.Field("fast_math", "u32"),
        abi.Field("debug", "u32", comment="write l1_accum_debug"),
        abi.Field("debug_row_block", "u32", comment="of 128 pool rows"),
        abi.Field("debug_column_block", "u32", comment="of 128 L1 columns"),
    ),
)

HOST_STATUS_STRUCT = abi.declare(
    "HostStatus",
    (
        abi.Field("completed_epoch", "u64"),
        abi.Field("aborted_epoch", "u64", comment="0: not aborted"),
        abi.Field("fault_count", "u64"),
    ),
)


def problem_struct(config: MegaMoEConfig) -> ctypes.Structure:
    """The values of the C++ ``Problem`` for a config."""
    return PROBLEM_STRUCT.ctype(
        num_ranks=config.num_ranks,
        num_experts=config.num_experts,
        experts_per_rank=config.experts_per_rank,
        num_topk=config.num_topk,
        hidden=config.hidden,
        intermediate=config.intermediate_hidden,
        max_tokens=config.num_max_tokens_per_rank,
        num_pool_rows=config.num_pool_rows,
        num_pool_blocks=config.num_pool_blocks,
        block_m=config.block_m,
        l1_block_n=config.l1_block_n,
        l2_block_n=config.l2_block_n,
        num_l1_tiles=config.num_l1_tiles,
        num_l2_tiles=config.num_l2_tiles,
        num_mask_words=config.num_mask_words,
        l2_sf_granularity=config.l2_sf_granularity,
    )


def cpp_header() -> str:
    """Text of ``buffer_layout.hpp``, generated for every target: structs, counters and constants of the layout."""
    claims = ", ".join(CLAIM_NAMES)
    words = ", ".join(FAULT_RECORD.words)
    return "\n".join(
        [
            "// Generated by megamoe/layout.py. Do not edit.",
            "#pragma once",
            "#include <cuda/std/cstdint>",
            "namespace megamoe {",
            "using cuda::std::uint32_t;",
            "using cuda::std::int32_t;",
            "using cuda::std::uint64_t;",
            "using cuda::std::int64_t;",
            REGION_STRUCT.cpp,
            BUFFER_LAYOUT_STRUCT.cpp,
            PROBLEM_STRUCT.cpp,
            LAUNCH_STRUCT.cpp,
            HOST_STATUS_STRUCT.cpp,
            f"enum class Claim : uint32_t {{ {claims}, number_of_claims }};",
            f"enum class FaultWord : uint32_t {{ {words}, number_of_words }};",
            f"constexpr uint32_t kRoutesPerChunk = {ROUTES_PER_CHUNK};",
            f"constexpr uint32_t kMaxExperts = {MAX_EXPERTS};",
            f"constexpr uint32_t kMaxFaultRecords = {MAX_FAULT_RECORDS};",
            f"constexpr uint32_t kRowsPerPull = {ROWS_PER_PULL};",
            f"constexpr uint32_t kLaunchDecisionSlots = {LAUNCH_DECISION_SLOTS};",
            f"constexpr uint32_t kScaleBlock = {SCALE_BLOCK};",
            f"constexpr uint32_t kInterleave = {INTERLEAVE};",
            f"constexpr uint32_t kAccumDebugEdge = {ACCUM_DEBUG_EDGE};",
            "}  // namespace megamoe",
            "",
        ]
    )
