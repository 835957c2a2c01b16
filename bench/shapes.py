"""Layers by the name of the model they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Widths of one routed MoE layer.

    Attributes:
        name: the model.
        hidden: model width.
        intermediate: width of one expert.
        topk: routes of a token.
    """

    name: str
    hidden: int
    intermediate: int
    topk: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's three fp8 matrices."""
        return 3 * self.hidden * self.intermediate

    @property
    def route_flops(self) -> int:
        """Multiplications and additions of one route."""
        return 6 * self.hidden * self.intermediate


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("deepseek-v3", 7168, 2048, 8),
        Shape("v4-flash", 4096, 2048, 6),
        Shape("v4-pro", 7168, 3072, 6),
        Shape("qwen3-235b", 4096, 1536, 8),
        Shape("qwen3-30b", 2048, 768, 8),
    )
}
