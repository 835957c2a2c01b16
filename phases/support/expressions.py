"""Integer expressions over a config, as views.yaml has them: ``round_up(hidden_scales, 4)``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from megamoe.config import MegaMoEConfig, ceil_div, round_up

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"ceil_div": ceil_div, "round_up": round_up, "min": min, "max": max}


@lru_cache(maxsize=64)
def config_values(config: MegaMoEConfig) -> Mapping[str, int]:
    """Every integer that a config has, by name: its fields and what is derived from them."""
    names = [name for name in dir(type(config)) if not name.startswith("_")]
    values = {name: getattr(config, name) for name in {*names, *vars(config)}}
    return {name: value for name, value in values.items() if type(value) is int}


def evaluate(expression: int | str, values: Mapping[str, int]) -> int:
    """The value of an integer, or of an expression of integers, names of ``values``, ``+ - * // %`` and
    ``ceil_div, round_up, min, max``.

    Raises:
        ValueError: anything else stands in it; the message quotes it.
    """
    if type(expression) is int:
        return expression
    if not isinstance(expression, str):
        raise ValueError(f"expected an integer or an expression, got {expression!r}")
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"not an expression: {expression!r}") from error
    return _value(tree.body, expression, values)


def _value(node: ast.expr, expression: str, values: Mapping[str, int]) -> int:
    def inner(part: ast.expr) -> int:
        return _value(part, expression, values)

    match node:
        case ast.Constant(value=value) if type(value) is int:
            return value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](inner(left), inner(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*[inner(argument) for argument in arguments])
    part: Any = ast.get_source_segment(expression, node)
    raise ValueError(f"{expression!r}: cannot evaluate {part!r}; names are {', '.join(sorted(values))}")
