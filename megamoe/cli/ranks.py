"""The ranks of a run: all of them in this process, or one of them as torchrun started it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.faults import MegaMoEFault

WRONG_CALL, FAULT = 2, 1


class RunError(Exception):
    """Ends the run on every rank with a message for the user and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ranks:
    """``here``: the ranks that this process stands for. ``group``: gloo, or None where that is all of them."""

    num_ranks: int
    here: tuple[int, ...]
    group: dist.ProcessGroup | None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the body on every rank. What fails on one becomes a RunError on all, so that none waits for it."""
        failure: tuple[int, str] | None = None
        try:
            yield
        except MegaMoEFault as error:
            failure = FAULT, str(error)
        except (ValueError, OSError) as error:
            failure = WRONG_CALL, str(error)
        failures = self.gather_objects(failure)
        if any(failures):
            rank, (exit_code, message) = next((r, f) for r, f in enumerate(failures) if f is not None)
            everywhere = all(f == failures[0] for f in failures)
            raise RunError(message if everywhere else f"on rank {rank}: {message}", exit_code)

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


@contextmanager
def open_ranks(requested: int | None) -> Iterator[Ranks]:
    """The ranks torchrun started (WORLD_SIZE is set), else ``requested`` virtual ones, 1 if None.

    Raises RunError where ``requested`` is neither positive nor what torchrun started.
    """
    if requested is not None and requested < 1:
        raise RunError(f"--ranks is {requested}, expected at least 1", WRONG_CALL)
    if "WORLD_SIZE" not in os.environ:
        num_ranks = requested or 1
        yield Ranks(num_ranks, tuple(range(num_ranks)), None)
        return
    world_size = int(os.environ["WORLD_SIZE"])
    if requested not in (None, world_size):
        raise RunError(f"--ranks is {requested}, but torchrun started {world_size} (WORLD_SIZE)", WRONG_CALL)
    dist.init_process_group("gloo")
    try:
        yield Ranks(world_size, (dist.get_rank(),), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def is_first_rank() -> bool:
    """Whether this process speaks for the run: rank 0 of torchrun, or the only process."""
    return os.environ.get("RANK", "0") == "0"


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
        raise RunError(f"rank {os.environ.get('RANK')} lost its peers: {first_line}", FAULT) from error
