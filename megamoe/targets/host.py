"""The CPU target: real threads and processes in shared memory run the protocol; the arithmetic is an emulator's."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe import jit
from megamoe.config import MAX_RANKS, MegaMoEConfig
from megamoe.groups import Group
from megamoe.inspect.names import memfd_name
from megamoe.layout import (
    HOST_STATUS_STRUCT,
    BufferLayout,
    cpp_header,
    problem_struct,
)

ROLE_NAMES = ("dispatch", "table", "pull", "tiles", "combine")
"""Roles whose time a launch can report, in the order of ``csrc/host/roles.hpp``."""

# Native code is safe here: sums have a fixed order whatever the vector width, and the cache key holds the CPU's flags.
_OPTIONS = ("-march=native", "-Wall", "-Wextra")
_FOREVER_NS = 365 * 24 * 3600 * 10**9
_SIGNAL_CHECK_NS = 100 * 10**6  # the longest wait outside Python, which else would not hear Ctrl-C


def include_dirs() -> list[Any]:
    """Folders that every program over the protocol headers is compiled with."""
    return [jit.csrc_dir() / "protocol", jit.csrc_dir() / "host", jit.cccl_include_dir()]


def extra_options() -> tuple[str, ...]:
    """Options of test builds: MEGAMOE_HOST_OPTIONS, for example ``-DMEGAMOE_MUTATION=mask_bit_missing``."""
    return tuple(os.environ.get("MEGAMOE_HOST_OPTIONS", "").split())


@cache
def _library(options: tuple[str, ...]) -> ctypes.CDLL:
    artifact = jit.build_shared_library(
        "megamoe_host",
        [jit.csrc_dir() / "host" / "c_api.cpp"],
        generated={"buffer_layout.hpp": cpp_header()},
        options=(*_OPTIONS, *options),
        include_dirs=include_dirs(),
    )
    library = ctypes.CDLL(str(artifact.path))
    pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "megamoe_rank_create": (pointer, [pointer, pointer, u32, pointer, pointer]),
        "megamoe_rank_destroy": (None, [pointer]),
        "megamoe_stream_create": (pointer, [u32]),
        "megamoe_stream_destroy": (None, [pointer]),
        "megamoe_launch": (u64, [pointer, pointer, pointer]),
        "megamoe_wait": (ctypes.c_int, [pointer, u64, u64]),
        "megamoe_tile_count": (u64, [u32] * 5),
        "megamoe_tile_at": (None, [u32] * 6 + [pointer]),
        "megamoe_to_e4m3": (ctypes.c_uint8, [ctypes.c_float]),
        "megamoe_from_e4m3": (ctypes.c_float, [ctypes.c_uint8]),
        "megamoe_to_bf16": (ctypes.c_uint16, [ctypes.c_float]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def library() -> ctypes.CDLL:
    """The compiled target, built at first use."""
    return _library(extra_options())


def build_all(report: Callable[[str], None] = print, max_ranks: int = MAX_RANKS) -> None:
    """Compile the target: one library for any number of ranks."""
    report(f"host: {library()._name}")


# --- memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedMemory:
    """A rank's buffer: bytes that this process addresses, and the descriptor behind them (-1: another process's).

    Named memory is a memfd, reachable by other processes through ``/proc/<pid>/fd`` and gone with the last of them.
    """

    memory: Tensor
    descriptor: int

    @property
    def address(self) -> int:
        return int(self.memory.data_ptr())


def _map(descriptor: int, num_bytes: int) -> Tensor:
    # MAP_NORESERVE by default overcommit: untouched pages of a worst-case pool cost nothing.
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    except (OSError, OverflowError) as error:
        raise OSError(f"no memory for a buffer of {num_bytes} bytes: {error}") from error


def _machine_bytes() -> int:
    """Memory and swap of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("MemTotal:", "SwapTotal:")))


def _share(config: MegaMoEConfig, rank: int, num_bytes: int) -> SharedMemory:
    # The kernel's own rule for private memory: a memfd of any size is granted, and its pages are missed when touched.
    if num_bytes > (there := _machine_bytes()):
        raise OSError(
            f"no memory for a buffer of {num_bytes} bytes: this machine has {there} bytes, swap included; fewer "
            "experts, tokens or ranks need less"
        )
    descriptor = os.memfd_create(memfd_name(config, rank))
    try:
        os.ftruncate(descriptor, num_bytes)
        return SharedMemory(_map(descriptor, num_bytes), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _share_all(layout: BufferLayout) -> list[SharedMemory]:
    """Of every rank of a virtual group: memfds too, so that a hang of theirs can be looked at from outside."""
    shared: list[SharedMemory] = []
    try:
        for rank in range(layout.config.num_ranks):
            shared.append(_share(layout.config, rank, layout.num_bytes))
    except OSError:
        for memory in shared:
            os.close(memory.descriptor)
        raise
    return shared


def _attach(pid: int, descriptor: int, num_bytes: int) -> SharedMemory:
    mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return SharedMemory(_map(mine, num_bytes), -1)
    finally:
        os.close(mine)


def _allocate(group: Group, layout: BufferLayout) -> list[SharedMemory]:
    """The memory of every rank of the group, in rank order, zeroed. Collective."""
    num_bytes = layout.num_bytes
    if len(group.local_ranks) == group.num_ranks:
        return _share_all(layout)
    (rank,) = group.local_ranks
    try:
        own = _share(layout.config, rank, num_bytes)
    except OSError as error:
        _all_gather_or_fail(group, rank, error)  # the others must not wait for this rank
        raise
    try:
        offers = _all_gather_or_fail(group, rank, (os.getpid(), own.descriptor))
        try:
            memories = [
                own if other == rank else _attach(pid, descriptor, num_bytes)
                for other, (pid, descriptor) in enumerate(offers)
            ]
        except OSError as error:
            _all_gather_or_fail(group, rank, error)
            raise
        # Until here every rank must live, so that its descriptor can be opened.
        _all_gather_or_fail(group, rank, None)
    except BaseException:  # a peer died meanwhile
        os.close(own.descriptor)
        raise
    return memories


def _all_gather_or_fail(group: Group, rank: int, offer: object) -> list[Any]:
    """What each rank offers; where a rank offers an error, an error on all the others. Collective."""
    offers = group.all_gather(str(offer) if isinstance(offer, OSError) else (offer,))
    for other, given in enumerate(offers):
        if isinstance(given, str) and other != rank:
            raise OSError(f"rank {other} could not create its buffer: {given}")
    return [given[0] for given in offers if not isinstance(given, str)]


# --- launching ---------------------------------------------------------------------------------------------------


class HostStream:
    """Worker threads that run launches one after the other."""

    def __init__(self, num_workers: int = 1) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        self._library = library()
        self._handle: int | None = self._library.megamoe_stream_create(num_workers)
        if self._handle is None:
            raise OSError(f"num_workers: got {num_workers}, but the system gives no more threads")
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._kept: deque[tuple[int, object]] = deque()
        self.last_ticket = 0

    def launch(self, rank: HostRank, arguments: ctypes.Structure, keep_alive: object) -> int:
        """Queue a launch and return its ticket; ``keep_alive`` is held until it has ended."""
        if self._pid != os.getpid():
            raise ValueError(f"stream: got one whose threads are in process {self._pid}: a forked child cannot launch")
        with self._changed:
            if self._handle is None:
                raise ValueError("stream: got a closed HostStream, expected an open one")
            ticket = int(self._library.megamoe_launch(self._handle, rank.handle, ctypes.byref(arguments)))
            self._kept.append((ticket, keep_alive))
            self.last_ticket = ticket
            while self._kept[0][0] < ticket and self._library.megamoe_wait(self._handle, self._kept[0][0], 0):
                self._kept.popleft()
            return ticket

    def _ended(self, ticket: int, timeout_ns: int) -> bool:
        """Waits, and has a thread that closes the stream wait for this one."""
        with self._changed:
            if self._handle is None:  # closed, after every launch
                return True
            self._num_waiting += 1
        try:
            until = time.monotonic_ns() + timeout_ns
            while not self._library.megamoe_wait(self._handle, ticket, min(timeout_ns, _SIGNAL_CHECK_NS)):
                timeout_ns = until - time.monotonic_ns()
                if timeout_ns <= 0:
                    return False
            return True
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait for every launch so far. False when that took longer than ``timeout_s``."""
        if self._pid != os.getpid():  # the launches are the parent's
            return True
        ticket = self.last_ticket
        if not self._ended(ticket, _FOREVER_NS if timeout_s is None else int(timeout_s * 1e9)):
            return False
        with self._changed:  # of those that another thread queued meanwhile nothing is known
            while self._kept and self._kept[0][0] <= ticket:
                self._kept.popleft()
        return True

    def close(self) -> None:
        """End the workers, after the launches that were queued."""
        if self._pid != os.getpid():  # a forked child has the object, but not its threads
            self._handle = None
            return
        with self._changed:
            handle, self._handle = self._handle, None
            self._changed.wait_for(lambda: self._num_waiting == 0)
        if handle is not None:
            self._library.megamoe_stream_destroy(handle)
            self._kept.clear()

    def __del__(self) -> None:
        with suppress(AttributeError):  # not fully constructed
            self.close()


class HostRank:
    """One rank's buffer on the CPU, with the peers' buffers as this process addresses them."""

    device = torch.device("cpu")

    def __init__(self, layout: BufferLayout, rank: int, memories: Sequence[SharedMemory], stream: HostStream) -> None:
        self.layout = layout
        self.rank = rank
        self.memories = list(memories)
        self.status: Any = HOST_STATUS_STRUCT.ctype()
        self.stream = stream
        self._guest_streams: list[HostStream] = []
        self._library = library()
        bases = (ctypes.c_void_p * len(memories))(*[memory.address for memory in memories])
        problem, values = problem_struct(layout.config), layout.as_struct()
        self.handle = self._library.megamoe_rank_create(
            ctypes.byref(problem), ctypes.byref(values), rank, bases, ctypes.byref(self.status)
        )

    @property
    def memory(self) -> Tensor:
        """This rank's buffer, uint8 [num_bytes]."""
        return self.memories[self.rank].memory

    def peer_memory(self, rank: int) -> Tensor:
        """Another rank's buffer, uint8 [num_bytes]."""
        return self.memories[rank].memory

    def load(self) -> None:
        """Everything was loaded when the rank was made."""

    def launch(self, arguments: ctypes.Structure, keep_alive: object, stream: HostStream | None = None) -> bool:
        """Queue a launch on this rank's stream or another one. False: nothing is ever captured into a graph here."""
        if stream is not None and not isinstance(stream, HostStream):
            raise ValueError(f"stream: got {stream!r}, expected a HostStream or None")
        if stream is not None and stream is not self.stream and stream not in self._guest_streams:
            self._guest_streams.append(stream)
        (stream or self.stream).launch(self, arguments, keep_alive)
        return False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait for every launch so far, on whatever stream. False when one took longer than ``timeout_s``."""
        if not all(stream.synchronize(timeout_s) for stream in (self.stream, *self._guest_streams)):
            return False
        self._guest_streams.clear()
        return True

    def close(self) -> None:
        """Wait for the launches, then let go of the memory."""
        if self.handle is None:
            return
        self.synchronize()
        self.stream.close()
        self._library.megamoe_rank_destroy(self.handle)
        self.handle = None
        own = self.memories[self.rank].descriptor
        self.memories = []
        if own >= 0:
            os.close(own)

    def __del__(self) -> None:
        # A buffer that is dropped with a launch under way must not lose its memory to it.
        with suppress(AttributeError):  # not fully constructed
            self.close()


def open_ranks(group: Group, layout: BufferLayout, max_workers: int | None = None) -> list[HostRank]:
    """Allocate the group's buffers and return the ranks that live here. Collective.

    Args:
        max_workers: worker threads a rank may have; None: as many as the group says.

    Raises:
        OSError: a rank got no memory or no threads; on every rank.
    """
    workers = group.num_workers if max_workers is None else min(max_workers, group.num_workers)
    try:
        streams = [HostStream(workers) for _ in group.local_ranks]
    except OSError as error:
        if len(group.local_ranks) < group.num_ranks:
            _all_gather_or_fail(group, group.local_ranks[0], error)  # the others must not wait for this rank
        raise
    memories = _allocate(group, layout)
    return [HostRank(layout, rank, memories, stream) for rank, stream in zip(group.local_ranks, streams, strict=True)]
