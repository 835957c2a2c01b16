"""The ranks of a run: all of them in this process, or one of them as torchrun started it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.faults import MegaMoEFault
from megamoe.jit import CompileError

WRONG_CALL, FAULT = 2, 1
_BACKENDS = {"host": "gloo", "sm90": "cpu:gloo,cuda:nccl"}


class RunError(Exception):
    """Ends the run with a message for the user and an exit code. ``shared``: every rank raises the same one."""

    def __init__(self, message: str, exit_code: int, *, shared: bool) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.shared = shared


@dataclass(frozen=True)
class Ranks:
    """``here``: the ranks that this process stands for. ``group``: of torchrun, or None where that is all of them."""

    num_ranks: int
    here: tuple[int, ...]
    group: dist.ProcessGroup | None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the body on every rank. What fails on one becomes a RunError on all, so that none waits for it.

        The body may call nothing collective that another rank could miss by failing.
        """
        failure: tuple[int, str] | None = None
        try:
            yield
        except MegaMoEFault as error:
            failure = FAULT, str(error)
        except (ValueError, OSError, CompileError) as error:
            failure = WRONG_CALL, str(error)
        try:
            failures = self.gather_objects(failure)
        except RunError as lost:
            if failure is not None:  # more likely the cause than the consequence
                raise RunError(f"{failure[1]}; {lost}", failure[0], shared=False) from lost
            raise
        if any(failures):
            rank, (exit_code, message) = next((r, f) for r, f in enumerate(failures) if f is not None)
            everywhere = all(f == failures[0] for f in failures)
            raise RunError(message if everywhere else f"on rank {rank}: {message}", exit_code, shared=True)

    def check_requested(self, requested: int | None) -> None:
        """Raises ValueError where ``requested`` (--ranks) is not the number of ranks there are."""
        if requested is not None and requested < 1:
            raise ValueError(f"--ranks is {requested}, expected at least 1")
        if requested not in (None, self.num_ranks):
            raise ValueError(f"--ranks is {requested}, but torchrun started {self.num_ranks} (WORLD_SIZE)")

    @property
    def speaks(self) -> bool:
        """Whether this process prints what all of them know."""
        return 0 in self.here

    def wait_for_all(self) -> None:
        """Returns when every process is here or gone. torchrun ends all ranks once one exits with an error."""
        with suppress(RunError):
            self.gather_objects(None)

    def gather_objects(self, mine: Any) -> list[Any]:
        """``mine`` of every process, by rank; a list of one where all ranks are here."""
        if self.group is None:
            return [mine]
        everyone: list[Any] = [None] * self.num_ranks
        with _peers_may_be_lost():
            dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def gather_rows(self, mine: Mapping[int, Tensor], num_rows: Sequence[int]) -> list[Tensor]:
        """The tensor [num_rows[rank], columns] of every rank, from those of the ranks ``here``; bit for bit."""
        if self.group is None:
            return [mine[rank] for rank in range(self.num_ranks)]
        (tensor,) = mine.values()
        padded = tensor.new_zeros((max(num_rows), tensor.shape[1])).view(torch.uint8)
        padded[: tensor.shape[0]] = tensor.contiguous().view(torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        with _peers_may_be_lost():
            dist.all_gather(received, padded, group=self.group)
        return [rows[:count].view(tensor.dtype) for rows, count in zip(received, num_rows, strict=True)]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.group is not None:
            with _peers_may_be_lost():
                dist.all_reduce(tensor, group=self.group)
        return tensor


def resolve_target(name: str) -> str:
    """``host`` or ``sm90``; ``best`` is sm90 where a Hopper GPU is there."""
    if name != "best":
        return name
    has_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "sm90" if has_hopper else "host"


@contextmanager
def open_ranks(requested: int | None, target: str) -> Iterator[Ranks]:
    """The ranks that torchrun started (WORLD_SIZE is set), else ``requested`` virtual ones, 1 if None or less.

    Raises RunError where torchrun started more processes than there are GPUs for target sm90.
    """
    if "WORLD_SIZE" not in os.environ:
        num_ranks = max(1, requested or 1)
        yield Ranks(num_ranks, tuple(range(num_ranks)), None)
        return
    if target == "sm90":
        _take_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(_BACKENDS[target])
    try:
        yield Ranks(dist.get_world_size(), (dist.get_rank(),), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _take_gpu(local_rank: int) -> None:
    """Each process of a machine has a GPU of its own."""
    found = torch.cuda.device_count()
    if local_rank >= found:
        raise RunError(
            f"--target sm90: process {local_rank} of this machine needs a GPU of its own, and there are {found}",
            WRONG_CALL,
            shared=False,
        )
    torch.cuda.set_device(local_rank)


def split_tokens(num_tokens: int, num_ranks: int) -> list[int]:
    """Tokens of each rank: consecutive shares, the first ones one larger where it does not divide."""
    share, rest = divmod(num_tokens, num_ranks)
    return [share + (rank < rest) for rank in range(num_ranks)]


@contextmanager
def _peers_may_be_lost() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"rank {os.environ.get('RANK')} lost its peers: {first_line}", FAULT, shared=False) from error
