"""Shared memory that outlives its makers: files in /dev/shm, and memfds that somebody still has open or mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.jsonlines import read_sound_lines
from harness.processes import PROC, Process, describe

SHM_FOLDER = Path("/dev/shm")
HOLDINGS_FILE = "shared_memory.jsonl"


@dataclass(frozen=True)
class FileKey:
    """A file by device and inode: its name may be anybody's."""

    device: int
    inode: int


class Holdings:
    """The shared memory that a step's processes were seen to hold, also written to a file as it is seen, so that who
    cleans up after a killed supervisor knows it too. Files that were there ``before`` the step are not the step's."""

    def __init__(self, folder: Path, before: dict[FileKey, str]) -> None:
        self.before = before
        self.names: dict[FileKey, str] = {}
        self._file = (folder / HOLDINGS_FILE).open("a", buffering=1)

    def add(self, pid: int) -> None:
        for key, name in shared_memory_of(pid):
            if key not in self.before and key not in self.names:
                self.names[key] = name
                line = {"device": key.device, "inode": key.inode, "name": name}
                self._file.write(json.dumps(line) + "\n")


def recorded_holdings(folder: Path) -> dict[FileKey, str]:
    """What a Holdings wrote down in a step's folder."""
    lines = read_sound_lines(folder / HOLDINGS_FILE)
    files = [(line.get("device"), line.get("inode"), line.get("name")) for line in lines]
    return {
        FileKey(device, inode): name
        for device, inode, name in files
        if type(device) is int and type(inode) is int and type(name) is str
    }


def _is_shared_memory(name: str) -> bool:
    return name.startswith(("/memfd:", f"{SHM_FOLDER}/"))


def _open_files(pid: int) -> Iterator[tuple[FileKey, str]]:
    folder = PROC / str(pid) / "fd"
    try:
        numbers = os.listdir(folder)
    except OSError:  # gone, or another user's
        return
    for number in numbers:
        try:
            name = os.readlink(folder / number)
            if _is_shared_memory(name):
                status = os.stat(folder / number)
                yield FileKey(status.st_dev, status.st_ino), name
        except OSError:  # closed between listing and looking
            continue


def _mapped_files(pid: int) -> Iterator[tuple[FileKey, str]]:
    try:
        text = (PROC / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _is_shared_memory(fields[5]):
            major, minor = fields[3].split(":")
            yield FileKey(os.makedev(int(major, 16), int(minor, 16)), int(fields[4])), fields[5]


def shared_memory_of(pid: int) -> Iterator[tuple[FileKey, str]]:
    """Every memfd and /dev/shm file that a process has open or mapped."""
    yield from _open_files(pid)
    yield from _mapped_files(pid)


def shm_snapshot() -> dict[FileKey, str]:
    """The files in /dev/shm now, by identity."""
    files = {}
    for path in SHM_FOLDER.iterdir() if SHM_FOLDER.is_dir() else ():
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        files[FileKey(status.st_dev, status.st_ino)] = str(path)
    return files


def memfd_holders(held: dict[FileKey, str], processes: Iterable[Process]) -> list[str]:
    """Which living processes hold one of the memfds in ``held``, in words."""
    memfds = {key: name for key, name in held.items() if name.startswith("/memfd:")}
    if not memfds:
        return []
    return [
        f"{describe(process)} still holds {memfds[key]}"
        for process in processes
        for key in {key for key, _ in shared_memory_of(process.pid)}
        if key in memfds
    ]


def remove_shm_files(held: dict[FileKey, str]) -> list[str]:
    """Remove the /dev/shm files that a step was seen to hold and did not remove itself; their paths."""
    removed = []
    for key, path in shm_snapshot().items():
        if key in held:
            try:
                os.unlink(path)
            except FileNotFoundError:  # its owner's helper was a moment behind
                continue
            removed.append(path)
    return removed


def unexplained_shm_files(before: dict[FileKey, str], held: dict[FileKey, str]) -> list[str]:
    """/dev/shm files that are new and that nobody in the step was seen to hold: they may be another program's, so they
    are named and left alone."""
    return [path for key, path in shm_snapshot().items() if key not in before and key not in held]
