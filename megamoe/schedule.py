"""Which tiles a layer uses, and the user's override."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from megamoe.config import SCALE_BLOCK


@dataclass(frozen=True)
class Schedule:
    """Tile shapes of a layer; the answer does not depend on them by a bit.

    Attributes:
        block_m: rows of a pool block, 32, 64 or 128.
        l1_block_n: columns of an L1 output tile, gate and up interleaved.
        l2_block_n: columns of an L2 output tile.
    """

    block_m: int
    l1_block_n: int
    l2_block_n: int

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


DEFAULT_SCHEDULE = Schedule(block_m=128, l1_block_n=2 * SCALE_BLOCK, l2_block_n=2 * SCALE_BLOCK)
"""128-row blocks and 128x256 tiles, for every shape. Target sm90 has no other, and chooses the height of a tile on the
device, from the rows of its block."""


def override_schedule(schedule: Schedule, text: str | None = None) -> Schedule:
    """Apply ``block_m=64,l2_block_n=128`` (by default the text of MEGAMOE_CONFIG) to a schedule.

    Raises:
        ValueError: an entry is not ``name=integer`` with a name of Schedule, or there are two for a name.
    """
    text = os.environ.get("MEGAMOE_CONFIG", "") if text is None else text
    names = sorted(field.name for field in fields(schedule))
    given: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = entry.partition("=")
        if name not in names or not value.isdecimal():
            raise ValueError(f"MEGAMOE_CONFIG: got {entry!r}, expected NAME=INTEGER with a name of {names}")
        if name in given:
            raise ValueError(f"MEGAMOE_CONFIG: got {name} twice, expected it once")
        given[name] = int(value)
    return replace(schedule, **given)
