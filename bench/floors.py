"""The least time a layer can take on a machine: weights read once, arithmetic, and NVLink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.shapes import Shape


@dataclass(frozen=True)
class Machine:
    """What one GPU was measured to do (shared/design/machine.md: H200, 2026-11).

    Attributes:
        name: of the GPU.
        hbm_gb_s: reading device memory.
        dense_tflops: fp8 8192^3 with 1x128 and 128x128 scales (cuBLASLt).
        nvlink_gb_s: one direction, all peers together.
    """

    name: str = "NVIDIA H200"
    hbm_gb_s: float = 4236.0
    dense_tflops: float = 1174.0
    nvlink_gb_s: float = 365.0


@dataclass(frozen=True)
class Load:
    """What the busiest GPU has to do in one call, averaged over the input sets.

    Attributes:
        routes: routes its experts receive.
        weight_bytes: of the experts that receive any.
        link_bytes: in the busier direction: fp8 rows one way, bf16 partial results the other.
    """

    routes: float
    weight_bytes: float
    link_bytes: float


@dataclass(frozen=True)
class Floor:
    """Microseconds that no version can beat, and by what."""

    us: float
    binds: str


def measure_load(shape: Shape, topk_idx: Sequence[Tensor], experts_per_rank: int, gpu_of_rank: Sequence[int]) -> Load:
    """The load of one input set.

    Args:
        shape: the layer.
        topk_idx: int64 [tokens, topk] of every rank; below 0 = masked.
        experts_per_rank: global expert ``e`` lives on rank ``e // experts_per_rank``.
        gpu_of_rank: ranks with the same number share a GPU; routes between them cross no link.
    """
    num_gpus = max(gpu_of_rank) + 1
    gpus = torch.tensor(list(gpu_of_rank))
    counts = torch.zeros(len(gpu_of_rank) * experts_per_rank, dtype=torch.int64)
    crossing = torch.zeros(num_gpus, num_gpus, dtype=torch.int64)
    for rank, idx in enumerate(topk_idx):
        experts = idx[idx >= 0].flatten().cpu()
        counts += torch.bincount(experts, minlength=counts.numel())
        crossing[gpu_of_rank[rank]] += torch.bincount(gpus[experts // experts_per_rank], minlength=num_gpus)
    crossing.fill_diagonal_(0)
    sent, received = crossing.sum(dim=1), crossing.sum(dim=0)
    inbound = shape.hidden * (received + 2 * sent)
    outbound = shape.hidden * (sent + 2 * received)
    by_rank = counts.reshape(len(gpu_of_rank), experts_per_rank)
    routes = torch.zeros(num_gpus, dtype=torch.int64).index_add_(0, gpus, by_rank.sum(dim=1))
    touched = torch.zeros(num_gpus, dtype=torch.int64).index_add_(0, gpus, (by_rank > 0).sum(dim=1))
    return Load(
        routes=float(routes.max()),
        weight_bytes=float(touched.max() * shape.expert_bytes),
        link_bytes=float(torch.maximum(inbound, outbound).max()),
    )


def mean_load(loads: Sequence[Load]) -> Load:
    """Of several input sets."""
    return Load(
        sum(load.routes for load in loads) / len(loads),
        sum(load.weight_bytes for load in loads) / len(loads),
        sum(load.link_bytes for load in loads) / len(loads),
    )


def floor(machine: Machine, shape: Shape, load: Load) -> Floor:
    """The largest of the three times is the floor that binds."""
    times = {
        "weights": load.weight_bytes / machine.hbm_gb_s * 1e-3,
        "arithmetic": load.routes * shape.route_flops / machine.dense_tflops * 1e-6,
        "nvlink": load.link_bytes / machine.nvlink_gb_s * 1e-3,
    }
    binds = max(times, key=lambda name: times[name])
    return Floor(times[binds], binds)
