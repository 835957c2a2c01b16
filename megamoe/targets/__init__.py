"""The machines a layer runs on. Each module offers the same few calls: ``build_all``, ``open_ranks``, and a rank
object to launch on, wait for and read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from megamoe.config import MAX_RANKS
from megamoe.groups import TARGETS


def get_target(name: str) -> ModuleType:
    """The module of a target.

    Raises:
        ValueError: there is no such target.
    """
    if name not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {name!r}")
    return importlib.import_module(f"megamoe.targets.{name}")


def build_all(name: str, report: Callable[[str], None] = print, max_ranks: int = MAX_RANKS) -> None:
    """Compile everything that groups of up to ``max_ranks`` ranks may need of a target, and say what."""
    get_target(name).build_all(report, max_ranks)
