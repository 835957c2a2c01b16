"""The ranks of a step: one alone, all in this process, or one a process under torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import VirtualGroup

PROCESS_GROUP_TIMEOUT_S = 20
"""Between the device's wait (5 s) and the kill (60 s): a rank that is missing is reported by this process."""

_WORKERS_ALONE, _WORKERS = 3, 2
_BACKENDS = {"host": "gloo", "sm90": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Ranks:
    """All ranks of a group, and which of them are here.

    Attributes:
        kind: single; virtual: ranks of this process, on the CPU or on one GPU; spread: the same over all GPUs there
            are; process: one process a rank.
        local: ranks in this process.
        group: what buffers are made of.
        process: this process's number among those of the step; 0 writes the record.
    """

    kind: str
    target: str
    num_ranks: int
    local: tuple[int, ...]
    group: VirtualGroup | dist.ProcessGroup
    process: int

    @property
    def all_here(self) -> bool:
        return self.kind != "process"

    def settle(self) -> None:
        """Wait until what was put on the GPUs of the ranks here has happened."""
        if self.target == "sm90":
            for gpu in range(torch.cuda.device_count()) if self.kind == "spread" else [torch.cuda.current_device()]:
                torch.cuda.synchronize(gpu)

    def barrier(self) -> None:
        """Every rank comes here, and sees what all others wrote into each other's buffers before."""
        self.settle()
        if not self.all_here:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Each process's value, on every process."""
        if self.all_here:
            return [value]
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, value)
        return gathered

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each process's tensor, on the CPU of every process."""
        total = values.cpu()
        if not self.all_here:
            dist.all_reduce(total)
        return total

    def close(self) -> None:
        if not self.all_here:
            dist.destroy_process_group()


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def open_ranks(kind: str, target: str, num_ranks: int) -> Ranks:
    """The ranks of a step; for ``process`` this joins the process group that torchrun started.

    Raises:
        ValueError: the kind does not fit the number of ranks, or how this process was started.
    """
    if kind == "single" and num_ranks != 1:
        raise ValueError(f"--group single: got --ranks {num_ranks}, expected 1")
    if kind == "spread" and target != "sm90":
        raise ValueError(
            f"--group spread: got --target {target}, expected sm90: there are no GPUs to spread ranks over"
        )
    # The oracle's products here are small: a second thread spins more than it helps, and the host target has its own.
    torch.set_num_threads(1)
    if kind != "process":
        group = VirtualGroup(
            num_ranks,
            target=target,
            num_workers=_WORKERS_ALONE if num_ranks == 1 else _WORKERS,
            num_gpus=None if kind == "spread" else 1,
        )
        return Ranks(kind, target, num_ranks, tuple(range(num_ranks)), group, 0)
    if not under_torchrun():
        raise ValueError(
            f"--group process: start it as `python -m torch.distributed.run --nproc-per-node {num_ranks} SCRIPT …`"
        )
    if int(os.environ["WORLD_SIZE"]) != num_ranks:
        raise ValueError(f"--ranks: got {num_ranks}, but torchrun started {os.environ['WORLD_SIZE']} processes")
    if target == "sm90":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(_BACKENDS[target], timeout=timedelta(seconds=PROCESS_GROUP_TIMEOUT_S))
    world = dist.group.WORLD
    assert world is not None  # it was made in the line before
    rank = dist.get_rank()
    return Ranks(kind, target, num_ranks, (rank,), world, rank)
