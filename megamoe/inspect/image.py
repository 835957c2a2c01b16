"""One rank's buffer as bytes that can be read by region, wherever they lie: here, in another process, in a file.

Nothing in here needs torch: a hang is explained in a second, on a machine whose cores are busy waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megamoe.config import MegaMoEConfig
from megamoe.layout import ITEM_BYTES, NUM_BANKS, BufferLayout, Region, buffer_layout

_CODES = {"u32": "I", "u64": "Q", "i64": "q"}


def _integers(region: Region, content: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(content) // ITEM_BYTES[region.dtype]}{_CODES[region.dtype]}", content)


class NotSaved(LookupError):
    """A dump holds the counters of a buffer always and its data only where it is small: this was left out."""


@dataclass(frozen=True)
class Image:
    """A rank's buffer. ``read_region(region, first byte, number of bytes)`` gives bytes of a region as they are now.

    ``origin`` says in words where the bytes come from.
    """

    config: MegaMoEConfig
    rank: int
    origin: str
    read_region: Callable[[Region, int, int], bytes]

    @cached_property
    def layout(self) -> BufferLayout:
        return buffer_layout(self.config)

    def region_bytes(self, name: str) -> bytes:
        """The whole of a region, both banks of a banked one."""
        region = self.layout[name]
        return self.read_region(region, 0, region.num_bytes)

    def words(self, name: str, bank: int | None = None) -> list[int]:
        """A region of integers, flat; of a banked one the bank asked for."""
        region = self.layout[name]
        item = ITEM_BYTES[region.dtype]
        size = region.strides[0] * item if region.banked else region.num_bytes
        first = (bank or 0) * size
        return list(_integers(region, self.read_region(region, first, size)))

    def word(self, name: str) -> int:
        """The first word of a region."""
        region = self.layout[name]
        item = ITEM_BYTES[region.dtype]
        return _integers(region, self.read_region(region, 0, item))[0]

    def row(self, name: str, index: int) -> list[int]:
        """One row (or element) of a region of integers that has no banks."""
        region = self.layout[name]
        size = region.strides[0] * ITEM_BYTES[region.dtype]
        return list(_integers(region, self.read_region(region, index * size, size)))

    @property
    def is_under_way(self) -> bool:
        """A launch has begun and not ended."""
        return self.word("in_use") != 0

    @property
    def is_troubled(self) -> bool:
        """A launch is under way or was aborted, or a fault is on record."""
        return self.is_under_way or self.word("abort") != 0 or self.word("fault_count") != 0

    @property
    def bank(self) -> int:
        """Of the launch under way, else of the last one."""
        return (self.word("epoch") + self.is_under_way) % NUM_BANKS
