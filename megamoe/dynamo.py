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

    What ``torch.compiler.disable`` does, but neither imports the compiler nor adds to the cost of a call. By the names
    that it uses itself, private ones: they are in torch 2.13 (run) and in stored sources of versions before it (read).
    """
    assert isinstance(function, FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # tracing a caller stops here
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
