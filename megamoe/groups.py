"""Groups of ranks that share symmetric buffers: torch process groups, and virtual ranks inside one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from megamoe.config import MAX_RANKS, is_count

TARGETS = ("host", "sm90")


@dataclass(frozen=True)
class VirtualGroup:
    """R ranks inside this process: threads on the CPU, or one grid a GPU whose CTAs are dealt out to the ranks.

    Args:
        num_ranks: 1 to 72.
        target: ``host`` or ``sm90``.
        num_workers: host target only: worker threads of each rank.
        num_gpus: sm90 target only: GPUs to spread the ranks over; None means all there are.
    """

    num_ranks: int
    target: str = "host"
    num_workers: int = 1
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        if not is_count(self.num_ranks) or self.num_ranks > MAX_RANKS:
            raise ValueError(f"num_ranks must be 1 to {MAX_RANKS}, got {self.num_ranks!r}")
        if self.target not in TARGETS:
            raise ValueError(f"target must be one of {TARGETS}, got {self.target!r}")
        if not is_count(self.num_workers):
            raise ValueError(f"num_workers must be at least 1, got {self.num_workers!r}")
        if self.num_gpus is not None and not is_count(self.num_gpus):
            raise ValueError(f"num_gpus must be at least 1 or None, got {self.num_gpus!r}")


class Group(Protocol):
    """What buffers need of a group."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def local_ranks(self) -> Sequence[int]:
        """Ranks that live in this process."""
        ...

    @property
    def target(self) -> str: ...

    @property
    def num_workers(self) -> int: ...

    def all_gather(self, value: Any) -> list[Any]:
        """Each process's value, by process. Collective."""
        ...

    def barrier(self) -> None:
        """Collective over the processes."""
        ...


@dataclass(frozen=True)
class LocalGroup:
    """A virtual group: every rank is here, so its collectives have one member."""

    virtual: VirtualGroup

    @property
    def num_ranks(self) -> int:
        return self.virtual.num_ranks

    @property
    def local_ranks(self) -> Sequence[int]:
        return range(self.virtual.num_ranks)

    @property
    def target(self) -> str:
        return self.virtual.target

    @property
    def num_workers(self) -> int:
        return self.virtual.num_workers

    @property
    def num_gpus(self) -> int | None:
        return self.virtual.num_gpus

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None


@dataclass(frozen=True)
class DistributedGroup:
    """One rank a process, over a torch process group: gloo for ``host``, NCCL for ``sm90``."""

    process_group: dist.ProcessGroup
    num_workers: int = 1
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", dist.get_rank(self.process_group))

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def local_ranks(self) -> Sequence[int]:
        return (self.rank,)

    @property
    def target(self) -> str:
        return "sm90" if "nccl" in dist.get_backend(self.process_group) else "host"

    def all_gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(gathered, value, group=self.process_group)
        return gathered

    def barrier(self) -> None:
        dist.barrier(group=self.process_group)


def as_group(group: VirtualGroup | dist.ProcessGroup) -> LocalGroup | DistributedGroup:
    """The group behind what a user passes.

    Raises:
        ValueError: it is neither a VirtualGroup nor an initialised torch process group.
    """
    if isinstance(group, VirtualGroup):
        return LocalGroup(group)
    if isinstance(group, dist.ProcessGroup):
        return DistributedGroup(group)
    raise ValueError(
        f"group must be a torch.distributed ProcessGroup or a megamoe.VirtualGroup, got {type(group).__name__}"
    )
