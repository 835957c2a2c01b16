"""Buffers of other processes on this machine: read while their ranks are stuck, without a word from them.

On the CPU a rank's memory is a memfd, which its owner and every peer that maps it hold open: so it can be read through
``/proc/<pid>/fd``, and that of a rank that has died through a peer's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megamoe.config import MegaMoEConfig
from megamoe.inspect.image import Image
from megamoe.inspect.names import LINK_PREFIX, parse_memfd_link
from megamoe.layout import Region

PROC = Path("/proc")


class OutsideBuffers:
    """All buffers that some processes hold. Keeps the memory alive, whatever becomes of them, until it is closed.

    Attributes:
        found: an image of each buffer.
        problems: what could not be read, in words.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self.found: list[Image] = []
        self.problems: list[str] = []
        self._handles: dict[int, int] = {}
        for pid in pids:
            for handle, link in _held_memory(pid):
                inode = os.fstat(handle).st_ino
                if inode in self._handles:
                    os.close(handle)
                    continue
                self._handles[inode] = handle
                self._add(handle, link, pid)

    def _add(self, handle: int, link: str, pid: int) -> None:
        try:
            parsed = parse_memfd_link(link)
        except ValueError as error:
            self.problems.append(str(error))
            return
        if parsed is not None:
            rank, config = parsed
            self.found.append(_image(config, rank, f"memory that pid {pid} holds", handle))

    def groups(self) -> dict[MegaMoEConfig, dict[int, Image]]:
        """By config, then by rank. Of several buffers of one rank with one config, one that is in trouble."""
        groups: dict[MegaMoEConfig, dict[int, Image]] = {}
        for image in self.found:
            group = groups.setdefault(image.config, {})
            known = group.get(image.rank)
            if known is None or (image.is_troubled and not known.is_troubled):
                group[image.rank] = image
        return {config: dict(sorted(group.items())) for config, group in groups.items()}

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def _image(config: MegaMoEConfig, rank: int, origin: str, handle: int) -> Image:
    def read(region: Region, first: int, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:  # one call reads at most 2 GiB
            part = os.pread(handle, size - len(content), region.offset + first + len(content))
            if not part:
                raise OSError(f"{origin}: {region.name} ends after {len(content)} of {size} bytes")
            content += part
        return bytes(content)

    return Image(config, rank, origin, read)


def _held_memory(pid: int) -> Iterator[tuple[int, str]]:
    """(handle of this process, link) for every rank's memory that a process has open."""
    folder = PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:  # gone, or another user's
        return
    for name in names:
        try:
            link = os.readlink(folder / name)
            if link.startswith(LINK_PREFIX):
                yield os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC), link
        except OSError:  # closed between listing and looking
            continue
