"""Worlds without a GPU for the tests of the benchmark, and a grouped product that torch has no CPU kernel for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from bench import baseline
from bench.inputs import draw_inputs, random_weights
from bench.shapes import Shape

SMALL = Shape("small", 256, 128, 2)
CPU = torch.device("cpu")


class HostWorld:
    """Virtual ranks of the CPU target."""

    kind = "virtual"
    devices: Sequence[torch.device] = (CPU,)
    speaks = True

    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks
        self.local_ranks: Sequence[int] = range(num_ranks)
        self.gpu_of_rank: Sequence[int] = range(num_ranks)
        self.group: Any = megamoe.VirtualGroup(num_ranks, target="host")

    def device_of(self, rank: int) -> torch.device:
        return CPU

    def align(self) -> None:
        return None

    def largest(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        return None


class GlooWorld(HostWorld):
    """One rank a process, on the CPU."""

    kind = "process"

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        super().__init__(dist.get_world_size())
        self.local_ranks = (dist.get_rank(),)
        self.group = dist.group.WORLD
        self.speaks = dist.get_rank() == 0

    def largest(self, values: Sequence[float]) -> list[float]:
        gathered = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(gathered, op=dist.ReduceOp.MAX)
        return [float(value) for value in gathered.tolist()]

    def close(self) -> None:
        dist.destroy_process_group()


def grouped_on_cpu(x: Tensor, x_sf: Tensor, weights: tuple[Tensor, Tensor], offsets: Tensor) -> Tensor:
    """What ``torch._scaled_grouped_mm`` computes; rows behind the last group are NaN."""
    weight, weight_sf = weights
    result = torch.full((x.shape[0], weight.shape[1]), torch.nan, dtype=torch.bfloat16)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        product = x[start:end].float() @ weight[expert].float().T
        result[start:end] = (product * x_sf[start:end, None] * weight_sf[expert]).bfloat16()
        start = end
    return result


def baseline_error(world: Any, shape: Shape, experts_per_rank: int, tokens: int, routing: str) -> float:
    """Norm-wise difference of the baseline's y from the CPU target's, on this process's rank."""
    from bench.fused import FusedContender, FusedLayer

    (rank,) = world.local_ranks
    weights = {rank: random_weights(shape, experts_per_rank, CPU, seed=rank)}
    sets = [draw_inputs(world, shape, experts_per_rank, tokens, routing, seed=3)]
    transformed = {rank: megamoe.transform_weights_for_mega_moe(weights[rank].l1, weights[rank].l2)}
    layer = FusedContender(FusedLayer(world, shape, experts_per_rank, tokens, transformed, "fp32"), None)
    other = baseline.TorchBaseline(world, shape, experts_per_rank, weights)
    answers = []
    for contender in (layer, other):
        contender.use(sets)
        contender.load(0)
        contender.call()
        contender.check()
        answers.append(contender.answer()[rank].clone())
        world.largest([0.0])
    layer.close()
    other.close()
    expected, actual = (answer.double() for answer in answers)
    return float((actual - expected).norm() / expected.norm())


def main() -> int:
    """One rank of a run under torchrun: routing by routing the largest error of any rank; 1: one is too large."""
    baseline._grouped = grouped_on_cpu
    world = GlooWorld()
    worst = 0.0
    for routing in ("balanced", "hot", "idle"):
        error = world.largest([baseline_error(world, SMALL, 3, 7, routing)])[0]
        if world.speaks:
            print(f"{routing} {error:.3e}", flush=True)
        worst = max(worst, error)
    world.close()
    return 0 if worst < baseline.TorchBaseline.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
