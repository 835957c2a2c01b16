"""Launches that repeat with changing inputs, a model of real size, and captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megamoe import MegaMoEConfig, Stage
from phases.support.checks import CaseChecks
from phases.support.inputs import Tokens, Workload, generator, make_tokens
from phases.support.launches import Launch, Options, wait
from phases.support.numeric import compare_answers, run_workload
from phases.support.ranks import num_cores
from phases.support.runner import Phase
from phases.support.workloads import REAL, make_config

EPOCHS = 14
CAPACITY = 20
TINY_MODEL = (256, 128)
ROUTING_OF_EPOCH = (("random", 0.0), ("random", 0.3), ("one_expert", 0.0), ("duplicate", 0.6))


def _epoch_tokens(config: MegaMoEConfig, epoch: int) -> list[Tokens]:
    """Another number of tokens on every rank in every epoch, with other routes; in one epoch nobody has any."""
    draw = generator("repeated", epoch)
    counts = torch.randint(0, CAPACITY + 1, (config.num_ranks,), generator=draw).tolist()
    if epoch == EPOCHS // 2:
        counts = [0] * config.num_ranks
    routing, masked = ROUTING_OF_EPOCH[epoch % len(ROUTING_OF_EPOCH)]
    return make_tokens(Workload(f"repeated {epoch}", config, tuple(counts), routing=routing, masked=masked))


def check_repeated_launches(phase: Phase, checks: CaseChecks) -> None:
    """Epoch after epoch without a barrier, each rank as fast as it can; every third takes its token count from the
    device, every fifth stops after dispatch."""
    config = make_config(phase.ranks, shape=TINY_MODEL, tiles=2, capacity=CAPACITY)
    buffers = phase.launcher.buffers(config)
    received = {
        rank: torch.zeros(config.experts_per_rank, dtype=torch.int32, device=buffer.device)
        for rank, buffer in buffers.items()
    }
    before = {rank: buffer.epoch for rank, buffer in buffers.items()}
    launches: list[Launch] = []
    for epoch in range(EPOCHS):
        launches.append(
            phase.launcher.launch(
                config,
                _epoch_tokens(config, epoch),
                Options(
                    stage=Stage.DISPATCH if epoch % 5 == 4 else Stage.COMBINE,
                    count_on_device=epoch % 3 == 2,
                    receive_stats=received,
                    in_step=epoch == 0,
                ),
            )
        )
    phase.ranks.barrier()
    for rank, buffer in buffers.items():
        checks.require(buffer.epoch == before[rank] + EPOCHS, f"rank {rank}: epoch {buffer.epoch} after {EPOCHS} more")
    for launch in launches:
        _compare_epoch(phase, checks, launch)
    _compare_received(checks, config, launches, received)


def _compare_epoch(phase: Phase, checks: CaseChecks, launch: Launch) -> None:
    for rank, y in launch.y.items():
        beyond = y[launch.inputs[rank].num_tokens :] if launch.stage is Stage.COMBINE else y
        checks.require(bool(beyond.isnan().all()), f"rank {rank}: y was written in rows that are none of the tokens'")
    if launch.stage is Stage.COMBINE:
        compare_answers(phase, checks, launch)


def _compare_received(
    checks: CaseChecks, config: MegaMoEConfig, launches: list[Launch], received: dict[int, torch.Tensor]
) -> None:
    """The statistics have added up what every launch received."""
    counts = torch.zeros(config.num_experts, dtype=torch.int64)
    for launch in launches:
        for given in launch.inputs:
            counts += torch.bincount(given.topk_idx[given.topk_idx >= 0], minlength=config.num_experts)
    for rank, stats in received.items():
        expected = counts[rank * config.experts_per_rank :][: config.experts_per_rank].tolist()
        checks.require(stats.tolist() == expected, f"rank {rank}: received {stats.tolist()}, expected {expected}")


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_real_size(phase: Phase, checks: CaseChecks) -> None:
    """hidden 7168 and intermediate 2048; on the CPU a few tokens, of which some ranks have none, else up to 1000."""
    ranks = phase.ranks
    topk, tokens = (2, (3, 0, 2, 1)) if ranks.target == "host" else (6, (1000, 0, 48, 1))
    config = make_config(ranks, shape=REAL, tiles=1, num_topk=topk, num_experts=16, capacity=max(tokens))
    counts = tuple(tokens[rank % len(tokens)] for rank in range(ranks.num_ranks))
    work = Workload("real_size", config, counts, routing="random")
    with torch_threads(num_cores()):
        run_workload(phase, checks, work=work)
    phase.launcher.forget(config)


def check_graph_replay(phase: Phase, checks: CaseChecks) -> None:
    """One captured launch of every rank, replayed with other tokens and counts: y of eager launches, bit for bit."""
    config = make_config(phase.ranks, shape=TINY_MODEL, capacity=CAPACITY)
    options = Options(count_on_device=True)
    tokens = [_epoch_tokens(config, epoch) for epoch in range(4)]
    eager = [phase.launcher.launch(config, given, options) for given in tokens]
    captured = phase.launcher.prepare(config, tokens[0], options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        phase.launcher.queue(captured)
    for given, expected in zip(tokens, eager, strict=True):
        phase.ranks.barrier()
        phase.launcher.fill(captured, given)
        graph.replay()
        wait(captured.buffers.values())
        for rank, y in captured.y.items():
            checks.equal("y", y, expected.y[rank], rank=rank, against="eager launches")
