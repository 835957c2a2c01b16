"""Files of one JSON object a line, written by a process that may be killed at any moment."""

from __future__ import annotations

import json
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 64 << 20
"""Of a file: a step that writes without end must not take the memory of whoever reads it."""


def read_sound_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in ``path``, without what is damaged: for cleaning up, where some is better than none."""
    objects = []
    with suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, dict):
                    objects.append(value)
    return objects


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in ``path``; [] when there is no such file. Only an unfinished last line is forgiven.

    Raises ValueError, naming file and line, for anything else that is not a JSON object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe might never end
            raise ValueError(f"{path}: not a regular file")
        with path.open(errors="replace") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{path}: longer than {MAX_CHARACTERS} characters")
    *lines, unfinished = text.split("\n")
    if unfinished.strip():
        try:
            json.loads(unfinished)
        except (ValueError, RecursionError):
            unfinished = ""
    objects = []
    for number, line in enumerate([*lines, unfinished], start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, got {line[:60]!r}")
        objects.append(value)
    return objects
