"""What a buffer holds, for whoever has to find out why a launch hangs or is wrong.

`describe_counters` of an open buffer; `describe_image` of any image: a dump (`dump.py`), or another process's memory
(`outside.py`). `diff.py` compares two dumps, or one with the oracle.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megamoe.inspect.counters import MAX_LISTED, describe_image
from megamoe.inspect.image import Image, NotSaved
from megamoe.layout import Region

if TYPE_CHECKING:
    from torch import Tensor

    from megamoe.buffer import SymmBuffer

__all__ = ["MAX_LISTED", "Image", "NotSaved", "describe_counters", "describe_image", "image_of"]


def image_of(buffer: SymmBuffer, rank: int | None = None) -> Image:
    """An image of an open buffer's memory, or of a peer's as this process addresses it."""
    memory = buffer.memory_of(rank)

    def read(region: Region, first: int, size: int) -> bytes:
        start = region.offset + first
        return bytes_of(memory[start : start + size])

    return Image(buffer.config, buffer.rank if rank is None else rank, f"memory of pid {os.getpid()}", read)


def bytes_of(memory: Tensor) -> bytes:
    """The bytes of a uint8 tensor, wherever it lies."""
    return memory.cpu().numpy().tobytes()


def describe_counters(buffer: SymmBuffer) -> str:
    """What the counters and flags of one rank's buffer say, in words, without waiting for anything.

    Can be called at any moment, also while a launch runs or hangs: it then shows that launch's bank.

    Args:
        buffer: an open buffer; of the other ranks' memory only route lists are read, and those on the CPU alone.

    Returns:
        Lines, see `describe_image`.

    Raises:
        ValueError: the buffer is closed.
    """
    others = range(buffer.config.num_ranks) if buffer.device.type == "cpu" else [buffer.rank]
    return describe_image(image_of(buffer), {rank: image_of(buffer, rank) for rank in others})
