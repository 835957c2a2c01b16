"""Symmetric buffers: the memory of one rank with its views, inputs, faults and life cycle."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.config import MegaMoEConfig, is_count
from megamoe.dynamo import untraced
from megamoe.faults import Fault, MegaMoEFault, read_fault_records
from megamoe.groups import DistributedGroup, LocalGroup, VirtualGroup, as_group
from megamoe.layout import LAUNCH_STRUCT, MAX_FAULT_RECORDS, NUM_BANKS, BufferLayout, Region, buffer_layout
from megamoe.quant import check_memory, describe, is_fp32, quantize_activations
from megamoe.targets import get_target
from megamoe.weights import L1Weights, L2Weights

DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "u32": torch.uint32,
    "i64": torch.int64,
    "u64": torch.uint64,
}
"""Of the dtype names of the layout."""
DEBUG_VIEWS = (
    "x",
    "x_sf",
    "topk_idx",
    "topk_weights",
    "l1_acts",
    "l1_acts_sf",
    "l1_topk_weights",
    "expert_recv_count_sum",
    "l1_arrival_count",
    "token_src_metadata",
    "l1_accum_debug",
    "l2_acts",
    "l2_acts_sf",
    "l2_arrival_mask",
    "combine",
)
"""Views that a user may read, in pipeline order; ``y`` is the caller's own tensor."""

RESET_REGIONS = (
    "claims",
    "l1_arrival_count",
    "l2_arrival_mask",
    "expert_progress",
    "in_use",
    "launch_decisions",
    "fault_count",
    "fault_records",
)


MAX_TIMEOUT_S = 1e9
_KNOWN_WEIGHTS = 256
_TOKEN_DTYPES = (torch.bfloat16, torch.float32)
_ID_DTYPES = (torch.int32, torch.int64)


class _Process:
    """This process, known without the system call that a launch would pay for: it is dear in a sandbox (gVisor)."""

    pid = os.getpid()

    @classmethod
    def note_fork(cls) -> None:
        cls.pid = os.getpid()


os.register_at_fork(after_in_child=_Process.note_fork)


def default_timeout_s() -> float:
    """MEGAMOE_TIMEOUT_S, or 300: how long a wait on the device may take."""
    text = os.environ.get("MEGAMOE_TIMEOUT_S", "300")
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"MEGAMOE_TIMEOUT_S: got {text!r}, expected seconds") from error


_Addresses = tuple[int, int, int, int]
_Layouts = tuple[tuple[torch.Size, tuple[int, ...]], ...]


def _layouts(first: Tensor, second: Tensor, third: Tensor, fourth: Tensor) -> _Layouts:
    return (  # in a call's path: a loop costs more
        (first.shape, first.stride()),
        (second.shape, second.stride()),
        (third.shape, third.stride()),
        (fourth.shape, fourth.stride()),
    )


class KnownWeights:
    """Weights that were checked for a buffer, so that a launch with the same tensors need not check them again.

    Keeps no tensor alive. A tensor that took the place of a dead one, or got other memory or strides, is not known.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[weakref.ref[Tensor], ...], _Addresses, _Layouts]] = {}

    def put_known(self, arguments: Any, l1_weights: L1Weights, l2_weights: L2Weights) -> bool:
        """Put the addresses of known weights into a launch's arguments. False: they are not known."""
        if type(l1_weights) is not L1Weights or type(l2_weights) is not L2Weights:
            return False
        (first, second), (third, fourth) = l1_weights, l2_weights
        entry = self._known.get(id(first))
        if entry is None:
            return False
        (first_known, second_known, third_known, fourth_known), addresses, layouts = entry
        if (
            first_known() is not first
            or second_known() is not second
            or third_known() is not third
            or fourth_known() is not fourth
            or (first.data_ptr(), second.data_ptr(), third.data_ptr(), fourth.data_ptr()) != addresses
            or _layouts(first, second, third, fourth) != layouts
        ):
            return False
        arguments.l1_weight, arguments.l1_sf, arguments.l2_weight, arguments.l2_sf = addresses
        return True

    def put_new(self, arguments: Any, l1_weights: L1Weights, l2_weights: L2Weights) -> None:
        """The same for weights that were just checked."""
        tensors = (*l1_weights, *l2_weights)
        addresses = (tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr(), tensors[3].data_ptr())
        if len(self._known) >= _KNOWN_WEIGHTS:
            self._known = {key: entry for key, entry in self._known.items() if all(ref() for ref in entry[0])}
        refs = tuple(weakref.ref(tensor) for tensor in tensors)
        self._known[id(tensors[0])] = refs, addresses, _layouts(*tensors)
        arguments.l1_weight, arguments.l1_sf, arguments.l2_weight, arguments.l2_sf = addresses


class SymmBuffer:
    """One rank's symmetric buffer.

    Attributes:
        config: the layer.
        layout: where each region lies.
        rank: this rank in the group.
        timeout_s: seconds a wait on the device may take before it becomes a fault.

    Each name in ``DEBUG_VIEWS`` is an attribute too, a view of the live memory (``megamoe layout`` prints the shapes).
    Fill ``x``, ``x_sf``, ``topk_idx`` and ``topk_weights`` (or call ``fill``) only while no launch is under way.
    """

    def __init__(
        self,
        rank_memory: Any,
        group: LocalGroup | DistributedGroup,
        timeout_s: float,
        check_every: int | None,
    ) -> None:
        self._rank = rank_memory
        self.device: torch.device = rank_memory.device
        self._group = group
        self.layout: BufferLayout = rank_memory.layout
        self.config: MegaMoEConfig = self.layout.config
        self.rank: int = rank_memory.rank
        self.timeout_s = timeout_s
        self.arguments: Any = LAUNCH_STRUCT.ctype()
        """Of the launch that is being made; a target copies what it queues."""
        self.lock = threading.RLock()
        """Held while a launch is made, faults are read or the buffer is closed: threads may share a buffer."""
        self.known_weights = KnownWeights()
        self._check_every = check_every
        self._launches = 0
        self._reported_faults = 0
        self._polled: list[Fault] = []  # records that are still in the buffer and were reported
        self._closed = False
        self._pid = _Process.pid
        self._fills_on_gpu = self.device.type == "cuda"

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.layout.num_bytes} bytes, epoch {self.epoch}"
        return f"SymmBuffer(rank {self.rank} of {self.config.num_ranks}, {self._group.target}, {state})"

    # --- views ---------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Tensor:
        if name in DEBUG_VIEWS:
            return self.view(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def view(self, name: str, *, rank: int | None = None) -> Tensor:
        """The live view of a region; a banked region shows the bank of the last launch.

        Args:
            name: a region of ``layout`` (``megamoe layout`` lists them).
            rank: whose buffer; None means this rank's.

        Raises:
            ValueError: no such region, or the buffer is closed.
        """
        self._require_open()
        if not isinstance(name, str) or name not in self.layout.by_name:
            raise ValueError(f"name must be a region of the layout ({', '.join(self.layout.by_name)}), got {name!r}")
        if rank is not None and rank not in range(self.config.num_ranks):
            raise ValueError(f"rank must be 0 to {self.config.num_ranks - 1} or None, got {rank!r}")
        region = self.layout[name]
        memory = self._rank.memory if rank is None else self._rank.peer_memory(rank)
        whole = _region_view(memory, region)
        return whole[self.epoch % NUM_BANKS] if region.banked else whole

    @property
    def is_closed(self) -> bool:
        return self._closed

    def memory_of(self, rank: int | None = None) -> Tensor:
        """A rank's whole buffer, uint8 [num_bytes], live; None means this rank's. Raises ValueError when closed."""
        self._require_open()
        memory: Tensor = self._rank.memory if rank is None else self._rank.peer_memory(rank)
        return memory

    @property
    def epoch(self) -> int:
        """Launches that have ended on this buffer."""
        self._require_open()
        return int(_region_view(self._rank.memory, self.layout["epoch"])[0].item())

    def __getstate__(self) -> object:
        raise TypeError(
            "a SymmBuffer is memory that ranks share: it is not copied or pickled; to copy a MegaMoE "
            "copy its state_dict()"
        )

    # --- inputs --------------------------------------------------------------------------------------------------

    @untraced
    def fill(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        routed_scaling_factor: float = 1.0,
        ue8m0: bool = False,
    ) -> int:
        """Quantise tokens and put them, with their routes, into the views of this rank; on a GPU in one launch on the
        current stream.

        Args:
            x: bf16 or fp32 [tokens, hidden].
            topk_idx: integer [tokens, num_topk]: global expert ids; below 0 = masked.
            topk_weights: fp32 [tokens, num_topk].
            routed_scaling_factor: by which the weights are multiplied, in fp32.
            ue8m0: round the scales up to powers of two.

        Returns:
            The number of tokens.

        Raises:
            ValueError: a shape, dtype or the number of tokens does not fit, or a tensor requires grad (there is no
                backward); names the argument.
        """
        self._require_open()
        device, config = self.device, self.config
        records_gradients = torch.is_grad_enabled()
        for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if not isinstance(tensor, Tensor) or tensor.device != device:
                raise ValueError(f"{name}: got {describe(tensor)}, expected a tensor on the buffer's {device}")
            if tensor.layout is not torch.strided:
                raise ValueError(f"{name}: got {describe(tensor)} of layout {tensor.layout}, expected a dense tensor")
            if records_gradients and tensor.requires_grad:
                raise ValueError(f"{name}: got a tensor that requires grad, expected a call under torch.no_grad()")
            check_memory(name, tensor)
        tokens, columns = x.shape if x.dim() == 2 else (-1, -1)
        if columns != config.hidden or x.dtype not in _TOKEN_DTYPES:
            raise ValueError(f"x: got {describe(x)}, expected bf16 or fp32 [tokens, {config.hidden}]")
        self.check_num_tokens(tokens)
        routes = (tokens, config.num_topk)
        if topk_idx.shape != routes or topk_idx.dtype not in _ID_DTYPES:
            raise ValueError(f"topk_idx: got {describe(topk_idx)}, expected int32 or int64 {list(routes)}")
        if topk_weights.shape != routes or topk_weights.dtype != torch.float32:
            raise ValueError(f"topk_weights: got {describe(topk_weights)}, expected fp32 {list(routes)}")
        if not is_fp32(routed_scaling_factor):
            raise ValueError(f"routed_scaling_factor: got {routed_scaling_factor!r}, expected a finite number (fp32)")
        if self._fills_on_gpu:
            self._rank.fill(x, topk_idx, topk_weights, routed_scaling_factor, ue8m0)
            return tokens
        values, scales = quantize_activations(x, ue8m0=ue8m0)
        self.view("x")[:tokens].view(torch.uint8).copy_(values.view(torch.uint8))
        self.view("x_sf")[:tokens] = scales
        self.view("topk_idx")[:tokens] = topk_idx
        self.view("topk_weights")[:tokens] = topk_weights * routed_scaling_factor
        return tokens

    def check_num_tokens(self, tokens: int) -> None:
        """Raises ValueError when ``tokens`` does not fit this buffer."""
        if not 0 <= tokens <= self.config.num_max_tokens_per_rank:
            raise ValueError(
                f"num_tokens: got {tokens}, expected 0 to num_max_tokens_per_rank = "
                f"{self.config.num_max_tokens_per_rank}"
            )

    # --- launching and faults ------------------------------------------------------------------------------------

    def launch(self, arguments: Any, keep_alive: object, *, stream: Any = None) -> None:
        """Queue a launch on this rank. Users call ``fp8_mega_moe``, which holds the lock and has checked everything."""
        captured = self._rank.launch(arguments, keep_alive, stream)
        self._launches += 1
        # One that is captured has not run, and nothing may be read meanwhile.
        if self._check_every is not None and not captured and self._launches % self._check_every == 0:
            self._raise_for_faults(idle=False)

    def load(self) -> None:
        """Compile and load what launches and `fill` need."""
        self._require_open()
        self._rank.load()

    @untraced
    def check(self) -> None:
        """Wait for the launches so far, replays of captured ones too, and raise for what went wrong in them.

        Raises:
            MegaMoEFault: a fault since the last check, in words, or the group is aborted and wants ``reset()``.
            ValueError: the buffer is closed.
        """
        self._require_open()
        # A launch whose peers are gone ends within the deadline, once for each launch that was queued.
        if not self._rank.synchronize():
            raise MegaMoEFault(f"rank {self.rank}: a launch did not end")
        with self.lock:
            self._require_open()
            self._raise_for_faults(idle=True)

    def _raise_for_faults(self, *, idle: bool) -> None:
        status = self._rank.status
        aborted = int(status.aborted_epoch) or (int(self.view("abort")[0].item()) if idle else 0)
        counted = int(status.fault_count) - self._reported_faults
        faults: list[Fault] = []
        if counted or aborted:
            recorded = self.read_faults()
            faults = recorded if aborted else list((Counter(recorded) - Counter(self._polled)).elements())
            self._polled = recorded
            # A record is written before it is counted, so a poll may see one more.
            self._reported_faults += max(counted, len(faults) if not aborted else 0)
        if idle and not aborted and self._polled:
            # Nothing runs, so the records are ours to recycle; an aborted group keeps them until its reset.
            self.view("fault_records").view(torch.int32).zero_()
            self.view("fault_count").view(torch.int32).zero_()
            self._polled = []
        if not counted and not aborted:
            return
        sentences = [fault.describe(self.config) for fault in faults]
        if counted > len(faults):
            sentences.append(f"{counted - len(faults)} more faults: a buffer keeps records of {MAX_FAULT_RECORDS}")
        if aborted:
            others = [fault for rank in self._other_ranks() for fault in self.read_faults(rank)]
            sentences += [fault.describe(self.config) for fault in others]
            faults += others
            sentences.append(
                f"the group is aborted since epoch {aborted}: y is NaN from there on, later launches end at once, and "
                "reset() (every rank alive) or a new group makes it work again"
            )
        raise MegaMoEFault("; ".join(sentences), faults, aborted)

    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.config.num_ranks) if rank != self.rank]

    def read_faults(self, rank: int | None = None) -> list[Fault]:
        """The fault records that a rank's buffer holds now, without waiting."""
        count = int(self.view("fault_count", rank=rank).view(torch.int32)[0].item())
        return read_fault_records(count, self.view("fault_records", rank=rank).view(torch.int32).cpu())

    def reset(self) -> None:
        """Make an aborted group work again. Collective, with every rank alive.

        Raises:
            ValueError: a rank of a virtual group: call ``reset()`` of the whole VirtualSymmBuffer.
        """
        if isinstance(self._group, LocalGroup) and self.config.num_ranks > 1:
            raise ValueError("reset() is collective: call reset() of the VirtualSymmBuffer that holds this rank")
        _reset(self._group, [self])

    def close(self) -> None:
        """Give the memory back once no view is left. Waits for this rank's own launches, for no other rank."""
        with self.lock:
            if not self._closed:
                self._rank.synchronize()
                self._rank.close()
                self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"sym_buffer: the buffer of rank {self.rank} is closed, expected an open one")
        if self._pid != _Process.pid:  # what it wrote would be in the parent's buffer
            raise ValueError(
                f"sym_buffer: got one of process {self._pid}: a forked child cannot launch on it or use it"
            )


class VirtualSymmBuffer:
    """The buffers of all ranks of a virtual group; ``ranks[r]`` is used like any rank's own buffer."""

    def __init__(self, ranks: Sequence[SymmBuffer], group: LocalGroup) -> None:
        self.ranks = list(ranks)
        self._group = group

    @property
    def config(self) -> MegaMoEConfig:
        return self.ranks[0].config

    def check(self) -> None:
        """Wait for the launches of every rank, then raise what went wrong on any of them as one MegaMoEFault."""
        raised: list[MegaMoEFault] = []
        for buffer in self.ranks:
            try:
                buffer.check()
            except MegaMoEFault as fault:
                raised.append(fault)
        aborted = [fault for fault in raised if fault.aborted_epoch]
        if aborted:  # says it all: the records of an aborted group are read from every rank
            raise aborted[0]
        if raised:
            raise MegaMoEFault("; ".join(map(str, raised)), [fault for one in raised for fault in one.faults])

    def reset(self) -> None:
        """Make an aborted group work again."""
        _reset(self._group, self.ranks)

    def close(self) -> None:
        """Close every rank's buffer."""
        for buffer in self.ranks:
            buffer.close()


def _region_view(memory: Tensor, region: Region) -> Tensor:
    raw = memory[region.offset : region.offset + region.num_bytes].view(DTYPES[region.dtype])
    return raw.as_strided(region.shape, region.strides)


def _clear(buffer: SymmBuffer, highest_epoch: int) -> None:
    """Bring a rank's own counters to where a new launch may start."""
    for name in RESET_REGIONS:
        region = buffer.layout[name]
        buffer._rank.memory[region.offset : region.offset + region.num_bytes].zero_()
    buffer.view("epoch").view(torch.int64)[0] = highest_epoch + 1
    status = buffer._rank.status
    status.aborted_epoch = 0
    status.fault_count = 0
    buffer._reported_faults = 0
    buffer._polled = []


def _reset(group: LocalGroup | DistributedGroup, buffers: Sequence[SymmBuffer]) -> None:
    for buffer in buffers:
        buffer._require_open()
    for buffer in buffers:
        buffer._rank.synchronize()
    # Until every rank has stopped nobody may clear: a wait that still runs would raise the abort flag again.
    highest = max(group.all_gather(max(buffer.epoch for buffer in buffers)))
    for buffer in buffers:
        _clear(buffer, highest)
    _settle(buffers)
    group.barrier()
    for buffer in buffers:
        buffer.view("abort").view(torch.int64).zero_()
    _settle(buffers)
    group.barrier()


def _settle(buffers: Sequence[SymmBuffer]) -> None:
    """Wait until what was written into the buffers is there for everybody."""
    for device in {buffer.device for buffer in buffers}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def withdraw(group: LocalGroup | DistributedGroup, reason: ValueError) -> None:
    """Tell the ranks that create a buffer with this one that it will not. Collective, as creating is."""
    group.all_gather(str(reason))


def _agree(group: LocalGroup | DistributedGroup, config: MegaMoEConfig) -> None:
    """Refuse a group whose ranks were created with different configs or layouts, or of which one withdrew."""
    fields = dataclasses.asdict(config)
    digest = hashlib.sha256(repr((fields, buffer_layout(config).digest)).encode()).hexdigest()
    offers = group.all_gather((digest, fields))
    for rank, offer in enumerate(offers):
        if isinstance(offer, str):
            raise ValueError(f"rank {rank} could not create its buffer: {offer}")
    for rank, (other_digest, other_fields) in enumerate(offers):
        if other_digest == offers[0][0]:
            continue
        differing = [name for name in fields if other_fields.get(name) != offers[0][1].get(name)]
        if not differing:
            raise ValueError(
                f"rank {rank} has another version of megamoe than rank 0, which lays buffers out differently"
            )
        raise ValueError(
            "config differs between ranks: "
            + ", ".join(
                f"{name} is {offers[0][1].get(name)} on rank 0 and {other_fields.get(name)} on rank {rank}"
                for name in differing
            )
            + "; every rank must create the buffer with the same arguments"
        )


def _check_options(timeout_s: float, check_every: int | None) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} seconds, got {timeout_s!r}")
    if check_every is not None and not is_count(check_every):
        raise ValueError(f"check_every must be at least 1 or None, got {check_every!r}")


def open_buffers(
    group: VirtualGroup | dist.ProcessGroup,
    config: MegaMoEConfig,
    *,
    timeout_s: float,
    check_every: int | None = None,
    max_workers: int | None = None,
) -> SymmBuffer | VirtualSymmBuffer:
    """Allocate the symmetric buffers of a group for a config. Collective.

    Returns:
        This process's SymmBuffer; for a VirtualGroup the VirtualSymmBuffer of all ranks.

    Raises:
        ValueError: the ranks disagree about the config, or an option of this or another rank is out of range.
        OSError: a rank got no memory or, on the host target, no threads.
    """
    inner = as_group(group)
    try:
        _check_options(timeout_s, check_every)
    except ValueError as error:
        withdraw(inner, error)
        raise
    _agree(inner, config)
    with torch.inference_mode(False):  # a buffer made for inference must be writable afterwards too
        ranks = get_target(inner.target).open_ranks(inner, buffer_layout(config), max_workers)
    buffers = [SymmBuffer(rank, inner, timeout_s, check_every) for rank in ranks]
    if isinstance(inner, LocalGroup):
        return VirtualSymmBuffer(buffers, inner)
    return buffers[0]
