"""The layer of this checkout as a contender."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

import megamoe
from bench.inputs import InputSet
from bench.shapes import Shape
from bench.world import World
from megamoe.config import Accumulate
from megamoe.weights import L1Weights, L2Weights

OPTIONS_VARIABLE = "MEGAMOE_SM90_OPTIONS"


class FusedLayer:
    """Buffers and transformed weights of the ranks here. Contenders that differ in build options share them."""

    def __init__(
        self,
        world: World,
        shape: Shape,
        experts_per_rank: int,
        capacity: int,
        weights: dict[int, tuple[L1Weights, L2Weights]],
        accumulate: Accumulate,
    ) -> None:
        self.world = world
        self.accumulate = accumulate
        opened = megamoe.get_symm_buffer_for_mega_moe(
            world.group,
            experts_per_rank * world.num_ranks,
            capacity,
            shape.topk,
            shape.hidden,
            shape.intermediate,
            timeout_s=10,
            accumulate=accumulate,
        )
        self._opened = opened
        buffers = list(opened.ranks) if world.kind == "virtual" else [opened]
        self.buffers = dict(zip(world.local_ranks, buffers, strict=True))
        self.weights = weights
        self._views = {
            rank: (buffer.x.view(torch.uint8), buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
            for rank, buffer in self.buffers.items()
        }
        self._sets: Sequence[InputSet] = ()
        self.y: dict[int, Tensor] = {}

    def use(self, sets: Sequence[InputSet]) -> None:
        """Work on these input sets from now on."""
        if self._sets is sets:
            return
        self._sets = sets
        self.y = {
            rank: torch.full(tokens.x.shape, torch.nan, dtype=torch.bfloat16, device=tokens.x.device)
            for rank, tokens in sets[0].tokens.items()
        }

    def load_kernels(self) -> None:
        """Take the build that the build options of now ask for, for the launches that follow."""
        for buffer in self.buffers.values():
            buffer.load()

    def load(self, index: int) -> None:
        """Copy an input set into the views of the buffers."""
        for rank, tokens in self._sets[index].tokens.items():
            count = tokens.x.shape[0]
            given = (tokens.x.view(torch.uint8), tokens.x_sf, tokens.topk_idx, tokens.topk_weights)
            for view, values in zip(self._views[rank], given, strict=True):
                view[:count].copy_(values)

    def call(self) -> None:
        """Queue one launch on every rank of this process."""
        for rank, buffer in self.buffers.items():
            l1, l2 = self.weights[rank]
            megamoe.fp8_mega_moe(self.y[rank], l1, l2, buffer)

    def check(self) -> None:
        """Wait; raises MegaMoEFault."""
        self._opened.check()

    def close(self) -> None:
        """Give the memory back."""
        self._views.clear()
        self._opened.close()
        self.y.clear()


class FusedContender:
    """A FusedLayer with one set of build options."""

    combine = "bf16"
    tolerance = 0.02
    asynchronous = True

    def __init__(self, layer: FusedLayer, options: str | None) -> None:
        self._layer = layer
        self._options = options
        self.name = "megamoe" if not options else f"megamoe {options}"
        self.accumulate: str = layer.accumulate

    def use(self, sets: Sequence[InputSet]) -> None:
        self._layer.use(sets)

    def load(self, index: int) -> None:
        if self._options is not None:
            os.environ[OPTIONS_VARIABLE] = self._options
            self._layer.load_kernels()
        self._layer.load(index)

    def call(self) -> None:
        self._layer.call()

    def check(self) -> None:
        self._layer.check()

    def close(self) -> None:
        self._layer.close()

    def answer(self) -> dict[int, Tensor]:
        """y of the last call, by rank."""
        return self._layer.y
