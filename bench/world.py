"""Where the ranks are: virtual ones of this process, or one a process under torchrun. One interface for timing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

import megamoe


class World(Protocol):
    """Ranks on GPUs, and what timing needs of them."""

    @property
    def kind(self) -> str:
        """``virtual`` or ``process``."""
        ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def local_ranks(self) -> Sequence[int]: ...

    @property
    def group(self) -> Any:
        """What ``get_symm_buffer_for_mega_moe`` takes."""
        ...

    @property
    def gpu_of_rank(self) -> Sequence[int]:
        """Which ranks share a GPU: those with the same number."""
        ...

    @property
    def devices(self) -> Sequence[torch.device]:
        """The GPUs of this process, each once."""
        ...

    def device_of(self, rank: int) -> torch.device: ...

    @property
    def speaks(self) -> bool:
        """Whether this process prints and writes."""
        ...

    def align(self) -> None:
        """Put onto the current stream of every GPU a wait for all of them."""
        ...

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the processes. Collective."""
        ...

    def synchronize(self) -> None:
        """Wait for the GPUs of this process."""
        ...

    def close(self) -> None: ...


class VirtualWorld:
    """R virtual ranks over the first GPUs of this machine."""

    kind = "virtual"

    def __init__(self, num_ranks: int, num_gpus: int) -> None:
        if not 1 <= num_gpus <= torch.cuda.device_count():
            raise ValueError(f"num_gpus: got {num_gpus}, expected 1 to the {torch.cuda.device_count()} GPUs here")
        num_gpus = min(num_gpus, num_ranks)
        self.num_ranks = num_ranks
        self.local_ranks: Sequence[int] = range(num_ranks)
        self.group = megamoe.VirtualGroup(num_ranks, target="sm90", num_gpus=num_gpus)
        self.gpu_of_rank: Sequence[int] = [rank * num_gpus // num_ranks for rank in range(num_ranks)]
        self._devices = [torch.device("cuda", gpu) for gpu in range(num_gpus)]

    @property
    def devices(self) -> Sequence[torch.device]:
        return self._devices

    def device_of(self, rank: int) -> torch.device:
        return self._devices[self.gpu_of_rank[rank]]

    @property
    def speaks(self) -> bool:
        return True

    def align(self) -> None:
        if len(self._devices) == 1:
            return
        streams = [torch.cuda.current_stream(device) for device in self._devices]
        events = [stream.record_event() for stream in streams]
        for stream in streams:
            for event in events:
                stream.wait_event(event)

    def largest(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        return None


class ProcessWorld:
    """One rank a process and one GPU a rank, started by torchrun, over NCCL."""

    kind = "process"

    def __init__(self) -> None:
        local_rank = int(os.environ["LOCAL_RANK"])
        self._device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self._device)
        dist.init_process_group("nccl", device_id=self._device)
        self.group = dist.group.WORLD
        self.num_ranks = dist.get_world_size()
        self.rank = dist.get_rank()
        self.local_ranks: Sequence[int] = (self.rank,)
        self.gpu_of_rank: Sequence[int] = list(range(self.num_ranks))
        self._token = torch.zeros(1, device=self._device)

    @property
    def devices(self) -> Sequence[torch.device]:
        return (self._device,)

    def device_of(self, rank: int) -> torch.device:
        if rank != self.rank:
            raise ValueError(f"rank: got {rank}, expected this process's own {self.rank}")
        return self._device

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    def align(self) -> None:
        dist.all_reduce(self._token)

    def largest(self, values: Sequence[float]) -> list[float]:
        gathered = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(gathered, op=dist.ReduceOp.MAX)
        return [float(value) for value in gathered.tolist()]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        dist.destroy_process_group()


def open_world(num_ranks: int | None, num_gpus: int | None) -> VirtualWorld | ProcessWorld:
    """The world of this process: torchrun's where that started it, else virtual ranks.

    Args:
        num_ranks: None: torchrun's number, or 1.
        num_gpus: virtual ranks only: GPUs to spread them over; None: one a rank, as far as there are.

    Raises:
        ValueError: no GPU, or a number that does not fit.
    """
    if not torch.cuda.is_available():
        raise ValueError("python -m bench moe needs a GPU of compute capability 9.0, found none")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if num_gpus is not None:
            raise ValueError("num_gpus: under torchrun every rank has a GPU; leave it out")
        if num_ranks is not None and num_ranks != int(os.environ["WORLD_SIZE"]):
            raise ValueError(f"num_ranks: got {num_ranks}, torchrun started {os.environ['WORLD_SIZE']}")
        return ProcessWorld()
    ranks = 1 if num_ranks is None else num_ranks
    return VirtualWorld(ranks, min(ranks, torch.cuda.device_count()) if num_gpus is None else num_gpus)
