"""Error maps as PNG pictures inside a page: one pixel a cell, coloured by how far beyond the bound it is."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]

NOTHING: Colour = (238, 241, 244)
WITHIN: tuple[Colour, Colour] = ((205, 222, 240), (38, 98, 168))
BEYOND: tuple[Colour, Colour] = ((250, 176, 60), (150, 8, 26))
WITHIN_DECADES = 3
BEYOND_DECADES = 3
"""Shades run over so many powers of ten below the bound, and above it."""


def _between(ends: tuple[Colour, Colour], share: float) -> Colour:
    share = min(1.0, max(0.0, share))
    red, green, blue = (round(low + (high - low) * share) for low, high in zip(*ends, strict=True))
    return red, green, blue


def colour(value: float, unit: str) -> Colour:
    """Of a cell: ``value`` in bounds, or for ``differ`` a number of wrong elements, each of them beyond the bound."""
    if value <= 0:
        return NOTHING
    decades = math.log10(value)
    if unit == "differ":
        return _between(BEYOND, decades / BEYOND_DECADES)
    if decades <= 0:
        return _between(WITHIN, 1 + decades / WITHIN_DECADES)
    return _between(BEYOND, decades / BEYOND_DECADES)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(pixels: Sequence[Sequence[Colour]]) -> bytes:
    """An RGB picture of 8 bits a channel; rows of equal length."""
    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(channel for pixel in row for channel in pixel) for row in pixels)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    )


def _data_uri(pixels: Sequence[Sequence[Colour]]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def map_picture(cells: Sequence[Sequence[float]], unit: str) -> str:
    """A data URI of an error map's picture."""
    return _data_uri([[colour(value, unit) for value in row] for row in cells])


def legend_picture(steps: int = 60) -> str:
    """A data URI of the scale: from a thousandth of the bound to a thousand times it."""
    exponents = [-WITHIN_DECADES + (WITHIN_DECADES + BEYOND_DECADES) * (i + 0.5) / steps for i in range(steps)]
    return _data_uri([[colour(10**exponent, "bound") for exponent in exponents]])
