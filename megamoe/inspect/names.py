"""The name of a rank's memory on the CPU: who finds it in /proc knows whose it is and how to read it."""

from __future__ import annotations

import json
from dataclasses import astuple

from megamoe.config import MegaMoEConfig
from megamoe.layout import buffer_layout

MEMFD_PREFIX = "megamoe-rank"
LINK_PREFIX = f"/memfd:{MEMFD_PREFIX}"
_DELETED = " (deleted)"


def memfd_name(config: MegaMoEConfig, rank: int) -> str:
    """``megamoe-rank3:1a2b3c4d:[8,16,…]``: the rank, the digest of the layout, and the fields of the config in their
    order, as JSON."""
    return f"{MEMFD_PREFIX}{rank}:{buffer_layout(config).digest}:{json.dumps(astuple(config), separators=(',', ':'))}"


def parse_memfd_link(link: str) -> tuple[int, MegaMoEConfig] | None:
    """(rank, config) of a link in /proc/<pid>/fd or a path in /proc/<pid>/maps; None: not a rank's memory.

    Raises:
        ValueError: a rank's memory, but of another version of the package: its config has other fields, or its layout
            is another.
    """
    if not link.startswith(LINK_PREFIX):
        return None
    rank, colon, rest = link.removeprefix(LINK_PREFIX).removesuffix(_DELETED).partition(":")
    if not colon or not rank.isdecimal():
        return None
    digest, _, fields = rest.partition(":")
    try:
        config = MegaMoEConfig(*json.loads(fields))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{link}: made by another version of megamoe: {error}") from error
    if digest != buffer_layout(config).digest:
        raise ValueError(f"{link}: made by another version of megamoe, which lays buffers out differently")
    return int(rank), config
