"""Hidden states for a run: rows of a safetensors file, or generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

Distribution = Literal["normal", "heavy-tailed"]
HIDDEN_TENSOR = "hidden_states"
_TOKENS_A_BLOCK = 64
_HEAVY_CHANNELS, _HEAVY_FACTOR = 4, 50.0


@dataclass(frozen=True)
class HiddenStates:
    """``read(start, stop)`` gives these rows, bf16 or fp32 [stop - start, hidden]."""

    num_tokens: int
    description: str
    read: Callable[[int, int], Tensor]


def open_hidden(path: Path, hidden: int, num_tokens: int | None) -> HiddenStates:
    """The tensor ``hidden_states`` [tokens, hidden] of a safetensors file, or its first ``num_tokens`` rows.

    Raises ValueError that names the file for anything else.
    """
    if not path.is_file():
        raise ValueError(f"--hidden {path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.get_slice(HIDDEN_TENSOR)
            shape, dtype = header.get_shape(), header.get_dtype()
    except SafetensorError as error:
        raise ValueError(f"--hidden {path}: {error} (expected a tensor {HIDDEN_TENSOR!r})") from error
    if dtype not in ("BF16", "F32"):
        raise ValueError(f"--hidden {path}: {HIDDEN_TENSOR} has dtype {dtype}, expected BF16 or F32")
    if len(shape) != 2 or shape[1] != hidden:
        raise ValueError(f"--hidden {path}: {HIDDEN_TENSOR} has shape {shape}, expected [tokens, {hidden}]")
    if num_tokens is not None and num_tokens > shape[0]:
        raise ValueError(f"--tokens is {num_tokens}, but {path} holds {shape[0]}")

    def read(start: int, stop: int) -> Tensor:
        with safe_open(path, framework="pt") as file:
            return file.get_slice(HIDDEN_TENSOR)[start:stop].clone()

    return HiddenStates(shape[0] if num_tokens is None else num_tokens, f"{path}, {dtype.lower()}", read)


def generate_hidden(distribution: Distribution, seed: int, hidden: int, num_tokens: int) -> HiddenStates:
    """bf16 rows, N(0, 1); heavy-tailed: 4 channels 50 times as large. A row depends on ``seed`` and its number only."""
    if seed < 0:
        raise ValueError(f"--seed is {seed}, expected 0 or more")
    factor = np.ones(hidden, dtype=np.float32)
    if distribution == "heavy-tailed":
        factor[np.random.default_rng(seed).choice(hidden, _HEAVY_CHANNELS, replace=False)] = _HEAVY_FACTOR

    def block(number: int) -> Tensor:
        generator = np.random.default_rng([seed, number])
        return torch.from_numpy(generator.standard_normal((_TOKENS_A_BLOCK, hidden), dtype=np.float32) * factor)

    def read(start: int, stop: int) -> Tensor:
        first = start // _TOKENS_A_BLOCK
        blocks = [block(number) for number in range(first, -(-stop // _TOKENS_A_BLOCK))]
        rows = torch.cat([torch.empty(0, hidden), *blocks])
        return rows[start - first * _TOKENS_A_BLOCK : stop - first * _TOKENS_A_BLOCK].bfloat16()

    return HiddenStates(num_tokens, f"generated, {distribution}, seed {seed}", read)
