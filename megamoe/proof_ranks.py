"""Virtual ranks on GPUs for the proof of the protocol: their buffers, launches and what can be read of them."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megamoe.buffer import RESET_REGIONS
from megamoe.config import MegaMoEConfig, Stage
from megamoe.faults import Fault, read_fault_records
from megamoe.layout import Region, buffer_layout
from megamoe.quant import E4M3
from megamoe.reference import RankInputs
from megamoe.targets import sm90

_DTYPES = {
    "e4m3": E4M3,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "u32": torch.int32,
    "i64": torch.int64,
    "u64": torch.int64,
}
_POISONED = ("l1_acts", "l1_acts_sf", "l1_topk_weights", "token_src_metadata", "l2_acts", "l2_acts_sf", "combine")
_ROLES = ("dispatch", "table", "pull", "tiles", "combine")
_POISON_BYTE = 0x5A
_DEADLINE_S = 20.0
_EXIT_HUNG = 3


@cache
def load_module(devices: tuple[int, ...]) -> sm90.Module:
    return sm90.Module(sm90.build("protocol_proof"), devices)


@cache
def _streams(device: int, side: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class ProofRanks:
    """R ranks, dealt out over the GPUs in runs of neighbours. One thread of the host drives them all."""

    def __init__(self, config: MegaMoEConfig, devices: Sequence[int], *, ctas_per_rank: int = 16) -> None:
        if config.num_ranks % len(devices):
            raise ValueError(f"num_ranks: got {config.num_ranks}, expected a multiple of {len(devices)} GPUs")
        self.config = config
        self.devices = tuple(devices)
        self.ctas_per_rank = ctas_per_rank
        self.layout = buffer_layout(config)
        self.device_of = [devices[rank * len(devices) // config.num_ranks] for rank in range(config.num_ranks)]
        self.module = load_module(self.devices)
        sm90.enable_peer_access(self.devices)
        self.memory = [
            torch.zeros(self.layout.num_bytes, dtype=torch.uint8, device=f"cuda:{device}") for device in self.device_of
        ]
        addresses = [memory.data_ptr() for memory in self.memory]
        self.bases = {device: torch.tensor(addresses, device=f"cuda:{device}") for device in self.devices}
        self.status = [sm90.HostStatus(device) for device in self.device_of]
        self.group_arguments = sm90.group_arguments(config)
        self.next_launch = 1
        self._synchronize_default()

    def _synchronize_default(self) -> None:
        """Allocations and fills are made on torch's default stream."""
        for device in self.devices:
            torch.cuda.default_stream(device).synchronize()

    @property
    def epoch(self) -> int:
        """Of the last launch that ended."""
        return max(status.words.completed_epoch for status in self.status)

    def view(self, rank: int, name: str) -> Tensor:
        region = self.layout[name]
        return self._bytes(rank, region).view(_DTYPES[region.dtype]).as_strided(region.shape, region.strides)

    def _bytes(self, rank: int, region: Region) -> Tensor:
        return self.memory[rank][region.offset : region.offset + region.num_bytes]

    def fetch(self, rank: int, name: str, *sizes: int) -> Tensor:
        """A region on the CPU; ``sizes`` cut its first dimensions down to what is in use."""
        cut = tuple(slice(size) for size in sizes)
        view = self.view(rank, name)
        return view[cut].contiguous().cpu() if cut else view.cpu()

    def fill(self, inputs: Sequence[RankInputs]) -> None:
        for rank, given in enumerate(inputs):
            with torch.cuda.stream(_streams(self.device_of[rank], False)):
                for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                    self.view(rank, name)[: given.num_tokens].copy_(getattr(given, name))

    def poison_pool(self) -> None:
        """What a launch has to write holds something else before it."""
        for rank, device in enumerate(self.device_of):
            with torch.cuda.stream(_streams(device, False)):
                for name in _POISONED:
                    self._bytes(rank, self.layout[name]).fill_(_POISON_BYTE)

    def prepare(
        self,
        stage: Stage,
        counts: Sequence[int],
        *,
        present: Iterable[int] | None = None,
        timeout_s: float = 2.0,
        side_stream: bool = False,
        counts_in_memory: bool = False,
        timed: bool = False,
    ) -> Call:
        """All that a launch of the ranks ``present`` (all) needs, so that nothing is allocated while others wait."""
        here = list(range(self.config.num_ranks)) if present is None else list(present)
        y, words, times = [], [], []
        for rank, count in enumerate(counts):
            where = f"cuda:{self.device_of[rank]}"
            y.append(torch.ones((count, self.config.hidden), dtype=torch.bfloat16, device=where))
            words.append(torch.tensor([count], dtype=torch.int32, device=where))
            times.append(torch.zeros(len(_ROLES), dtype=torch.int64, device=where))
        identity = 0 if all(grid_identity_is_usable(device) for device in self.devices) else self.next_launch
        self.next_launch += 1
        parts = []
        for device in self.devices:
            entries: list[ctypes.Structure] = []
            for rank in here:
                if self.device_of[rank] != device:
                    continue
                entry: Any = sm90.RANK_ARGUMENTS_STRUCT.ctype()
                entry.bases = self.bases[device].data_ptr()
                entry.own_base = self.memory[rank].data_ptr()
                entry.host_status = self.status[rank].device_address
                entry.rank = rank
                entry.launch.y = y[rank].data_ptr()
                entry.launch.num_tokens = counts[rank]
                entry.launch.num_tokens_word = words[rank].data_ptr() if counts_in_memory else 0
                entry.launch.role_times = times[rank].data_ptr() if timed else 0
                entry.launch.timeout_ns = int(timeout_s * 1e9)
                entry.launch.launch = identity
                entry.launch.stage = int(stage)
                entries.append(entry)
            if entries:
                parts.append(
                    _Part(
                        self.module.kernels[sm90.PROOF_KERNEL][device],
                        sm90.RankTable(device, entries),
                        len(entries) * self.ctas_per_rank,
                        _streams(device, side_stream),
                    )
                )
        self._synchronize_default()
        return Call(self, parts, y, words, times)

    def idle(self, *, side_stream: bool = False) -> bool:
        return all(_streams(device, side_stream).query() for device in self.devices)

    def wait(self, *, side_stream: bool = False) -> None:
        """Until the launches have ended. Ends the process, with what can be read, when they do not."""
        end = time.monotonic() + _DEADLINE_S
        while not self.idle(side_stream=side_stream):
            if time.monotonic() > end:
                self._give_up()
            time.sleep(20e-6)

    def _give_up(self) -> None:
        """A kernel that does not end holds its stream and this process's memory for ever."""
        print(f"HUNG: launches did not end within {_DEADLINE_S} s", file=sys.stderr, flush=True)
        threading.Timer(10, os._exit, (_EXIT_HUNG,)).start()
        for rank in range(self.config.num_ranks):
            words = {}
            for name in ("epoch", "in_use", "abort", "table_ready", "claims", "launch_decisions"):
                with torch.cuda.stream(_streams(self.device_of[rank], True)):
                    seen = self.view(rank, name).flatten()
                words[name] = [hex(word) for word in seen.cpu().tolist() if word]
            print(f"rank {rank}: {words} {self.fault_text(rank)}", file=sys.stderr, flush=True)
        os._exit(_EXIT_HUNG)

    def faults(self, rank: int) -> list[Fault]:
        counted = int(self.fetch(rank, "fault_count")[0])
        return read_fault_records(counted, self.fetch(rank, "fault_records"))

    def fault_text(self, rank: int) -> str:
        return "; ".join(fault.describe(self.config) for fault in self.faults(rank)) or "no fault recorded"

    def reset(self) -> None:
        """As DESIGN.md says it: nothing runs, counters and banks clear, the same new epoch everywhere, abort last."""
        self.wait()
        self.wait(side_stream=True)
        highest = max(int(self.fetch(rank, "epoch")[0]) for rank in range(self.config.num_ranks))
        for rank in range(self.config.num_ranks):
            for name in (*RESET_REGIONS, "abort"):
                self._bytes(rank, self.layout[name]).zero_()
            self.view(rank, "epoch").fill_(highest + 1)
            self.status[rank].clear()
            self.status[rank].words.completed_epoch = highest + 1
        self._synchronize_default()

    def time_us(self, call: Call, launches: int) -> float:
        """Microseconds a launch, of launches back to back in one graph; of several GPUs the slowest one's."""
        graphs = call.capture(launches)
        graphs.replay()
        self.wait()
        call.clear_times()
        pairs = []
        for device in self.devices:
            with torch.cuda.device(device):
                pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        for device, (start, _) in zip(self.devices, pairs, strict=True):
            start.record(_streams(device, False))
        graphs.replay()
        for device, (_, end) in zip(self.devices, pairs, strict=True):
            end.record(_streams(device, False))
        self.wait()
        call.timed_launches = launches
        return max(start.elapsed_time(end) for start, end in pairs) * 1000 / launches


@dataclass(frozen=True)
class _Part:
    """What a call launches on one GPU."""

    kernel: sm90.Kernel
    table: sm90.RankTable
    num_ctas: int
    stream: torch.cuda.Stream


class Call:
    """A prepared launch, to be launched any number of times. ``y`` is bf16 [count, hidden] of each rank."""

    def __init__(
        self, ranks: ProofRanks, parts: Sequence[_Part], y: list[Tensor], words: list[Tensor], times: list[Tensor]
    ) -> None:
        self.y = y
        self._ranks, self._parts, self._words, self._times = ranks, parts, words, times
        self.timed_launches = 0

    def launch(self) -> None:
        for part in self._parts:
            self._launch(part)

    def _launch(self, part: _Part) -> None:
        arguments = (
            self._ranks.group_arguments,
            ctypes.c_uint64(part.table.address),
            ctypes.c_uint32(part.table.num_ranks),
        )
        part.kernel.launch(part.num_ctas, sm90.PROOF_THREADS, arguments, part.stream)

    def capture(self, launches: int = 1) -> Graphs:
        """The same launch, so many times after each other, as a CUDA graph for each GPU."""
        graphs = []
        for part in self._parts:
            graph = torch.cuda.CUDAGraph()
            device = part.kernel.device
            with (
                torch.cuda.device(device),
                torch.cuda.graph(graph, stream=part.stream, capture_error_mode="relaxed"),
            ):
                for _ in range(launches):
                    self._launch(part)
            graphs.append((device, part.stream, graph))
        return Graphs(graphs)

    def set_counts(self, counts: Sequence[int]) -> None:
        """Token counts that the next launch reads from device memory."""
        for rank, count in enumerate(counts):
            with torch.cuda.stream(_streams(self._ranks.device_of[rank], False)):
                self._words[rank].fill_(count)

    def clear_times(self) -> None:
        for times in self._times:
            times.zero_()
        for device in self._ranks.devices:
            torch.cuda.default_stream(device).synchronize()

    def role_us(self) -> dict[str, float]:
        """Microseconds that a CTA spends in each role of a launch: the mean of the CTAs of all ranks."""
        total = torch.stack([times.cpu() for times in self._times]).sum(dim=0).double()
        ctas = len(self._times) * self._ranks.ctas_per_rank * self.timed_launches
        return dict(zip(_ROLES, (total / ctas / 1000).tolist(), strict=True))


@dataclass(frozen=True)
class Graphs:
    """One captured launch for each GPU."""

    parts: Sequence[tuple[int, torch.cuda.Stream, torch.cuda.CUDAGraph]]

    def replay(self) -> None:
        for device, stream, graph in self.parts:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                graph.replay()


@cache
def identity_numbers(device: int) -> tuple[list[int], list[int], bool]:
    """%gridid of launches on two streams in turn, then of replays of one graph; and whether CTAs of a launch agreed."""
    launches, replays, ctas = 16, 6, 8
    kernel = load_module((device,)).kernels[sm90.IDENTITY_KERNEL][device]
    seen = torch.zeros((launches + 1, ctas), dtype=torch.int64, device=f"cuda:{device}")
    torch.cuda.default_stream(device).synchronize()
    for index in range(launches):
        kernel.launch(ctas, 32, [ctypes.c_uint64(seen[index].data_ptr())], _streams(device, bool(index % 2)))
    stream = _streams(device, False)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        kernel.launch(ctas, 32, [ctypes.c_uint64(seen[launches].data_ptr())], stream)
    rows = list(seen[:launches].cpu())
    for _ in range(replays):
        with torch.cuda.device(device), torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()
        rows.append(seen[launches].cpu())
    numbers = [int(row[0]) for row in rows]
    uniform = all(bool((row == row[0]).all()) for row in rows)
    return numbers[:launches], numbers[launches:], uniform


@cache
def grid_identity_is_usable(device: int) -> bool:
    """Launches that can overlap differ. A graph never overlaps its own replays, so these may repeat a number."""
    eager, replayed, uniform = identity_numbers(device)
    return uniform and len(set(eager)) == len(eager) and not set(eager) & set(replayed)
