"""Ranks on GPUs: their symmetric memory, tensor maps and launches of the fused kernel.

All ranks of one GPU run as one grid whose CTAs are dealt out to them. A real rank is the same with one rank in the
grid; virtual ranks wait in a queue until each rank of the GPU has a launch, so that they start together.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.config import MegaMoEConfig
from megamoe.groups import DistributedGroup, LocalGroup
from megamoe.layout import BufferLayout, Region
from megamoe.targets import sm90

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 128
"""The tile of csrc/sm90/shared_storage.hpp."""
BOX_ROWS, BOX_COLUMNS = 64, 128
MAX_HIDDEN = 16384
_MAP_BYTES = 128
_POLL_S = 0.0005


def check_config(config: MegaMoEConfig) -> None:
    """What this target can run.

    Raises:
        ValueError: the tiles are not this target's, or a width is beyond what its shared memory plans for.
    """
    for name, value, expected in (
        ("block_m", config.block_m, BLOCK_M),
        ("l1_block_n", config.l1_block_n, BLOCK_N),
        ("l2_block_n", config.l2_block_n, BLOCK_N),
    ):
        if value != expected:
            raise ValueError(f"{name}: got {value}, expected {expected} on target sm90")
    for name, value in (("hidden", config.hidden), ("intermediate_hidden", config.intermediate_hidden)):
        if value > MAX_HIDDEN:
            raise ValueError(f"{name}: got {value}, expected at most {MAX_HIDDEN} on target sm90")


# --- tensor maps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matrix:
    """A matrix in global memory as a tensor map describes it; the inner dimension is contiguous."""

    address: int
    item_bytes: int
    inner: int
    outer: int
    pitch_bytes: int
    box_inner: int
    box_outer: int
    swizzled: bool


def _encode(matrix: _Matrix) -> bytes:
    driver = sm90._driver()
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if matrix.item_bytes == 1 else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32
    swizzles = driver.CUtensorMapSwizzle
    try:
        encoded = sm90._call(
            "cuTensorMapEncodeTiled",
            kind,
            2,
            matrix.address,
            [u64(matrix.inner), u64(matrix.outer)],
            [u64(matrix.pitch_bytes)],
            [u32(matrix.box_inner), u32(matrix.box_outer)],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if matrix.swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    except RuntimeError as error:
        raise RuntimeError(f"tensor map {matrix}: {error}") from error
    return ctypes.string_at(encoded.getPtr(), _MAP_BYTES)


def _activations(base: int, region: Region) -> _Matrix:
    rows, columns = region.shape
    return _Matrix(base + region.offset, 1, columns, rows, region.strides[0], BLOCK_K, BOX_ROWS, True)


def _scales(base: int, region: Region) -> _Matrix:
    rows, groups = region.shape
    return _Matrix(base + region.offset, 4, rows, groups, region.strides[1] * 4, BLOCK_M, 1, False)


def _weights(address: int, rows: int, columns: int) -> _Matrix:
    return _Matrix(address, 1, columns, rows, columns, BLOCK_K, BOX_COLUMNS, True)


def tensor_maps(layout: BufferLayout, base: int, l1_weight: int, l2_weight: int) -> bytes:
    """``TensorMaps`` of csrc/sm90/roles/load.hpp: activations, their scales and the weights, for L1 and L2.

    Args:
        layout: the rank's buffer, which starts at address ``base``.
        l1_weight: address of the transformed L1 weight; ``l2_weight`` likewise.
    """
    config = layout.config
    experts, hidden, intermediate = config.experts_per_rank, config.hidden, config.intermediate_hidden
    return b"".join(
        _encode(matrix)
        for matrix in (
            _activations(base, layout["l1_acts"]),
            _scales(base, layout["l1_acts_sf"]),
            _weights(l1_weight, experts * 2 * intermediate, hidden),
            _activations(base, layout["l2_acts"]),
            _scales(base, layout["l2_acts_sf"]),
            _weights(l2_weight, experts * hidden, intermediate),
        )
    )


# --- memory ------------------------------------------------------------------------------------------------------


def _symmetric_memory(group: DistributedGroup, num_bytes: int, device: torch.device) -> tuple[list[Tensor], object]:
    """Every rank's buffer of a process group, as this GPU addresses it, and what keeps them mapped. Collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    own.zero_()
    handle = symmetric_memory.rendezvous(own, group.process_group)
    torch.cuda.synchronize(device)
    dist.barrier(group=group.process_group)
    return [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.num_ranks)], (own, handle)


def devices_of(group: LocalGroup | DistributedGroup) -> list[int]:
    """The GPU of every rank: a process's current one, or virtual ranks in blocks over the GPUs there are."""
    if isinstance(group, DistributedGroup):
        return list(group.all_gather(torch.cuda.current_device()))
    gpus = torch.cuda.device_count() if group.num_gpus is None else group.num_gpus
    if not 1 <= gpus <= torch.cuda.device_count():
        raise ValueError(f"num_gpus: got {gpus}, expected 1 to the {torch.cuda.device_count()} GPUs of this machine")
    gpus = min(gpus, group.num_ranks)
    return [rank * gpus // group.num_ranks for rank in range(group.num_ranks)]


# --- launching ---------------------------------------------------------------------------------------------------


class Grid:
    """The ranks of one GPU that are launched together."""

    def __init__(self, layout: BufferLayout, device: int, ranks: Sequence[int], max_ctas: int | None) -> None:
        self.layout = layout
        self.device = device
        self.ranks = list(ranks)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        ctas = sms if max_ctas is None else min(sms, max_ctas * len(self.ranks))
        self.ctas_per_rank = max(1, ctas // len(self.ranks))
        self._waiting: dict[int, deque[tuple[ctypes.Structure, object, torch.cuda.Stream]]] = {
            rank: deque() for rank in self.ranks
        }
        self._group = sm90.group_arguments(layout.config)
        self._kept: deque[tuple[torch.cuda.Event, object]] = deque()

    def submit(self, entry: Any, keep_alive: object, stream: torch.cuda.Stream) -> None:
        """Queue a rank's launch; the grid starts once every rank of the GPU has one."""
        self._waiting[entry.rank].append((entry, keep_alive, stream))
        if all(self._waiting.values()):
            self._start(self.ranks)

    def flush(self) -> None:
        """Start what waits, although some ranks have nothing: they do not launch, and the others will say so."""
        while present := [rank for rank in self.ranks if self._waiting[rank]]:
            self._start(present)

    def _start(self, ranks: Sequence[int]) -> None:
        launches = [self._waiting[rank].popleft() for rank in ranks]
        bring_up = any(entry.launch.stage != 6 or entry.launch.debug for entry, _, _ in launches)
        kernel = sm90.fused_kernel(self.device, len(ranks), self.layout.config.l2_sf_granularity, bring_up)
        table = sm90.rank_table_type(len(ranks))(*(entry for entry, _, _ in launches))
        stream = launches[0][2]
        kernel.launch(self.ctas_per_rank * len(ranks), sm90.FUSED_THREADS, [self._group, table], stream)
        event = torch.cuda.Event()
        event.record(stream)
        self._kept.append((event, [keep for _, keep, _ in launches]))
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()

    def synchronize(self, timeout_s: float | None) -> bool:
        """Wait for every launch so far. False when that took longer than ``timeout_s``."""
        self.flush()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._kept:
            if deadline is None:
                self._kept[0][0].synchronize()
            elif not self._kept[0][0].query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
                continue
            self._kept.popleft()
        return True


class Sm90Rank:
    """One rank's buffer on a GPU, with the peers' buffers as that GPU addresses them."""

    def __init__(self, layout: BufferLayout, rank: int, memories: Sequence[Tensor], grid: Grid, keep: object) -> None:
        self.layout = layout
        self.rank = rank
        self.device = torch.device("cuda", grid.device)
        self._memories = list(memories)
        self._grid = grid
        self._keep = keep
        self._status = sm90.HostStatus(grid.device)
        self._bases = torch.tensor([memory.data_ptr() for memory in memories], dtype=torch.int64, device=self.device)
        self._maps: dict[tuple[int, int], Tensor] = {}

    @property
    def status(self) -> Any:
        return self._status.words

    @property
    def memory(self) -> Tensor:
        """This rank's buffer, uint8 [num_bytes]."""
        return self._memories[self.rank]

    def peer_memory(self, rank: int) -> Tensor:
        """Another rank's buffer, uint8 [num_bytes]."""
        return self._memories[rank]

    def launch(self, arguments: Any, keep_alive: object, stream: torch.cuda.Stream | None = None) -> None:
        """Put a launch on ``stream``, or on the current stream of this rank's GPU."""
        arguments.launch = 0  # the grid's own number tells launches apart, also replays of a captured one
        entry: Any = sm90.RANK_ARGUMENTS_STRUCT.ctype(
            bases=self._bases.data_ptr(),
            host_status=self._status.device_address,
            launch=arguments,
            maps=self._maps_for(arguments.l1_weight, arguments.l2_weight).data_ptr(),
            rank=self.rank,
        )
        self._grid.submit(entry, keep_alive, stream or torch.cuda.current_stream(self.device))

    def _maps_for(self, l1_weight: int, l2_weight: int) -> Tensor:
        maps = self._maps.get((l1_weight, l2_weight))
        if maps is None:
            encoded = bytearray(tensor_maps(self.layout, self.memory.data_ptr(), l1_weight, l2_weight))
            maps = torch.frombuffer(encoded, dtype=torch.uint8).to(self.device)
            torch.cuda.current_stream(self.device).synchronize()
            self._maps[l1_weight, l2_weight] = maps
        return maps

    def synchronize(self, timeout_s: float | None = None) -> bool:
        return self._grid.synchronize(timeout_s)

    def close(self) -> None:
        self._memories = []
        self._keep = None
        self._maps.clear()


def open_ranks(
    group: LocalGroup | DistributedGroup, layout: BufferLayout, max_workers: int | None = None
) -> list[Sm90Rank]:
    """Allocate the group's buffers and return the ranks that live here. Collective.

    Args:
        max_workers: CTAs a rank may have; None: all its share of the GPU.
    """
    check_config(layout.config)
    devices = devices_of(group)
    if isinstance(group, DistributedGroup):
        device = torch.device("cuda", torch.cuda.current_device())
        memories, keep = _symmetric_memory(group, layout.num_bytes, device)
        here = [group.rank]
    else:
        sm90.enable_peer_access(sorted(set(devices)))
        memories = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in devices]
        for gpu in set(devices):
            torch.cuda.synchronize(gpu)
        keep, here = None, list(range(group.num_ranks))
    own_devices = {
        rank: torch.cuda.current_device() if isinstance(group, DistributedGroup) else devices[rank] for rank in here
    }
    grids = {
        gpu: Grid(layout, gpu, [rank for rank in here if own_devices[rank] == gpu], max_workers)
        for gpu in sorted(set(own_devices.values()))
    }
    for gpu, grid in grids.items():  # loaded before anything spins
        for bring_up in (False, True):
            sm90.fused_kernel(gpu, len(grid.ranks), layout.config.l2_sf_granularity, bring_up)
    return [Sm90Rank(layout, rank, memories, grids[own_devices[rank]], keep) for rank in here]
