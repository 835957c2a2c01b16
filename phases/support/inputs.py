"""Tokens, routes and weights of every case: the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from megamoe import L1Weights, L2Weights, transform_weights_for_mega_moe
from megamoe.config import MegaMoEConfig
from megamoe.quant import E4M3, quantize_activations, quantize_weights
from megamoe.reference import RankInputs

CPU = torch.device("cpu")
ACTIVATIONS = ("normal", "heavy_tailed", "all_positive", "tiny_and_huge", "zero_rows")
ROUTINGS = ("random", "one_expert", "counts", "duplicate")
KINDS = ("fast", "clamped", *ACTIVATIONS)
"""Of workloads, by which views.yaml may have bounds of their own."""
_HEAVY_CHANNELS, _HEAVY_FACTOR = 5, 50.0
_TINY, _HUGE = 1e-6, 1e4


@dataclass(frozen=True)
class Tokens:
    """One rank's tokens as a user has them: x bf16 [n, H], topk_idx int64 [n, K], topk_weights fp32 [n, K]."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.x.shape[0])

    def rows(self, index: Tensor | slice) -> Tokens:
        return Tokens(self.x[index], self.topk_idx[index], self.topk_weights[index])

    def quantised(self) -> RankInputs:
        return RankInputs(*quantize_activations(self.x), self.topk_idx, self.topk_weights)


def concatenate(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(
        torch.cat([part.x for part in parts]),
        torch.cat([part.topk_idx for part in parts]),
        torch.cat([part.topk_weights for part in parts]),
    )


def split(tokens: Tokens, sizes: Sequence[int]) -> list[Tokens]:
    """Consecutive pieces of these sizes, one a rank."""
    pieces, first = [], 0
    for size in sizes:
        pieces.append(tokens.rows(slice(first, first + size)))
        first += size
    return pieces


def kinds_of(
    config: MegaMoEConfig, activation_clamp: float | None = None, activations: str = "normal"
) -> tuple[str, ...]:
    """Those of KINDS that a launch is, the one with the loosest bounds first."""
    fast = ("fast",) if config.accumulate == "fast" else ()
    clamped = ("clamped",) if activation_clamp is not None else ()
    return (*fast, *clamped, activations)


@dataclass(frozen=True)
class Workload:
    """What one launch of all ranks works on.

    Attributes:
        name: of the case, with the variant in brackets.
        config: the layer.
        tokens: of each rank.
        activations: one of ACTIVATIONS.
        routing: one of ROUTINGS: random distinct experts; all routes to one; ``counts``; one expert twice in a token.
        masked: share of the routes that are masked.
        counts: for routing ``counts``: how many routes each global expert gets, over all ranks.
        activation_clamp: of SwiGLU; None: no clamp.
        empty: views' rows of which nothing can be compared because the case is about none: ``tokens`` or ``routes``.
    """

    name: str
    config: MegaMoEConfig
    tokens: tuple[int, ...]
    activations: str = "normal"
    routing: str = "random"
    masked: float = 0.0
    counts: tuple[int, ...] = ()
    activation_clamp: float | None = None
    empty: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        assert self.activations in ACTIVATIONS, self
        assert self.routing in ROUTINGS, self
        assert len(self.tokens) == self.config.num_ranks, self

    @property
    def all_positive(self) -> bool:
        return self.activations == "all_positive"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of KINDS that it is."""
        return kinds_of(self.config, self.activation_clamp, self.activations)

    @property
    def weights_kind(self) -> str:
        return "positive" if self.all_positive else "normal"


def generator(*key: object) -> torch.Generator:
    """Seeded by what is in the key; the same in every process and on every machine."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def make_tokens(work: Workload) -> list[Tokens]:
    """The tokens of every rank."""
    total, config = sum(work.tokens), work.config
    draw = generator("tokens", work.name)
    x = _activations(work.activations, total, config.hidden, draw)
    weights = torch.rand(total, config.num_topk, generator=draw) + 0.1
    everything = Tokens(x, _routes(work, total, draw), weights / weights.sum(dim=1, keepdim=True))
    return split(everything, work.tokens)


def _activations(kind: str, tokens: int, hidden: int, draw: torch.Generator) -> Tensor:
    x = torch.randn(tokens, hidden, generator=draw)
    if kind == "heavy_tailed":
        x[:, torch.randperm(hidden, generator=draw)[:_HEAVY_CHANNELS]] *= _HEAVY_FACTOR
    elif kind == "all_positive":
        x = x.abs_() + 0.05
    elif kind == "tiny_and_huge":
        x *= torch.where(torch.arange(tokens) % 2 == 0, _TINY, _HUGE).unsqueeze(1)
    elif kind == "zero_rows":
        x[::3] = 0.0
    return x.to(torch.bfloat16)


def _routes(work: Workload, tokens: int, draw: torch.Generator) -> Tensor:
    config = work.config
    topk = config.num_topk
    if work.routing == "counts":
        assert sum(work.counts) <= tokens * topk, f"{work.name}: {sum(work.counts)} routes for {tokens} tokens"
        flat = torch.full((tokens * topk,), -1, dtype=torch.int64)
        named = torch.repeat_interleave(torch.arange(len(work.counts)), torch.tensor(work.counts))
        flat[: len(named)] = named
        return flat[torch.randperm(len(flat), generator=draw)].reshape(tokens, topk)
    if work.routing == "one_expert":
        routes = torch.full((tokens, topk), config.num_experts - 1, dtype=torch.int64)
    else:
        routes = torch.rand(tokens, config.num_experts, generator=draw).argsort(dim=1)[:, :topk].contiguous()
        if work.routing == "duplicate":
            routes[:, -1] = routes[:, 0]
    routes[torch.rand(tokens, topk, generator=draw) < work.masked] = -1
    return routes


# --- weights -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _base_matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """uint8 [rows * columns] of e4m3 values and fp32 scales, quantised from normal weights of unit gain."""
    draw = generator("weights", rows, columns)
    values = torch.randn(rows, columns, generator=draw) / columns**0.5
    quantised, scales = quantize_weights(values)
    return quantised.view(torch.uint8).reshape(-1), scales


def _matrices(kind: str, experts: range, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """e4m3 [experts, rows, columns] with fp32 scales: one matrix, rolled differently for every expert, with scales that
    differ from block to block by up to a factor of 2, so that a wrong expert, row, column or scale shows."""
    values, scales = (part.to(device) for part in _base_matrix(rows, columns))
    weight = torch.empty(len(experts), rows * columns, dtype=torch.uint8, device=device)
    sf = torch.empty(len(experts), *scales.shape, device=device)
    for index, expert in enumerate(experts):
        draw = generator("expert", expert, rows, columns)
        shift = int(torch.randint(values.numel(), (1,), generator=draw))
        weight[index, shift:] = values[: values.numel() - shift]
        weight[index, :shift] = values[values.numel() - shift :]
        sf[index] = scales * (0.5 + torch.rand(scales.shape, generator=draw)).to(device)
    if kind == "positive":
        weight &= 0x7F
    return weight.reshape(len(experts), rows, columns).view(E4M3), sf


def natural_weights(
    config: MegaMoEConfig, rank: int, kind: str = "normal", device: torch.device = CPU
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((l1 weight, sf), (l2 weight, sf)) of a rank's experts in the order of checkpoints. They depend on the global
    expert and the shape only, so that other numbers of ranks have the same experts."""
    experts = range(rank * config.experts_per_rank, (rank + 1) * config.experts_per_rank)
    hidden, intermediate = config.hidden, config.intermediate_hidden
    shapes = ((2 * intermediate, hidden), (hidden, intermediate))
    l1, l2 = (_matrices(kind, experts, rows, columns, device) for rows, columns in shapes)
    return l1, l2


def make_weights(
    config: MegaMoEConfig, rank: int, kind: str = "normal", device: torch.device = CPU
) -> tuple[L1Weights, L2Weights]:
    """`natural_weights`, transformed."""
    return transform_weights_for_mega_moe(*natural_weights(config, rank, kind, device))
