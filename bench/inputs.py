"""Weights and tokens: random, quantised by the library's own rules, the same for everything that is compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.routes import draw_route_weights, draw_routes
from bench.shapes import Shape
from bench.world import World
from megamoe.config import SCALE_BLOCK
from megamoe.quant import E4M3, quantize_activations, quantize_weights


@dataclass(frozen=True)
class NaturalWeights:
    """One rank's experts in the order of a checkpoint (gate rows, then up rows), on its GPU.

    Attributes:
        l1: (e4m3 [E_local, 2I, H], fp32 [E_local, 2I/128, H/128]).
        l2: (e4m3 [E_local, H, I], fp32 [E_local, H/128, I/128]).
    """

    l1: tuple[Tensor, Tensor]
    l2: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RankTokens:
    """One rank's tokens of one input set, on its GPU.

    Attributes:
        x: e4m3 [tokens, H].
        x_sf: fp32 [tokens, H/128].
        topk_idx: int64 [tokens, topk], global experts.
        topk_weights: fp32 [tokens, topk].
    """

    x: Tensor
    x_sf: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class InputSet:
    """Tokens of the ranks of this process, and the routes of all ranks.

    Attributes:
        tokens: by rank.
        all_routes: int64 [tokens, topk] of every rank, on the CPU.
    """

    tokens: dict[int, RankTokens]
    all_routes: list[Tensor]


def random_weights(shape: Shape, num_experts: int, device: torch.device, seed: int) -> NaturalWeights:
    """Normal weights, quantised one expert at a time: the only copy in full is fp8."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrices(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        q = torch.empty(num_experts, rows, columns, dtype=E4M3, device=device)
        sf = torch.empty(num_experts, rows // SCALE_BLOCK, columns // SCALE_BLOCK, device=device)
        for expert in range(num_experts):
            one = torch.randn(rows, columns, device=device, generator=generator).mul_(columns**-0.5)
            values, scales = quantize_weights(one)
            q[expert].view(torch.uint8).copy_(values.view(torch.uint8))
            sf[expert] = scales
        return q, sf

    return NaturalWeights(matrices(2 * shape.intermediate, shape.hidden), matrices(shape.hidden, shape.intermediate))


def draw_inputs(world: World, shape: Shape, experts_per_rank: int, tokens: int, routing: str, seed: int) -> InputSet:
    """One input set; every process draws the routes of all ranks and the tokens of its own."""
    num_experts = experts_per_rank * world.num_ranks
    here, routes = {}, []
    for rank in range(world.num_ranks):
        generator = torch.Generator().manual_seed(seed * 1009 + rank)
        idx = draw_routes(routing, tokens, num_experts, shape.topk, world.num_ranks, generator)
        weights = draw_route_weights(tokens, shape.topk, generator)
        routes.append(idx)
        if rank in world.local_ranks:
            device = world.device_of(rank)
            normal = torch.Generator(device).manual_seed(seed * 1009 + rank)
            x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, generator=normal)
            here[rank] = RankTokens(*quantize_activations(x), idx.to(device), weights.to(device))
    return InputSet(here, routes)
