"""An installed `deep_gemm` with `fp8_mega_moe` (sgl-deep-gemm) as a contender, called as its Python API says."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.inputs import InputSet, NaturalWeights
from bench.shapes import Shape
from bench.world import World

ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, OSError)
"""What code of others raises where it cannot run here; the rows of the rest are wanted all the same."""
NEEDED = ("fp8_mega_moe", "get_symm_buffer_for_sm90_mega_moe", "transform_weights_for_mega_moe_sm90")
BOUND = "num_tokens_bound"
"""Parameter of newer releases: the most tokens a rank has in this call. Without it they plan for all that the buffer
holds, padded (0.2.5: to 128)."""


def peer_name() -> str:
    """``deep_gemm VERSION``, as far as one is installed."""
    for distribution in ("sgl-deep-gemm", "deep-gemm"):
        try:
            return f"deep_gemm {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "deep_gemm"


def find_deep_gemm(world: World) -> tuple[Any, str | None]:
    """(the module, None), or (None, why it cannot run here)."""
    if world.kind == "virtual":
        return None, "its buffers need a process group (torchrun, also for one rank)"
    try:
        module = importlib.import_module("deep_gemm")
    except (ImportError, *ERRORS) as error:
        return None, f"import deep_gemm: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        return None, f"deep_gemm has no {', '.join(missing)}"
    return module, None


class DeepGemm:
    """One rank. Its buffer is made anew for each token count, so that its own choices fit that count."""

    accumulate = "own"
    """As that release does; its API has no choice."""
    combine = "bf16"
    tolerance = 0.06
    """It may quantise the intermediate in other groups: twice what `y_unquantised` allows, independent."""
    asynchronous = True

    def __init__(
        self, module: Any, world: World, shape: Shape, experts_per_rank: int, weights: dict[int, NaturalWeights]
    ) -> None:
        (self._rank,) = world.local_ranks
        self.name = peer_name()
        self._module = module
        self._world = world
        self._shape = shape
        self._num_experts = experts_per_rank * world.num_ranks
        natural = weights[self._rank]
        self._l1, self._l2 = module.transform_weights_for_mega_moe_sm90(natural.l1, natural.l2)
        self._has_bound = BOUND in inspect.signature(module.fp8_mega_moe).parameters
        self._bound: dict[str, int] = {}
        self._buffer: Any = None
        self._sets: Sequence[InputSet] = ()
        self._y: Tensor | None = None

    def use(self, sets: Sequence[InputSet]) -> None:
        """Work on these input sets from now on. Collective."""
        if self._sets is sets:
            return
        self._sets = sets
        tokens = sets[0].tokens[self._rank].x.shape[0]
        self._release()
        self._buffer = self._module.get_symm_buffer_for_sm90_mega_moe(
            self._world.group,
            self._num_experts,
            tokens,
            self._shape.topk,
            self._shape.hidden,
            self._shape.intermediate,
        )
        expected = (self._shape.hidden // 128,)
        if tuple(self._buffer.x_sf.shape[1:]) != expected:
            raise RuntimeError(
                f"deep_gemm: x_sf of its buffer is {list(self._buffer.x_sf.shape)}, expected [tokens, {expected[0]}]"
            )
        if self._has_bound:
            self._bound = {BOUND: tokens}
        shape = (tokens, self._shape.hidden)  # NaN: what the peer does not write is seen
        self._y = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self._buffer.x.device)

    def load(self, index: int) -> None:
        tokens, buffer = self._sets[index].tokens[self._rank], self._buffer
        count = tokens.x.shape[0]
        buffer.x[:count].view(torch.uint8).copy_(tokens.x.view(torch.uint8))
        buffer.x_sf[:count].copy_(tokens.x_sf)
        buffer.topk_idx[:count].copy_(tokens.topk_idx)
        buffer.topk_weights[:count].copy_(tokens.topk_weights)

    def call(self) -> None:
        self._module.fp8_mega_moe(self._y, self._l1, self._l2, self._buffer, **self._bound)

    def check(self) -> None:
        self._world.synchronize()

    def answer(self) -> dict[int, Tensor]:
        """y of the last call, by rank."""
        assert self._y is not None, "use() comes before answer()"
        return {self._rank: self._y}

    def _release(self) -> None:
        if self._buffer is not None:
            self._world.synchronize()
            self._world.largest([0.0])  # no peer may still write into it
            self._buffer.destroy()
            self._buffer = None

    def close(self) -> None:
        self._release()
        del self._l1, self._l2
        self._y = None
