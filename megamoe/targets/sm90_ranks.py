"""Ranks on GPUs: their symmetric memory, tensor maps and launches of the fused kernel.

All ranks of one GPU run as one grid whose CTAs are dealt out to them. A real rank is the same with one rank in the
grid; virtual ranks wait in a queue until each rank of the GPU has a launch, so that they start together.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.config import MegaMoEConfig, Stage, ceil_div
from megamoe.groups import DistributedGroup, LocalGroup
from megamoe.layout import BufferLayout, Region
from megamoe.targets import sm90

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 128
"""The tile of csrc/sm90/shared_storage.hpp."""
BOX_ROWS, BOX_COLUMNS = 64, 128
MAX_HIDDEN = 16384
_MAP_BYTES = 128
_MAPS_BYTES = 6 * _MAP_BYTES
_MAPS_IN_CHUNK = 64
_VECTOR_BYTES = 16
_LAST_STAGE = int(Stage.COMBINE)


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


def _plain_memory(num_bytes: int, gpu: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=torch.device("cuda", gpu))


def _symmetric_memory(group: DistributedGroup, num_bytes: int, gpu: int) -> tuple[list[Tensor], object]:
    """Every rank's buffer of a process group, as this GPU addresses it, and what keeps them mapped. Collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    if group.num_ranks == 1:
        return [_plain_memory(num_bytes, gpu)], None
    own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", gpu))
    own.zero_()
    handle = symmetric_memory.rendezvous(own, group.process_group)
    torch.cuda.synchronize(gpu)
    group.barrier()
    return [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.num_ranks)], (own, handle)


def _own_device(group: DistributedGroup) -> int:
    """This process's current GPU. Collective.

    Raises:
        ValueError: on every rank, if two of them have the same one.
    """
    device = torch.cuda.current_device()
    uuids = group.all_gather(str(torch.cuda.get_device_properties(device).uuid))
    for rank, uuid in enumerate(uuids):
        if uuids.index(uuid) != rank:
            raise ValueError(
                f"group: got ranks {uuids.index(uuid)} and {rank} on one GPU ({uuid}), expected one GPU a rank: call "
                "torch.cuda.set_device(local rank) first"
            )
    return device


def _virtual_devices(group: LocalGroup) -> list[int]:
    """The GPU of every virtual rank, in blocks over the GPUs of the group."""
    there = torch.cuda.device_count()
    if there == 0:
        raise ValueError("target sm90: torch sees no GPU; megamoe doctor says what is missing")
    gpus = there if group.num_gpus is None else group.num_gpus
    if not 1 <= gpus <= there:
        raise ValueError(f"num_gpus: got {gpus}, expected 1 to the {there} GPUs of this machine")
    gpus = min(gpus, group.num_ranks)
    return [rank * gpus // group.num_ranks for rank in range(group.num_ranks)]


class MapStore:
    """Tensor maps of one rank in its GPU's memory, one set for each pair of weights that it was launched with.

    Keyed by address: shapes come from the config, so other weights at an address that is used again have the same maps.
    A set stays until the buffer is closed, since a captured graph may hold its address.
    """

    def __init__(self, device: int, encode: Callable[[int, int], bytes]) -> None:
        self._device = device
        self._encode = encode
        self._sets: dict[tuple[int, int], int] = {}
        self._chunks: list[int] = []

    def address(self, l1_weight: int, l2_weight: int) -> int:
        """Where ``TensorMaps`` for these weights lie."""
        found = self._sets.get((l1_weight, l2_weight))
        return self._add(l1_weight, l2_weight) if found is None else found

    def _add(self, l1_weight: int, l2_weight: int) -> int:
        place = len(self._sets) % _MAPS_IN_CHUNK
        if place == 0:
            self._chunks.append(sm90.allocate(self._device, _MAPS_IN_CHUNK * _MAPS_BYTES))
        address = self._chunks[-1] + place * _MAPS_BYTES
        sm90.copy_to_device(self._device, address, self._encode(l1_weight, l2_weight))
        self._sets[l1_weight, l2_weight] = address
        return address

    def close(self) -> None:
        for chunk in self._chunks:
            sm90.free(self._device, chunk)
        self._chunks.clear()
        self._sets.clear()


# --- launching ---------------------------------------------------------------------------------------------------


def _current_stream(device: int) -> int:
    """The stream as the driver knows it: torch's own object for it costs ten times as much."""
    return torch._C._cuda_getCurrentRawStream(device)


def _is_capturing(stream: int) -> bool:
    status, capture = sm90._driver().cuStreamIsCapturing(stream)
    if status:  # CUDA_SUCCESS is 0, and so is CU_STREAM_CAPTURE_STATUS_NONE
        raise RuntimeError(f"cuStreamIsCapturing({stream:#x}): {status.name}")
    return bool(capture)


@dataclass(frozen=True)
class _Waiting:
    """A rank's launch that waits for those of the other ranks of its grid."""

    entry: Any
    keep_alive: object
    stream: int
    captured: bool


@dataclass(frozen=True)
class _Program:
    """What launches some of a grid's ranks: a launch copies the packed arguments and the table that they point at."""

    kernel: sm90.Kernel
    table: Any
    packed: sm90.PackedArguments
    num_ctas: int


class Grid:
    """The ranks of one GPU that are launched together.

    As with every kernel that torch launches, the stream's order is what protects tensors: one that is freed while the
    launch runs is used again only behind it, unless another stream takes it (``Tensor.record_stream``).
    """

    def __init__(self, layout: BufferLayout, device: int, ranks: Sequence[int], max_ctas: int | None) -> None:
        self.layout = layout
        self.device = device
        self.ranks = list(ranks)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        ctas = sms if max_ctas is None else min(sms, max_ctas * len(self.ranks))
        of_each = max(1, ctas // len(self.ranks))
        # Two CTAs of a cluster load the weights of two tiles together (csrc/sm90/roles/load.hpp).
        self._cluster = min(2, of_each)
        self.ctas_per_rank = of_each // self._cluster * self._cluster
        self._waiting: dict[int, deque[_Waiting]] = {rank: deque() for rank in self.ranks}
        self._group = sm90.group_arguments(layout.config)
        self._programs: dict[tuple[int, bool], _Program] = {}
        self.fill_kernels: dict[torch.dtype, sm90.Kernel] = {}
        self._streams: set[int] = set()  # with launches that nobody waited for
        self._captured = False

    def load(self) -> None:
        """Load the kernels of the whole grid, and make what must not be made while a graph is captured."""
        sm90.copy_stream(self.device)
        for bring_up in (False, True):  # anew: the build options may be others now
            self._add_program(len(self.ranks), bring_up)
        for dtype in sm90.FILL_KERNELS:
            self.fill_kernels[dtype] = sm90.fill_kernel(self.device, dtype)

    def _add_program(self, num_ranks: int, bring_up: bool) -> _Program:
        config = self.layout.config
        fast = config.accumulate == "fast"
        kernel = sm90.fused_kernel(self.device, num_ranks, config.l2_sf_granularity, bring_up, fast, self._cluster)
        table = sm90.rank_table_type(num_ranks)()
        packed = sm90.PackedArguments([self._group, table])
        program = _Program(kernel, table, packed, self.ctas_per_rank * num_ranks)
        self._programs[num_ranks, bring_up] = program
        return program

    def submit(self, entry: Any, keep_alive: object, stream: int) -> bool:
        """Queue a rank's launch, copying its arguments; the grid starts once every rank of the GPU has one. True: it is
        captured into a graph."""
        captured = _is_capturing(stream)
        if len(self.ranks) == 1:  # waits for nobody, and the launch copies the entry
            self._run((entry,), stream, captured)
            return captured
        copied = type(entry).from_buffer_copy(entry)
        self._waiting[entry.rank].append(_Waiting(copied, keep_alive, stream, captured))
        if all(self._waiting.values()):
            self._start([self._waiting[rank].popleft() for rank in self.ranks])
        return captured

    def flush(self) -> None:
        """Start what waits, although some ranks have nothing: they do not launch, and the others will say so."""
        while present := [rank for rank in self.ranks if self._waiting[rank]]:
            self._start([self._waiting[rank].popleft() for rank in present])

    def _start(self, launches: Sequence[_Waiting]) -> None:
        captured = launches[0].captured
        if any(launch.captured != captured for launch in launches):
            raise RuntimeError(
                f"ranks {[launch.entry.rank for launch in launches]} of one GPU start together, but only some of their "
                "launches are captured into a graph: capture the launches of all ranks, or of none"
            )
        stream = launches[0].stream
        others = {launch.stream for launch in launches} - {stream}
        for other in others:
            self._order(other, then=stream)
        self._run([launch.entry for launch in launches], stream, captured)
        for other in others:
            self._order(stream, then=other)

    def _run(self, entries: Sequence[Any], stream: int, captured: bool) -> None:
        """Launch the grid of these ranks."""
        bring_up = False
        for entry in entries:
            launch = entry.launch
            if launch.stage != _LAST_STAGE or launch.debug:
                bring_up = True
        num_ranks = len(entries)
        program = self._programs.get((num_ranks, bring_up)) or self._add_program(num_ranks, bring_up)
        program.table[:] = entries
        program.kernel.launch_packed(program.num_ctas, sm90.FUSED_THREADS, program.packed, stream)
        if captured:
            self._captured = True
        else:
            self._streams.add(stream)

    def _order(self, first: int, *, then: int) -> None:
        """What comes next on stream ``then`` runs after what is on stream ``first`` now."""
        with sm90.on_device(self.device):
            event = sm90._call("cuEventCreate", sm90._driver().CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
            sm90._call("cuEventRecord", event, first)
            sm90._call("cuStreamWaitEvent", then, event, 0)
            sm90._call("cuEventDestroy", event)  # once it has happened

    def synchronize(self, timeout_s: float | None) -> bool:
        """Wait for every launch so far, replays of captured ones too. False when that took longer than ``timeout_s``.

        Raises:
            ValueError: a graph is being captured; its launches have not run.
        """
        if _is_capturing(_current_stream(self.device)):
            raise ValueError("check: got a call while a graph is captured, expected one outside of the capture")
        self.flush()
        if timeout_s is None:
            self._wait()
        else:
            waiting = threading.Thread(target=self._wait, daemon=True)
            waiting.start()
            waiting.join(timeout_s)
            if waiting.is_alive():
                return False
        return True

    def _wait(self) -> None:
        if self._captured:  # replays may be on any stream
            torch.cuda.synchronize(self.device)
        else:
            with sm90.on_device(self.device):
                for stream in tuple(self._streams):
                    sm90._call("cuStreamSynchronize", stream)
        self._streams.clear()


class Sm90Rank:
    """One rank's buffer on a GPU, with the peers' buffers as that GPU addresses them."""

    def __init__(self, layout: BufferLayout, rank: int, memories: Sequence[Tensor], grid: Grid, keep: object) -> None:
        self.layout = layout
        self.rank = rank
        self.device = memories[rank].device
        self._memories = list(memories)
        self._grid = grid
        self._keep = keep
        self._status = sm90.HostStatus(grid.device)
        self._bases = torch.tensor([memory.data_ptr() for memory in memories], dtype=torch.int64, device=self.device)
        base = self.memory.data_ptr()
        self._maps = MapStore(grid.device, lambda l1, l2: tensor_maps(layout, base, l1, l2))
        self._entry: Any = sm90.RANK_ARGUMENTS_STRUCT.ctype(
            bases=self._bases.data_ptr(), own_base=base, host_status=self._status.device_address, rank=rank
        )

        self._fill_arguments = self._fill_struct()
        self._packed_fill = sm90.PackedArguments([self._fill_arguments])
        self._max_fill_ctas = 8 * torch.cuda.get_device_properties(grid.device).multi_processor_count

    def _fill_struct(self) -> Any:
        base, config = self.memory.data_ptr(), self.layout.config
        return sm90.FILL_ARGUMENTS_STRUCT.ctype(
            to_x=base + self.layout["x"].offset,
            to_x_sf=base + self.layout["x_sf"].offset,
            to_topk_idx=base + self.layout["topk_idx"].offset,
            to_topk_weights=base + self.layout["topk_weights"].offset,
            num_topk=config.num_topk,
            hidden=config.hidden,
            x_sf_stride=self.layout["x_sf"].strides[0],
        )

    def fill(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, routed_scaling_factor: float, ue8m0: bool
    ) -> None:
        """`SymmBuffer.fill` as one launch on the current stream; its arguments are checked there."""
        tokens, hidden = x.shape
        if tokens == 0:
            return
        row_stride, column_stride = x.stride()
        address = x.data_ptr()
        if column_stride != 1 or (row_stride * x.element_size()) % _VECTOR_BYTES or address % _VECTOR_BYTES:
            x = x.clone(memory_format=torch.contiguous_format)
            row_stride, address = hidden, x.data_ptr()
        topk_idx, topk_weights = topk_idx.contiguous(), topk_weights.contiguous()
        arguments = self._fill_arguments
        arguments.x = address
        arguments.topk_idx = topk_idx.data_ptr()
        arguments.topk_weights = topk_weights.data_ptr()
        arguments.x_stride = row_stride
        arguments.num_tokens = tokens
        arguments.wide_ids = topk_idx.dtype == torch.int64
        arguments.ue8m0 = ue8m0
        arguments.routed_scaling_factor = routed_scaling_factor
        groups = tokens * (hidden // BLOCK_K)
        ctas = min(ceil_div(groups, sm90.FILL_GROUPS_PER_CTA), self._max_fill_ctas)
        kernel, stream = self._grid.fill_kernels[x.dtype], _current_stream(self._grid.device)
        kernel.launch_packed(ctas, sm90.FILL_THREADS, self._packed_fill, stream)

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

    def load(self) -> None:
        """Load every kernel that launches on this rank may need."""
        self._grid.load()

    def launch(self, arguments: Any, keep_alive: object, stream: torch.cuda.Stream | None = None) -> bool:
        """Put a launch on ``stream``, or on the current stream of this rank's GPU. True: a graph captures it."""
        arguments.launch = 0  # the grid's own number tells launches apart, also replays of a captured one
        entry = self._entry
        entry.launch = arguments
        entry.maps = self._maps.address(arguments.l1_weight, arguments.l2_weight)
        return self._grid.submit(
            entry, keep_alive, _current_stream(self._grid.device) if stream is None else stream.cuda_stream
        )

    def synchronize(self, timeout_s: float | None = None) -> bool:
        return self._grid.synchronize(timeout_s)

    def close(self) -> None:
        """After `synchronize`: give back what no view holds."""
        self._memories = []
        self._keep = None
        self._maps.close()
        self._status.close()


def open_ranks(
    group: LocalGroup | DistributedGroup, layout: BufferLayout, max_workers: int | None = None
) -> list[Sm90Rank]:
    """Allocate the group's buffers and return the ranks that live here. Collective.

    Args:
        max_workers: CTAs a rank may have; None: all its share of the GPU.
    """
    check_config(layout.config)
    keep: object = None
    if isinstance(group, DistributedGroup):
        gpu = _own_device(group)
        here = {group.rank: gpu}
        memories, keep = _symmetric_memory(group, layout.num_bytes, gpu)
    else:
        here = dict(enumerate(_virtual_devices(group)))
        sm90.enable_peer_access(sorted(set(here.values())))
        memories = [_plain_memory(layout.num_bytes, gpu) for gpu in here.values()]
        for gpu in set(here.values()):
            torch.cuda.synchronize(gpu)
    grids = {
        gpu: Grid(layout, gpu, [rank for rank, own in here.items() if own == gpu], max_workers)
        for gpu in sorted(set(here.values()))
    }
    for grid in grids.values():  # loaded before anything spins
        grid.load()
    return [Sm90Rank(layout, rank, memories, grids[gpu], keep) for rank, gpu in here.items()]
