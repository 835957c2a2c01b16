"""The layer as a torch module: bf16 tokens and their routes in, bf16 answers out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.api import fp8_mega_moe, get_symm_buffer_for_mega_moe
from megamoe.buffer import SymmBuffer, VirtualSymmBuffer
from megamoe.dynamo import untraced
from megamoe.groups import LocalGroup, VirtualGroup, as_group
from megamoe.quant import describe
from megamoe.weights import L1Weights, L2Weights, check_transformed_weights, transform_weights_for_mega_moe

Pair = tuple[Tensor, Tensor]


class MegaMoE(torch.nn.Module):
    """One MoE layer of this rank: ``y = MegaMoE(weights, group, num_topk=8, num_max_tokens_per_rank=4096)(x, ids, w)``.

    For inference: it has no backward, and refuses inputs that ask for one. torch.compile breaks its graph here.

    Args:
        weights: (l1, l2) of this rank's experts: natural (weight, sf) pairs as in a checkpoint, which are transformed,
            or L1Weights and L2Weights. They become buffers of the module (``l1_weight``, ``l1_sf``, ``l2_weight``,
            ``l2_sf``, transformed), may be replaced in place or by other tensors, and are on the device of the ranks.
        group: a torch process group, a VirtualGroup of one rank, or a SymmBuffer: layers of one shape can share one.
        num_topk: routes of a token.
        num_max_tokens_per_rank: token capacity of each rank.
        routed_scaling_factor: by which the weights of the routes are multiplied.
        activation_clamp: see ``fp8_mega_moe``; ``fast_math`` likewise.
        buffer_options: of ``get_symm_buffer_for_mega_moe``: ``l2_sf_granularity``, ``pool_rows``, ``timeout_s``,
            ``max_ctas``, ``check_every``, ``accumulate``.

    Attributes:
        sym_buffer: its ``check()`` waits and raises what went wrong.

    Raises:
        ValueError: an argument does not fit; the ranks disagree; a VirtualGroup of several ranks (create the buffers
            first, and a module for each of ``.ranks``).
    """

    l1_weight: Tensor
    l1_sf: Tensor
    l2_weight: Tensor
    l2_sf: Tensor

    def __init__(
        self,
        weights: tuple[L1Weights, L2Weights] | tuple[Pair, Pair],
        group: dist.ProcessGroup | VirtualGroup | SymmBuffer,
        *,
        num_topk: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        routed_scaling_factor: float = 1.0,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        **buffer_options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(weights, (tuple, list)) or len(weights) != 2:
            raise ValueError(f"weights: got {type(weights).__name__}, expected (l1, l2)")
        l1, l2 = weights
        if not isinstance(l1, L1Weights) or not isinstance(l2, L2Weights):
            l1, l2 = transform_weights_for_mega_moe(l1, l2)
        for name, tensor in (("l1_weight", l1.weight), ("l1_sf", l1.sf), ("l2_weight", l2.weight), ("l2_sf", l2.sf)):
            self.register_buffer(name, tensor)
        self.routed_scaling_factor = routed_scaling_factor
        self.activation_clamp = activation_clamp
        self.fast_math = fast_math
        if isinstance(group, VirtualSymmBuffer):
            raise ValueError("group: got a VirtualSymmBuffer, expected one rank's SymmBuffer (take one of .ranks)")
        if isinstance(group, SymmBuffer):
            if buffer_options or num_topk is not None or num_max_tokens_per_rank is not None:
                raise ValueError("group: got a SymmBuffer, expected no options of a buffer beside it")
            self.sym_buffer, self._owns_buffer = group, False
        else:
            self.sym_buffer = _open(l1, group, num_topk, num_max_tokens_per_rank, buffer_options)
            self._owns_buffer = True
        check_transformed_weights(self.sym_buffer.config, l1, l2)
        shared_group = self.sym_buffer._group
        several_here = isinstance(shared_group, LocalGroup) and shared_group.num_ranks > 1
        # torch's CPU tensors are there when a call returns; virtual ranks wait for each other, so none may wait alone.
        self._waits = self.sym_buffer.device.type == "cpu" and not several_here

    @untraced
    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, num_tokens: Tensor | None = None) -> Tensor:
        """The layer on this rank's tokens. Every rank calls it, also with none.

        Args:
            x: bf16 or fp32 [..., hidden].
            topk_idx: int32 or int64 [..., num_topk]: global expert ids; below 0 = masked.
            topk_weights: fp32 [..., num_topk].
            num_tokens: int32 [1] on the device: how many of the rows are tokens, read by the launch itself (for a
                captured graph); the other rows of the answer are undefined. None: all.

        Returns:
            bf16 [..., hidden]. On a GPU it is there when the stream comes to it. On the CPU the call waits, except that
            virtual ranks, which wait for each other, are waited for by ``check()`` of their buffers.

        Raises:
            ValueError: an argument does not fit; nothing was launched.
            MegaMoEFault: on the CPU, what went wrong in the launch; on a GPU ``sym_buffer.check()`` raises it.
        """
        hidden = self.sym_buffer.config.hidden
        if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != hidden:
            raise ValueError(f"x: got {describe(x)}, expected bf16 or fp32 [..., {hidden}]")
        leading = x.shape[:-1]
        for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if not isinstance(tensor, Tensor) or tensor.dim() < 1 or tensor.shape[:-1] != leading:
                raise ValueError(
                    f"{name}: got {describe(tensor)}, expected {list(leading)} routes like x {list(x.shape)}"
                )
        tokens = x.numel() // hidden
        shape = x.shape
        if len(leading) != 1:  # a reshape that changes nothing costs the host microseconds too
            x = x.reshape(tokens, hidden)
            topk_idx = topk_idx.reshape(tokens, topk_idx.shape[-1])
            topk_weights = topk_weights.reshape(tokens, topk_weights.shape[-1])
        self.sym_buffer.fill(x, topk_idx, topk_weights, routed_scaling_factor=self.routed_scaling_factor)
        y = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=x.device)
        fp8_mega_moe(
            y,
            L1Weights(self.l1_weight, self.l1_sf),
            L2Weights(self.l2_weight, self.l2_sf),
            self.sym_buffer,
            activation_clamp=self.activation_clamp,
            fast_math=self.fast_math,
            num_tokens=num_tokens,
        )
        if self._waits:
            self.sym_buffer.check()
        return y if len(leading) == 1 else y.reshape(shape)

    def close(self) -> None:
        """Close the buffer, unless it was given."""
        if self._owns_buffer:
            self.sym_buffer.close()

    def extra_repr(self) -> str:
        return f"{self.sym_buffer.config}, routed_scaling_factor={self.routed_scaling_factor}"


def _open(
    l1: L1Weights,
    group: dist.ProcessGroup | VirtualGroup,
    num_topk: int | None,
    num_max_tokens_per_rank: int | None,
    options: dict[str, Any],
) -> SymmBuffer:
    """A buffer for experts of these shapes. Collective."""
    if num_topk is None or num_max_tokens_per_rank is None:
        missing = "num_topk" if num_topk is None else "num_max_tokens_per_rank"
        raise ValueError(f"{missing}: got None, expected a number, or a SymmBuffer in place of the group")
    num_ranks = as_group(group).num_ranks
    if isinstance(group, VirtualGroup) and num_ranks > 1:
        raise ValueError(
            f"group: got {num_ranks} virtual ranks, expected one rank: create the buffers first and a module for each "
            "of .ranks"
        )
    experts, rows, hidden = l1.weight.shape
    opened = get_symm_buffer_for_mega_moe(
        group, experts * num_ranks, num_max_tokens_per_rank, num_topk, hidden, rows // 2, **options
    )
    buffer: SymmBuffer = opened.ranks[0] if isinstance(opened, VirtualSymmBuffer) else opened
    return buffer
