"""Runs a scenario on real rank processes: gloo over a file rendezvous, everything bounded, nothing left running."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Preloaded into the fork server, so that a rank starts in milliseconds.
import megamoe
import megamoe.reference

GLOO_TIMEOUT_S = 20
WAIT_S = 15


@dataclass(frozen=True)
class Rank:
    """What a scenario is given: its place, and signs between ranks that do not go through gloo."""

    rank: int
    world: int
    folder: Path

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def join(self, name: str, rank: int, world: int) -> dist.ProcessGroup:
        """Leave the process group, if there is one, and meet others in a new one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/{name}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=GLOO_TIMEOUT_S),
        )
        return self.group

    def tell(self, sign: str) -> None:
        (self.folder / f"{sign}.tmp-{self.rank}").write_text(str(os.getpid()))
        (self.folder / f"{sign}.tmp-{self.rank}").rename(self.folder / sign)

    def await_sign(self, sign: str) -> int:
        """Wait for a sign. Returns the pid of who gave it."""
        wait_for((self.folder / sign).exists, f"sign {sign}")
        return int((self.folder / sign).read_text())


def wait_for(holds: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"{what} did not come within {limit_s} s"
        time.sleep(0.002)


def process_state(pid: int) -> str:
    """The state letter of /proc: R, S, T (stopped), Z (dead, not reaped); X when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal a rank of this scenario and wait until it shows."""
    os.kill(pid, number)
    states = {signal.SIGKILL: "ZX", signal.SIGSTOP: "T", signal.SIGCONT: "RSD"}[number]
    wait_for(lambda: process_state(pid) in states, f"{number.name} of {pid}")


def megamoe_mappings() -> list[str]:
    """Mappings of symmetric memory in this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:megamoe" in line]


def megamoe_descriptors() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [link for link in links if "memfd:megamoe" in link]


def assert_nothing_held() -> None:
    """No symmetric memory is mapped or open in this process, once Python has let go of it."""
    gc.collect()
    assert megamoe_mappings() == []
    assert megamoe_descriptors() == []


def _main(scenario: Callable[..., Any], me: Rank, arguments: tuple[Any, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        me.join("rendezvous", me.rank, me.world)
        value = scenario(me, *arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send((True, value))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


def run_ranks(
    scenario: Callable[..., Any],
    world: int,
    folder: Path,
    *arguments: Any,
    dies: Collection[int] = (),
    limit_s: float = 60,
) -> list[Any]:
    """Run ``scenario(rank, *arguments)`` in ``world`` processes.

    Args:
        scenario: a function of a module.
        folder: an empty folder for the rendezvous and the signs.
        dies: ranks that are to end by SIGKILL; all others must end well.

    Returns:
        What each rank returned; None for those that died.
    """
    megamoe.targets.build_all("host", lambda line: None)  # not on a rank's time
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    folder.mkdir(parents=True, exist_ok=True)
    processes, pipes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(scenario, Rank(rank, world, folder), arguments, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    end = time.monotonic() + limit_s
    try:
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.join()
    values: list[Any] = []
    errors = [f"rank {rank} did not end within {limit_s} s" for rank in stuck]
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        try:
            ended_well, value = pipe.recv() if pipe.poll() else (True, None)
        except EOFError:  # died without a word
            ended_well, value = True, None
        values.append(value)
        expected = -signal.SIGKILL if rank in dies else 0
        if not ended_well:
            errors.append(f"rank {rank}:\n{value}")
        elif rank not in stuck and process.exitcode != expected:
            errors.append(f"rank {rank} ended with {process.exitcode}, expected {expected}")
        pipe.close()
    assert not errors, "\n".join(errors)
    return values
