"""Target sm90 without a GPU: its Python runs as it is, over CPU memory, and the host emulator stands in for the kernel.

    python tests/fake_cuda.py SCRIPT ARGUMENTS...        runs a script so, for example one of a phase with --target sm90

What this shows is everything but the kernel, the driver and CUDA's own rules; torch's work happens at once here.
"""

from __future__ import annotations

import ctypes
import itertools
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import MegaMoEConfig, groups
from megamoe.layout import HOST_STATUS_STRUCT
from megamoe.targets import host, sm90, sm90_ranks

NUM_GPUS = 2
NUM_SMS = 132
DEFAULT_STREAM = 0x100
_launch_numbers = itertools.count(1 << 50)


class FakeHostStatus:
    """`sm90.HostStatus` in ordinary memory."""

    def __init__(self, device: int) -> None:
        self.words: Any = HOST_STATUS_STRUCT.ctype()
        self.device_address = ctypes.addressof(self.words)

    def close(self) -> None:
        pass


class FakeStream:
    """`torch.cuda.Stream`: a number, which launches carry."""

    numbers = itertools.count(0x200)

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = next(self.numbers)

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        time.sleep(0.3)  # for a launch that ends at once

    def query(self) -> bool:
        return True


class FakeGraph:
    """`torch.cuda.CUDAGraph`: what was launched while it captured, with the arguments of then."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@dataclass
class FakeGpus:
    """What was done, and the state of the stand-ins.

    Attributes:
        kernels: (GPU, ranks, granularity, bring-up, fast) that were loaded.
        launched: of those, what each grid ran, captured or not.
        grids: (GPU, ranks, CTAs, CTAs of a cluster) of every grid that was started, captured or not.
        capturing: the graph that captures, if one does.
        stream: what the current stream is said to be.
    """

    kernels: list[tuple[int, int, int, bool, bool]] = field(default_factory=list)
    launched: list[tuple[int, int, int, bool, bool]] = field(default_factory=list)
    grids: list[tuple[int, tuple[int, ...], int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    capturing: FakeGraph | None = None
    stream: int = DEFAULT_STREAM
    current: int = 0
    _handles: dict[tuple[object, ...], Any] = field(default_factory=dict)
    _streams: dict[tuple[int, int], host.HostStream] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    _started: Counter[tuple[bytes, int]] = field(default_factory=Counter)

    def synchronize(self, device: object = None) -> None:
        assert self.capturing is None, "a wait while a graph is captured"
        for stream in self._streams.values():
            stream.synchronize()
        self._started.clear()

    def wait_if_all_started(self, entries: list[Any], num_ranks: int) -> None:
        """Torch's work happens at once here, so what follows on a stream would not wait: wait as soon as nobody can be
        waited for in vain, which is when every rank has been launched equally often."""
        bases = bytes((ctypes.c_void_p * num_ranks).from_address(entries[0].bases))
        for entry in entries:
            self._started[bases, entry.rank] += 1
        elsewhere = dist.is_initialized() and len(entries) < num_ranks
        if elsewhere or len({self._started[bases, rank] for rank in range(num_ranks)}) == 1:
            self.synchronize()

    def run(self, entry: Any, group: Any, workers: int, stream_number: int) -> None:
        """One rank's launch on the emulator."""
        bases = (ctypes.c_void_p * group.problem.num_ranks).from_address(entry.bases)
        key = (bytes(group), bytes(bases), entry.host_status, entry.rank)  # memory is used again by later buffers
        if key not in self._handles:
            problem, layout = type(group.problem).from_buffer_copy(group.problem), type(group.layout)()
            ctypes.pointer(layout)[0] = group.layout
            handle = host.library().megamoe_rank_create(
                ctypes.byref(problem), ctypes.byref(layout), entry.rank, bases, ctypes.c_void_p(entry.host_status)
            )
            self._handles[key] = SimpleNamespace(handle=handle)
            self.kept.append((problem, layout))
        place = (bases[entry.rank], stream_number)
        if place not in self._streams:
            self._streams[place] = host.HostStream(min(2, workers))
        stream = self._streams[place]
        arguments = type(entry.launch).from_buffer_copy(entry.launch)
        arguments.launch = next(_launch_numbers)
        stream.launch(self._handles[key], arguments, None)


class FakeKernel:
    def __init__(self, gpus: FakeGpus, variant: tuple[int, int, int, bool, bool], cluster: int) -> None:
        self.gpus = gpus
        self.variant = variant
        self.cluster = cluster
        self.device = variant[0]

    def launch_packed(self, num_ctas: int, num_threads: int, packed: sm90.PackedArguments, stream: int) -> None:
        group, table = packed._arguments
        entries = [type(entry).from_buffer_copy(entry) for entry in table]
        assert num_threads == sm90.FUSED_THREADS
        assert num_ctas % len(entries) == 0
        assert num_ctas <= NUM_SMS
        self.gpus.launched.append(self.variant)
        self.gpus.grids.append((self.device, tuple(entry.rank for entry in entries), num_ctas, self.cluster))

        def start() -> None:
            for entry in entries:
                self.gpus.run(entry, group, num_ctas // len(entries), stream)
            self.gpus.wait_if_all_started(entries, group.problem.num_ranks)

        if self.gpus.capturing is None:
            start()
        else:
            self.gpus.capturing.launches.append(start)


def encode(matrix: sm90_ranks._Matrix) -> bytes:
    """The rules of cuTensorMapEncodeTiled, and an address that tells maps apart."""
    assert matrix.address % 16 == 0, matrix
    assert matrix.pitch_bytes % 16 == 0, matrix
    assert matrix.pitch_bytes >= matrix.inner * matrix.item_bytes, matrix
    assert 0 < matrix.box_inner <= 256, matrix
    assert 0 < matrix.box_outer <= 256, matrix
    assert matrix.box_inner * matrix.item_bytes % 16 == 0, matrix
    assert not matrix.swizzled or matrix.box_inner * matrix.item_bytes <= 128, matrix
    return matrix.address.to_bytes(8, "little") * 16


def _shared_memory(group: groups.DistributedGroup, num_bytes: int, gpu: int) -> tuple[list[Tensor], object]:
    any_config = MegaMoEConfig(group.num_ranks, group.num_ranks, 1, 128, 128, 1)  # is in the memory's name alone
    layout: Any = SimpleNamespace(config=any_config, num_bytes=num_bytes)
    memories = host._allocate(group, layout)
    return [shared.memory for shared in memories], memories


def replacements(gpus: FakeGpus) -> list[tuple[object, str, object]]:
    """(module or class, name, stand-in) of all that needs a GPU."""
    memory: dict[int, Any] = {}

    # Kept until the end: a launch may still run when a test drops its buffer, which on a GPU the stream's order covers.
    def plain_memory(num_bytes: int, gpu: int) -> Tensor:
        gpus.kept.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return gpus.kept[-1]

    def host_status(device: int) -> FakeHostStatus:
        gpus.kept.append(FakeHostStatus(device))
        return gpus.kept[-1]

    def allocate(device: int, num_bytes: int) -> int:
        block = (ctypes.c_char * num_bytes)()
        memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def copy_to_device(device: int, address: int, data: bytes) -> None:
        gpus.copies.append((address, len(data)))
        ctypes.memmove(address, data, len(data))

    def fused_kernel(
        device: int, ranks_here: int, l2_sf_granularity: int, bring_up: bool, fast: bool, cluster: int
    ) -> FakeKernel:
        variant = (device, ranks_here, l2_sf_granularity, bring_up, fast)
        gpus.kernels.append(variant)
        return FakeKernel(gpus, variant, cluster)

    @contextmanager
    def graph(captured: FakeGraph, **options: object) -> Iterator[None]:
        gpus.capturing = captured
        try:
            yield
        finally:
            gpus.capturing = None

    def set_device(device: int) -> None:
        gpus.current = device

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        before, gpus.stream = gpus.stream, stream.cuda_stream
        try:
            yield
        finally:
            gpus.stream = before

    @contextmanager
    def on_device(device: object) -> Iterator[None]:
        yield

    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    return [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: NUM_GPUS),
        (torch.cuda, "current_device", lambda: gpus.current),
        (torch.cuda, "set_device", set_device),
        (torch.cuda, "synchronize", gpus.synchronize),
        (torch.cuda, "memory_reserved", lambda device: 0),
        (
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(**vars(properties), uuid=f"GPU-{device}"),
        ),
        (torch.cuda, "CUDAGraph", FakeGraph),
        (torch.cuda, "Stream", FakeStream),
        (torch.cuda, "current_stream", lambda device=None: FakeStream()),
        (torch.cuda, "stream", on_stream),
        (torch.cuda, "device", on_device),
        (Tensor, "cuda", lambda tensor: tensor),
        (torch.cuda, "graph", graph),
        (sm90, "enable_peer_access", lambda devices: None),
        (sm90, "HostStatus", host_status),
        (sm90, "allocate", allocate),
        (sm90, "free", lambda device, address: memory.pop(address)),
        (sm90, "copy_to_device", copy_to_device),
        (sm90, "fused_kernel", fused_kernel),
        (sm90, "fill_kernel", lambda device, dtype: None),  # the device of a buffer is the CPU here
        (sm90_ranks, "_encode", encode),
        (sm90_ranks, "_plain_memory", plain_memory),
        (sm90_ranks, "_symmetric_memory", _shared_memory),
        (sm90_ranks, "_current_stream", lambda device: gpus.stream),
        (sm90_ranks, "_is_capturing", lambda stream: gpus.capturing is not None),
        (sm90_ranks.Grid, "_wait", lambda grid: gpus.synchronize()),
        (sm90_ranks.Grid, "_order", lambda grid, first, *, then: None),
        (groups.DistributedGroup, "target", "sm90"),
    ]


def main() -> None:
    for owner, name, stand_in in replacements(FakeGpus()):
        setattr(owner, name, stand_in)
    from phases.support import ranks

    ranks._BACKENDS["sm90"] = "gloo"
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
