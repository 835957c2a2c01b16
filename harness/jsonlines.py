"""Files of one JSON object a line, written by a process that may be killed at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in ``path``; [] when there is no such file. Only an unfinished last line is forgiven.

    Raises ValueError, naming file and line, for anything else that is not a JSON object.
    """
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    *lines, unfinished = text.split("\n")
    if unfinished.strip():
        try:
            json.loads(unfinished)
        except json.JSONDecodeError:
            unfinished = ""
    objects = []
    for number, line in enumerate([*lines, unfinished], start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, got {line[:60]!r}")
        objects.append(value)
    return objects
