"""The layer from torch and NCCL alone: all-to-all, `torch._scaled_grouped_mm`, all-to-all back.

Row-wise scales, since that is what the grouped product takes: one for each token row and one for each output column
of a weight. Weights and tokens are the values of the fp8 data of the other contenders, quantised a second time, so y
differs from theirs by that. Between the products it is eager torch; sizes of an exchange go through the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

from bench.inputs import InputSet, NaturalWeights
from bench.shapes import Shape
from bench.world import World
from megamoe.quant import E4M3, E4M3_MAX, dequantize_activations, dequantize_weights

ROW_ALIGNMENT = 16
"""Rows to which an expert's rows are padded for the grouped product."""


def missing_baseline(world: World) -> str | None:
    """Why the baseline cannot run in this world; None: it can."""
    if world.kind == "virtual" and world.num_ranks > 1:
        return f"{world.num_ranks} virtual ranks: its exchange needs one process a rank (torchrun)"
    return None


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [rows, columns], fp32 [rows]): one scale a row."""
    sf = values.abs().amax(dim=1).float().clamp_min(1e-10) / E4M3_MAX
    return (values * (1.0 / sf)[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), sf


def _requantize(weight: Tensor, sf: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 128 x 128 to one scale an output row, an expert at a time: (e4m3 [E, N, K], fp32 [E, N])."""
    experts, rows, _ = weight.shape
    q = torch.empty_like(weight)
    scales = torch.empty(experts, rows, device=weight.device)
    for expert in range(experts):
        values, scales[expert] = quantize_rows(dequantize_weights(weight[expert], sf[expert], torch.float32))
        q[expert].view(torch.uint8).copy_(values.view(torch.uint8))
    return q, scales


@dataclass(frozen=True)
class Placement:
    """Where received rows go in the padded input of the grouped product.

    Attributes:
        place: int64 [rows], a row of the padded input for each received row.
        offsets: int32 [experts], where each expert's padded rows end.
    """

    place: Tensor
    offsets: Tensor


def place_rows(counts: Tensor, num_rows: int) -> Placement:
    """Group rows that are sorted by (source, expert) by expert, every expert padded to ROW_ALIGNMENT rows.

    Args:
        counts: int64 [sources, experts], rows of each; their sum is ``num_rows``.
        num_rows: known to the host, so that nothing here waits for the GPU.
    """
    sources, experts = counts.shape
    of_expert = counts.sum(dim=0)
    padded = (of_expert + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
    ends = padded.cumsum(0)
    earlier_sources = counts.cumsum(0) - counts
    first_place = ((ends - padded) + earlier_sources).flatten()
    flat = counts.flatten()
    first_row = flat.cumsum(0) - flat
    segment = torch.repeat_interleave(torch.arange(sources * experts, device=counts.device), flat, output_size=num_rows)
    rows = torch.arange(num_rows, device=counts.device)
    return Placement(rows - first_row[segment] + first_place[segment], ends.to(torch.int32))


@dataclass(frozen=True)
class _Tokens:
    x: Tensor  # uint8 view of e4m3 [tokens, H]
    sf: Tensor  # fp32 [tokens]
    topk_idx: Tensor
    topk_weights: Tensor  # bf16 [tokens, 1, topk]


class TorchBaseline:
    """One rank of a process group, or one rank alone."""

    accumulate = "fast"
    combine = "bf16"
    tolerance = 0.15
    """Tokens, weights and the intermediate are quantised with other scales, 2.6e-2 each time."""
    asynchronous = False

    def __init__(self, world: World, shape: Shape, experts_per_rank: int, weights: dict[int, NaturalWeights]) -> None:
        (self._rank,) = world.local_ranks
        self._exchanges = world.num_ranks > 1
        self.asynchronous = not self._exchanges
        self.name = "nccl+scaled_grouped_mm" if self._exchanges else "scaled_grouped_mm"
        self._world = world
        self._shape = shape
        self._experts = experts_per_rank
        self._l1 = _requantize(*weights[self._rank].l1)
        self._l2 = _requantize(*weights[self._rank].l2)
        self._prepared: list[_Tokens] = []
        self._sets: Sequence[InputSet] = ()
        self._now: _Tokens | None = None
        self._y: Tensor | None = None

    def use(self, sets: Sequence[InputSet]) -> None:
        """Work on these input sets from now on."""
        if self._sets is sets:
            return
        self._sets = sets
        self._prepared = []
        for one in sets:
            tokens = one.tokens[self._rank]
            x, sf = quantize_rows(dequantize_activations(tokens.x, tokens.x_sf, torch.float32))
            weights = tokens.topk_weights.to(torch.bfloat16).unsqueeze(1)
            self._prepared.append(_Tokens(x.view(torch.uint8), sf, tokens.topk_idx, weights))

    def load(self, index: int) -> None:
        self._now = self._prepared[index]

    def call(self) -> None:
        """Queue one call; waits for the sizes of the exchange."""
        assert self._now is not None, "load() comes before call()"
        now, topk = self._now, self._shape.topk
        experts = now.topk_idx.flatten()
        routes = experts.numel()
        order = torch.argsort(experts, stable=True)
        counts = torch.zeros(self._world.num_ranks * self._experts, dtype=torch.int64, device=experts.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        counts = counts.reshape(self._world.num_ranks, self._experts)
        token = order // topk
        rows, sf = now.x.index_select(0, token), now.sf.index_select(0, token)
        send, receive = [routes], [routes]
        if self._exchanges:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            send, receive = torch.stack([counts.sum(dim=1), theirs.sum(dim=1)]).tolist()
            rows, sf = self._exchange(rows, send, receive), self._exchange(sf, send, receive)
            counts = theirs
        partial = self._experts_forward(rows, sf, counts, sum(receive))
        if self._exchanges:
            partial = self._exchange(partial, receive, send)
        by_token = partial.index_select(0, torch.argsort(order)).reshape(-1, topk, self._shape.hidden)
        self._y = torch.bmm(now.topk_weights, by_token).squeeze(1)

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive, send)
        return received

    def _experts_forward(self, rows: Tensor, sf: Tensor, counts: Tensor, num_rows: int) -> Tensor:
        """bf16 [rows, H] of received e4m3 rows (as uint8), in their order."""
        placement = place_rows(counts, num_rows)
        padded = num_rows + self._experts * ROW_ALIGNMENT
        x = rows.new_empty((padded, rows.shape[1]))
        x.index_copy_(0, placement.place, rows)
        x_sf = sf.new_ones(padded)
        x_sf.index_copy_(0, placement.place, sf)
        gate_up = _grouped(x.view(E4M3), x_sf, self._l1, placement.offsets)
        gate, up = gate_up.chunk(2, dim=1)
        h, h_sf = quantize_rows(functional.silu(gate) * up)
        return _grouped(h, h_sf, self._l2, placement.offsets).index_select(0, placement.place)

    def check(self) -> None:
        self._world.synchronize()

    def answer(self) -> dict[int, Tensor]:
        """y of the last call, by rank."""
        assert self._y is not None, "call() comes before answer()"
        return {self._rank: self._y}

    def close(self) -> None:
        del self._l1, self._l2
        self._prepared, self._now, self._y = [], None, None


def _grouped(x: Tensor, x_sf: Tensor, weights: tuple[Tensor, Tensor], offsets: Tensor) -> Tensor:
    weight, weight_sf = weights
    return torch._scaled_grouped_mm(
        x,
        weight.transpose(-2, -1),
        x_sf,
        weight_sf,
        offs=offsets,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
