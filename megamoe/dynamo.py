"""What torch.compile is told of this package."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

import torch._C._dynamo.eval_frame as eval_frame

_Function = TypeVar("_Function", bound=Callable[..., object])


def untraced(function: _Function) -> _Function:
    """Have torch.compile break its graph at a function, and run it and all that it calls as they are: it writes memory
    that no tensor shows.

    What ``torch.compiler.disable`` does, without its cost: it would import the compiler (more than a second) and add
    microseconds to every call.
    """
    assert isinstance(function, FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a caller is not traced into it
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
