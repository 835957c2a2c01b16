"""Which files make up a copy of the checkout, by content: made here, verified on the node.

Standard library only, and no import of ours: its source is also sent to the node, which runs it before it trusts any
file that lies there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

KEPT_FOLDERS = ("runs", ".venv", ".megamoe-node")
"""What a node's folder holds beside the copy: results, an environment of its own, and the mark that it is ours."""


def fingerprint(path: Path) -> str:
    """Kind and content of one file: ``file``, ``exec`` (may be run by its owner) or ``link``, and a SHA-256.

    Raises OSError when it cannot be read; FileNotFoundError for what is neither a file nor a link.
    """
    if path.is_symlink():
        return "link " + hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not a regular file")
    kind = "exec" if path.stat().st_mode & 0o100 else "file"
    with path.open("rb") as file:
        return f"{kind} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def files_below(folder: Path) -> Iterator[str]:
    """Every file and link below ``folder``, relative to it, without what is in KEPT_FOLDERS."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        if here == folder:
            folders[:] = [name for name in folders if name not in KEPT_FOLDERS]
        links = [name for name in folders if (here / name).is_symlink()]
        for name in (*files, *links):
            yield str((here / name).relative_to(folder))


def make_manifest(folder: Path) -> dict[str, str]:
    """The fingerprint of every file below ``folder``, by its path relative to it."""
    return {name: fingerprint(folder / name) for name in sorted(files_below(folder))}


def manifest_hash(manifest: Mapping[str, str]) -> str:
    """One SHA-256 that stands for the whole copy."""
    digest = hashlib.sha256()
    for name in sorted(manifest):
        digest.update(f"{manifest[name]} {name}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def differences(manifest: Mapping[str, str], folder: Path) -> list[str]:
    """How ``folder`` differs from the manifest, one entry a file, in words; [] when it is an exact copy."""
    found = []
    present = set(files_below(folder))
    for name in sorted(manifest.keys() | present):
        if name not in present:
            found.append(f"{name} is missing")
        elif name not in manifest:
            found.append(f"{name} should not be there")
        else:
            try:
                same = fingerprint(folder / name) == manifest[name]
            except OSError as error:
                found.append(f"{name} cannot be read ({error.strerror or error})")
                continue
            if not same:
                found.append(f"{name} is another version")
    return found
