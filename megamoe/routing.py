"""Top-k routing of the supported MoE routers: which experts a token goes to, and with which weights.

Two routers, as their models define them:

* ``sigmoid`` (DeepSeek-V3 technical report, equations 13 to 16, and its group-limited selection): scores are sigmoids,
  a bias is added for the *selection* only, a group scores the sum of its two best biased scores, and experts are taken
  from the best ``topk_groups`` groups.
* ``softmax`` (Qwen3-MoE): scores are a softmax over all experts.

Logits, scores, biased scores and weights are fp32 as in the models. What produces them (the product with the gate, the
exponentials, the sum of the weights) runs in float64 and is rounded once: fp32 kernels round by a token's place in the
batch, and a token's routes must not depend on how many tokens, threads or ranks share the work. Equal scores go to the
lower expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["RouterConfig", "Routing", "count_routes", "route"]

_TOKENS_AT_A_TIME = 4096  # bounds the float64 copies


@dataclass(frozen=True)
class RouterConfig:
    """How a model routes.

    ``num_groups``: equal groups of consecutive experts, of which ``topk_groups`` are eligible for a token.
    ``normalize_weights``: the weights of a token are divided by their sum (``norm_topk_prob`` in config.json) before
    ``routed_scaling_factor`` is applied. Raises ValueError for a combination that cannot route.
    """

    scoring: Literal["sigmoid", "softmax"]
    num_experts: int
    num_topk: int
    normalize_weights: bool
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in ("sigmoid", "softmax"):
            raise ValueError(f"scoring is {self.scoring!r}, expected 'sigmoid' or 'softmax'")
        if self.num_experts < 1:
            raise ValueError(f"num_experts is {self.num_experts}, expected at least 1")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups is {self.num_groups}, expected a divisor of num_experts = {self.num_experts}")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"topk_groups is {self.topk_groups}, expected 1 to num_groups = {self.num_groups}")
        if self.num_groups > 1 and self.experts_per_group < 2:
            raise ValueError(f"num_groups is {self.num_groups}: a group of one expert has no two best scores to sum")
        eligible = self.topk_groups * self.experts_per_group
        if not 1 <= self.num_topk <= eligible:
            raise ValueError(
                f"num_topk is {self.num_topk}, expected 1 to {eligible} (the experts of the chosen groups)"
            )

    @property
    def experts_per_group(self) -> int:
        return self.num_experts // self.num_groups


@dataclass(frozen=True)
class Routing:
    """``topk_idx`` int64 [tokens, num_topk], best expert first; ``topk_weights`` fp32 of the same shape."""

    topk_idx: Tensor
    topk_weights: Tensor


def route(
    config: RouterConfig, hidden_states: Tensor, gate_weight: Tensor, correction_bias: Tensor | None = None
) -> Routing:
    """Routes ``hidden_states`` (bf16 or fp32 [tokens, hidden]) by ``gate_weight`` (float [num_experts, hidden]).

    ``correction_bias`` (float [num_experts]) shifts the selection and leaves the weights alone. A token with a NaN
    still gets ``num_topk`` distinct experts; its weights are NaN. Raises ValueError for shapes that do not fit.
    """
    _check_shapes(config, hidden_states, gate_weight, correction_bias)
    gate = gate_weight.double().T
    logits = torch.cat([(tokens.double() @ gate).float() for tokens in hidden_states.split(_TOKENS_AT_A_TIME)])
    exact = logits.double()
    scores = (exact.sigmoid() if config.scoring == "sigmoid" else exact.softmax(dim=-1)).float()
    selection = scores if correction_bias is None else scores + correction_bias.float()
    topk_idx = _best(_mask_groups(config, selection), config.num_topk)
    weights = scores.gather(1, topk_idx)
    if config.normalize_weights:
        # DeepSeek adds 1e-20 because all its sigmoids may underflow; the best of a softmax is at least 1 / num_experts.
        total = weights.double().sum(dim=-1, keepdim=True).float()
        weights = weights / (total + (1e-20 if config.scoring == "sigmoid" else 0.0))
    return Routing(topk_idx, weights * config.routed_scaling_factor)


def count_routes(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Routes of each expert, int64 [num_experts]. ``topk_idx``: int64 [tokens, num_topk]; ids outside do not count."""
    valid = topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)]
    return torch.bincount(valid.flatten(), minlength=num_experts)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` greatest of each row, greatest first; equal ones in index order (topk promises none)."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


def _mask_groups(config: RouterConfig, selection: Tensor) -> Tensor:
    """``selection`` with -inf wherever the expert's group is not among the token's ``topk_groups`` best."""
    if config.topk_groups == config.num_groups:
        return selection
    grouped = selection.unflatten(1, (config.num_groups, config.experts_per_group))
    group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool)
    chosen.scatter_(1, _best(group_scores, config.topk_groups), True)
    return grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)


def _check_shapes(config: RouterConfig, hidden: Tensor, gate: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden_states has shape {list(hidden.shape)}, expected [tokens, hidden]")
    if gate.shape != (config.num_experts, hidden.shape[1]):
        raise ValueError(
            f"gate_weight has shape {list(gate.shape)}, expected [num_experts, hidden] = "
            f"[{config.num_experts}, {hidden.shape[1]}]"
        )
    if bias is not None and bias.shape != (config.num_experts,):
        raise ValueError(f"correction_bias has shape {list(bias.shape)}, expected [{config.num_experts}]")
