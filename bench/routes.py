"""Random routes of several kinds. The same seed gives the same routes on any machine: they are drawn on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

ROUTINGS = ("balanced", "zipf", "hot", "idle")


def draw_routes(
    routing: str, num_tokens: int, num_experts: int, topk: int, num_ranks: int, generator: torch.Generator
) -> Tensor:
    """Distinct experts for every token.

    Args:
        routing: ``balanced`` (every expert as likely), ``zipf`` (the i-th expert of a shuffled order 1/i as likely as
            the first), ``hot`` (one expert has a route of every token, the others are as likely) or ``idle`` (no
            route goes to the last rank).
        num_tokens: tokens of one rank.
        num_experts: experts over all ranks.
        topk: routes of a token.
        num_ranks: expert-parallel ranks.
        generator: of the CPU.

    Returns:
        int64 [num_tokens, topk].

    Raises:
        ValueError: no such routing, or too few experts or ranks for it.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: got {routing!r}, expected one of {ROUTINGS}")
    if routing == "idle" and num_ranks < 2:
        raise ValueError("routing idle needs two ranks: one of them receives nothing")
    reachable = num_experts - num_experts // num_ranks if routing == "idle" else num_experts
    if topk > reachable:
        raise ValueError(f"top-{topk} of {reachable} experts that routing {routing} can reach")
    if routing == "zipf":
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(num_experts))
        log_weight = -torch.log(1.0 + order.double())
    else:
        log_weight = torch.zeros(num_experts, dtype=torch.float64)
    uniform = torch.rand(num_tokens, num_experts, generator=generator).double().clamp_min(1e-30)
    keys = log_weight - torch.log(-torch.log(uniform))  # Gumbel: the top-k is a draw without replacement
    keys[:, reachable:] = -torch.inf
    if routing == "hot":
        keys[:, num_experts // 2] = torch.inf
    return keys.topk(topk, dim=1).indices


def draw_route_weights(num_tokens: int, topk: int, generator: torch.Generator) -> Tensor:
    """fp32 [num_tokens, topk], positive, each token's sum 1."""
    weights = torch.rand(num_tokens, topk, generator=generator) + 0.1
    return weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-30)
