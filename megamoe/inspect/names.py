"""The name of a rank's memory on the CPU: who finds it in /proc knows whose it is and how to read it."""

from __future__ import annotations

import json
from dataclasses import astuple

from megamoe.config import MegaMoEConfig

MEMFD_PREFIX = "megamoe-rank"
LINK_PREFIX = f"/memfd:{MEMFD_PREFIX}"
_DELETED = " (deleted)"


def memfd_name(config: MegaMoEConfig, rank: int) -> str:
    """``megamoe-rank3:[8,16,…]``: the rank, and the fields of the config in their order, as JSON."""
    return f"{MEMFD_PREFIX}{rank}:{json.dumps(astuple(config), separators=(',', ':'))}"


def parse_memfd_link(link: str) -> tuple[int, MegaMoEConfig] | None:
    """(rank, config) of a link in /proc/<pid>/fd or a path in /proc/<pid>/maps; None: not a rank's memory.

    Raises:
        ValueError: a rank's memory, but of another version of the package, whose config has other fields.
    """
    if not link.startswith(LINK_PREFIX):
        return None
    rank, colon, fields = link.removeprefix(LINK_PREFIX).removesuffix(_DELETED).partition(":")
    if not colon or not rank.isdecimal():
        return None
    try:
        return int(rank), MegaMoEConfig(*json.loads(fields))
    except TypeError as error:
        raise ValueError(f"{link}: made by another version of megamoe: {error}") from error
