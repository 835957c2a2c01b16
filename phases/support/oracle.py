"""What the views of one rank must hold after a launch, by view name, and the part of a view that is valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megamoe import L1Weights, L2Weights
from megamoe.config import ACCUM_DEBUG_EDGE, MegaMoEConfig
from megamoe.reference import (
    Pool,
    RankInputs,
    as_bits,
    combine,
    dispatch,
    l1_epilogue,
    l1_gemm,
    l2_gemm,
    moe_layer,
    quantize_h,
)
from phases.support.launches import Launch, Launcher
from phases.support.ranks import Ranks
from phases.support.view_specs import ORACLE

OWN_PARTIALS = "own_partials"
UNQUANTISED = "unquantised"


@dataclass(frozen=True)
class Expected:
    """The oracle's side of a comparison."""

    values: Tensor
    magnitude: Tensor | None = None


def _u32(values: Tensor) -> Tensor:
    return values.to(torch.int64).to(torch.int32).view(torch.uint32)


def _u64(values: Tensor) -> Tensor:
    return values.to(torch.int64).view(torch.uint64)


def on_device(given: RankInputs, device: torch.device) -> RankInputs:
    return RankInputs(*(part.to(device) for part in (given.x, given.x_sf, given.topk_idx, given.topk_weights)))


class RankReference:
    """The oracle of one rank's owner side, for one set of inputs; each stage is computed when first asked for."""

    def __init__(
        self,
        config: MegaMoEConfig,
        inputs: Sequence[RankInputs],
        rank: int,
        weights: tuple[L1Weights, L2Weights],
        activation_clamp: float | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.own = inputs[rank]
        self.l1, self.l2 = weights
        # Works where the weights are, in float64; what is compared with the other rank's inputs stays where it was.
        self._inputs = [
            on_device(given, self.l1.weight.device) if source == rank else given for source, given in enumerate(inputs)
        ]
        self._clamp = activation_clamp

    @cached_property
    def pool(self) -> Pool:
        return dispatch(self.config, self._inputs, self.rank)

    @cached_property
    def accumulators(self) -> tuple[Tensor, Tensor]:
        """(acc, magnitude), float64 [num_routes, 2I]."""
        return l1_gemm(self.config, self.pool, self.l1)

    @cached_property
    def hidden(self) -> tuple[Tensor, Tensor]:
        """(e4m3 [num_routes, I], fp32 scales)."""
        h = l1_epilogue(self.config, self.accumulators[0], self.pool.topk_weights, activation_clamp=self._clamp)
        return quantize_h(self.config, h)


class RankOracle:
    """What one rank's views must hold after a launch, given the reference for its inputs."""

    def __init__(self, launch: Launch, reference: RankReference) -> None:
        self.launch = launch
        self.reference = reference
        self.config = launch.config
        self.rank = reference.rank
        self.own = reference.own

    @property
    def pool(self) -> Pool:
        return self.reference.pool

    # --- the part of a view that is valid -------------------------------------------------------------------------

    def select(self, view: str, rows: str) -> Tensor:
        """The valid part of a view, copied. ``rows`` as in views.yaml."""
        if view == "y":
            whole = self.launch.y[self.rank]
        else:
            whole = self.launch.buffers[self.rank].view(view)
        match rows:
            case "all":
                return whole.detach().cpu().clone()
            case "tokens":
                return whole[: self.own.num_tokens].detach().cpu().clone()
            case "routes":
                return self._take(whole, self.pool.rows)
            case "window":
                return self._take(whole, self.pool.rows[self.window_routes] % ACCUM_DEBUG_EDGE)
            case "slots":
                return self.partials_at_sources()
        raise ValueError(f"rows: got {rows!r}")

    @staticmethod
    def _take(whole: Tensor, rows: Tensor) -> Tensor:
        return as_bits(whole)[rows].cpu().view(whole.dtype)

    @cached_property
    def window_routes(self) -> Tensor:
        """Routes (positions in pool order) whose rows lie in this rank's debug window."""
        window = self.launch.windows[self.rank]
        return (self.pool.rows // ACCUM_DEBUG_EDGE == window.row_block).nonzero().squeeze(1)

    def partials_at_sources(self) -> Tensor:
        """bf16 [num_routes, H]: what lies in the sources' combine views for each route of this rank's experts."""
        found = torch.empty(self.pool.num_routes, self.config.hidden, dtype=torch.bfloat16)
        buffer = self.launch.buffers[self.rank]
        for source in range(self.config.num_ranks):
            here = (self.pool.source == source).nonzero().squeeze(1)
            combined = buffer.view("combine", rank=source)
            found[here] = combined[self.pool.slot[here], self.pool.token[here]].cpu()
        return found

    def unwritten_slots(self) -> Tensor:
        """bf16 [n, H]: the rows of this rank's combine view that no route names, which nobody may write."""
        combined = self.launch.buffers[self.rank].view("combine")
        named = torch.zeros(combined.shape[:2], dtype=torch.bool)
        valid = (self.own.topk_idx >= 0) & (self.own.topk_idx < self.config.num_experts)
        named[:, : self.own.num_tokens] = valid.T
        return combined.cpu()[~named]

    # --- what it must be -------------------------------------------------------------------------------------------

    def expected(self, view: str, against: str = ORACLE) -> Expected:
        """What ``select`` must give for a view; for y, see `layer_answers`."""
        if against == OWN_PARTIALS:
            return Expected(self.y_of_own_partials())
        makers: dict[str, Callable[[], Expected]] = {
            "x": lambda: Expected(self.own.x),
            "x_sf": lambda: Expected(self.own.x_sf),
            "topk_idx": lambda: Expected(self.own.topk_idx),
            "topk_weights": lambda: Expected(self.own.topk_weights),
            "l1_acts": lambda: Expected(self.pool.x),
            "l1_acts_sf": lambda: Expected(self.pool.x_sf),
            "l1_topk_weights": lambda: Expected(self.pool.topk_weights),
            "expert_recv_count_sum": lambda: Expected(self.receive_counts()),
            "l1_arrival_count": lambda: Expected(_u32(self.per_block(self.pool.block_rows))),
            "token_src_metadata": lambda: Expected(
                _u32(torch.stack([self.pool.source, self.pool.token, self.pool.slot], dim=1))
            ),
            "l1_accum_debug": self.window_accumulators,
            "l2_acts": lambda: Expected(self.reference.hidden[0]),
            "l2_acts_sf": lambda: Expected(self.reference.hidden[1]),
            "l2_arrival_mask": lambda: Expected(self.full_masks()),
            "combine": lambda: Expected(self.partials_of_own_hidden()),
        }
        return makers[view]()

    def receive_counts(self) -> Tensor:
        return _u64(self.launch.buffers[self.rank].epoch << 32 | self.pool.expert_counts)

    def per_block(self, values: Tensor) -> Tensor:
        """Values of the blocks in use, 0 for all others: what the last launch but one counted must be gone."""
        blocks = torch.zeros(self.config.num_pool_blocks, *values.shape[1:], dtype=torch.int64)
        blocks[: len(values)] = values
        return blocks

    def full_masks(self) -> Tensor:
        words = []
        for word in range(self.config.num_mask_words):
            bits = min(64, self.config.num_l1_tiles - 64 * word)
            words.append((1 << bits) - 1 if bits < 64 else -1)
        return _u64(self.per_block(torch.tensor(words).expand(self.pool.num_blocks, len(words))))

    def window_accumulators(self) -> Expected:
        acc, magnitude = self.reference.accumulators
        first = self.launch.windows[self.rank].column_block * ACCUM_DEBUG_EDGE
        columns = slice(first, first + ACCUM_DEBUG_EDGE)
        return Expected(acc[self.window_routes, columns], magnitude[self.window_routes, columns])

    def partials_of_own_hidden(self) -> Tensor:
        """float64 [num_routes, H]: L2 of what the target itself left in l2_acts and l2_acts_sf."""
        device = self.reference.l2.weight.device
        acts, scales = (self.select(view, "routes").to(device) for view in ("l2_acts", "l2_acts_sf"))
        return l2_gemm(self.config, self.pool, acts, scales, self.reference.l2)

    def y_of_own_partials(self) -> Tensor:
        """bf16 [n, H]: what the last stage must make, bit for bit, of the partial results that came here."""
        partial = self.launch.buffers[self.rank].view("combine")[:, : self.own.num_tokens]
        return combine(self.config, self.own, partial.cpu())


def layer_answers(launch: Launch, launcher: Launcher, *, quantize_hidden: bool = True) -> dict[int, Tensor]:
    """y of every rank here by the oracle, float64 [n, H]. Collective.

    Where ranks are processes, each works out what its own experts add to all tokens, and the sums are added up.
    """
    config, ranks = launch.config, launcher.ranks
    options: dict[str, Any] = {"quantize_hidden": quantize_hidden, "activation_clamp": launch.options.activation_clamp}
    weights = [launcher.weights(config, rank, launch.options.weights_kind) for rank in ranks.local]
    if ranks.all_here:
        inputs = [on_device(given, l1.weight.device) for given, (l1, _) in zip(launch.inputs, weights, strict=True)]
        return dict(enumerate(moe_layer(config, inputs, weights, **options)))
    (rank,) = ranks.local
    # Experts that no route names are never looked at, so this rank's weights can stand for those of the others.
    device = weights[0][0].weight.device
    narrowed = [on_device(_only_experts_of(launch, given, rank), device) for given in launch.inputs]
    parts = moe_layer(config, narrowed, weights * config.num_ranks, **options)
    total = _sum(ranks, torch.cat(parts))
    return {rank: total.split([given.num_tokens for given in launch.inputs])[rank]}


def _sum(ranks: Ranks, values: Tensor) -> Tensor:
    return ranks.sum(values) if values.numel() else values


def _only_experts_of(launch: Launch, given: RankInputs, rank: int) -> RankInputs:
    """The inputs with the routes to other ranks' experts masked; ids that no expert has stay as they are."""
    local = launch.config.experts_per_rank
    elsewhere = (given.topk_idx // local != rank) & (given.topk_idx < launch.config.num_experts)
    return RankInputs(given.x, given.x_sf, given.topk_idx.masked_fill(elsewhere, -1), given.topk_weights)
