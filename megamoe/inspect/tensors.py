"""Regions of an image, and what else a dump holds, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.buffer import DTYPES
from megamoe.inspect.dump import Extra
from megamoe.inspect.image import Image

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def region_tensor(image: Image, name: str) -> Tensor:
    """A region as `SymmBuffer.view` shows it, copied; of a banked one the bank of the launch under way, else of the
    last one.

    Raises:
        NotSaved: the image is a dump that does not hold the region.
    """
    region = image.layout[name]
    flat = torch.frombuffer(bytearray(image.region_bytes(name)), dtype=torch.uint8).view(DTYPES[region.dtype])
    whole = flat.as_strided(region.shape, region.strides)
    return whole[image.bank] if region.banked else whole


def values_of(tensor: Tensor) -> Tensor:
    """float64, for every dtype that views have."""
    return tensor.view(torch.int64).double() if tensor.dtype == torch.uint64 else tensor.double()


def as_extra(tensor: Tensor) -> Extra:
    """A tensor on any device, to be saved in a dump."""
    content = tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return Extra(_NAMES[tensor.dtype], tuple(tensor.shape), content)


def extra_tensor(extra: Extra) -> Tensor:
    """The tensor that `as_extra` was given, on the CPU."""
    dtype = DTYPES[extra.dtype]
    if not extra.content:
        return torch.empty(extra.shape, dtype=dtype)
    return torch.frombuffer(bytearray(extra.content), dtype=torch.uint8).view(dtype).reshape(extra.shape)
