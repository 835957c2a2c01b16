"""Dispatch: which routes come to a rank, in which order, and the rows they bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config import MegaMoEConfig, ceil_div
from megamoe.quant import E4M3, describe


@dataclass(frozen=True)
class RankInputs:
    """One source rank's inputs as the buffer's views hold them; n is its true token count and may be 0."""

    x: Tensor
    """e4m3 [n, H]."""
    x_sf: Tensor
    """fp32 [n, H/128]."""
    topk_idx: Tensor
    """int64 [n, K]: global expert ids; below 0 masked, E or more masked and that token's y is NaN."""
    topk_weights: Tensor
    """fp32 [n, K]."""

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]


@dataclass(frozen=True)
class Pool:
    """What dispatch leaves on one rank. Tensors hold the routes in use only, in pool order."""

    expert_counts: Tensor
    """int64 [E_local]: routes of each local expert."""
    num_blocks: int
    """Pool blocks in use."""
    block_expert: Tensor
    """int64 [num_blocks]: local expert of each block."""
    block_rows: Tensor
    """int64 [num_blocks]: valid rows in each block, 1 to block_m."""
    rows: Tensor
    """int64 [num_routes]: pool row of each route."""
    source: Tensor
    """int64 [num_routes]: rank the route comes from."""
    token: Tensor
    """int64 [num_routes]: token on that rank."""
    slot: Tensor
    """int64 [num_routes]: top-k slot of that token."""
    x: Tensor
    """e4m3 [num_routes, H]."""
    x_sf: Tensor
    """fp32 [num_routes, H/128]."""
    topk_weights: Tensor
    """fp32 [num_routes]."""
    expert: Tensor
    """int64 [num_routes]: local expert."""

    @property
    def num_routes(self) -> int:
        return self.rows.shape[0]


def dispatch(config: MegaMoEConfig, inputs: Sequence[RankInputs], rank: int) -> Pool:
    """The pool of `rank`: its routes, sorted by (local expert, (source - rank) mod R, token, slot).

    Every expert starts on a block boundary; an expert without routes takes no block. A token that names an expert twice
    has both routes there.
    `config.pool_rows` is not looked at: the oracle's pool is as large as it has to be.

    Args:
        config: the layer.
        inputs: those of every source rank.
        rank: owner of the pool.

    Raises:
        ValueError: `inputs` or `rank` do not fit `config`.
    """
    check_inputs(config, inputs)
    if not 0 <= rank < config.num_ranks:
        raise ValueError(f"rank: got {rank}, expected 0 to {config.num_ranks - 1}")
    counts = torch.zeros(config.experts_per_rank, dtype=torch.int64)
    block_expert: list[int] = []
    block_rows: list[int] = []
    rows: list[Tensor] = []
    origins: list[Tensor] = []  # [routes, 4]: expert, source, token, slot
    for expert in range(config.experts_per_rank):
        first_row = len(block_expert) * config.block_m
        of_expert = [torch.empty((0, 4), dtype=torch.int64)]
        for offset in range(config.num_ranks):
            source = (rank + offset) % config.num_ranks
            global_expert = rank * config.experts_per_rank + expert
            token_and_slot = (inputs[source].topk_idx == global_expert).nonzero().cpu()  # by token, then slot
            head = torch.tensor([[expert, source]]).expand(token_and_slot.shape[0], 2)
            of_expert.append(torch.cat([head, token_and_slot], dim=1))
        origins += of_expert
        count = sum(part.shape[0] for part in of_expert)
        counts[expert] = count
        rows.append(torch.arange(first_row, first_row + count))
        for block in range(ceil_div(count, config.block_m)):
            block_expert.append(expert)
            block_rows.append(min(config.block_m, count - block * config.block_m))

    expert_of, source_of, token_of, slot_of = torch.cat(origins).unbind(dim=1)
    x, x_sf, topk_weights = _pull(config, inputs, source_of, token_of, slot_of, inputs[rank].x.device)
    return Pool(
        expert_counts=counts,
        num_blocks=len(block_expert),
        block_expert=torch.tensor(block_expert, dtype=torch.int64),
        block_rows=torch.tensor(block_rows, dtype=torch.int64),
        rows=torch.cat(rows),
        source=source_of,
        token=token_of,
        slot=slot_of,
        x=x,
        x_sf=x_sf,
        topk_weights=topk_weights,
        expert=expert_of,
    )


def _pull(
    config: MegaMoEConfig,
    inputs: Sequence[RankInputs],
    source_of: Tensor,
    token_of: Tensor,
    slot_of: Tensor,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x, x_sf, topk_weights) of the routes with these origins, on the owner's device."""
    x = torch.empty((len(source_of), config.hidden), dtype=E4M3, device=device)
    x_sf = torch.empty((len(source_of), config.hidden_scales), dtype=torch.float32, device=device)
    topk_weights = torch.empty(len(source_of), dtype=torch.float32, device=device)
    for source, given in enumerate(inputs):
        here = (source_of == source).nonzero().squeeze(1)
        token, slot = token_of[here], slot_of[here]
        x.view(torch.uint8)[here] = given.x.view(torch.uint8)[token].to(device)  # as bytes: a NaN keeps its bits
        x_sf[here] = given.x_sf[token].to(device)
        topk_weights[here] = given.topk_weights[token, slot].to(device)
    return x, x_sf, topk_weights


def check_inputs(config: MegaMoEConfig, inputs: Sequence[RankInputs]) -> None:
    """Checks that every rank's inputs fit `config`.

    Raises:
        ValueError: names the rank and the tensor.
    """
    if len(inputs) != config.num_ranks:
        raise ValueError(f"inputs: got those of {len(inputs)} ranks, expected {config.num_ranks}")
    for rank, given in enumerate(inputs):
        check_rank_inputs(config, given, f"inputs[{rank}]")


def check_rank_inputs(config: MegaMoEConfig, given: RankInputs, name: str) -> None:
    """`check_inputs` for one rank, called `name` in the message."""
    num_tokens = given.x.shape[0] if given.x.dim() else 0
    for field, tensor, dtype, shape in (
        ("x", given.x, E4M3, (num_tokens, config.hidden)),
        ("x_sf", given.x_sf, torch.float32, (num_tokens, config.hidden_scales)),
        ("topk_idx", given.topk_idx, torch.int64, (num_tokens, config.num_topk)),
        ("topk_weights", given.topk_weights, torch.float32, (num_tokens, config.num_topk)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            expected = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            raise ValueError(f"{name}.{field}: got {describe(tensor)}, expected {expected}")
