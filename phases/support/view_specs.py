"""``phases/phaseN/views.yaml``: for each view its dtype, shape, strides, valid rows and comparison.

``extends: N`` takes over the views of phase N. A view has

- ``dtype``: e4m3, bf16, f32, u32, i64 or u64;
- ``shape``, ``strides`` (in elements): expressions over the config, and ``num_tokens`` of the launch;
- ``rows``: which of it is valid: ``all``, ``tokens``, ``routes`` (the pool rows in use), ``window`` (those of the debug
  window), ``slots`` (the partial results that this rank's experts owe the sources);
- ``compare``: name of a bound of ``megamoe.reference``; a mapping from target to such a name where targets differ; or a
  mapping ``against: {source: bound}`` where a view is compared with several things;
- ``where`` (optional): a mapping from kinds of workloads (``fast`` accumulation, ``clamped``, or an activation of the
  inputs) to the same, which holds there instead of ``compare``; of several kinds the first one of ``Workload.kinds``
  that stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megamoe.buffer import DTYPES
from megamoe.config import MegaMoEConfig
from megamoe.quant import describe
from megamoe.reference import BOUNDS
from phases.support.expressions import config_values, evaluate
from phases.support.inputs import KINDS

ROWS = ("all", "tokens", "routes", "window", "slots")
ORACLE = "oracle"
_FIELDS = {"dtype", "shape", "strides", "rows", "compare"}


@dataclass(frozen=True)
class ViewSpec:
    """One view, as views.yaml has it. ``compare``: what it is compared with -> name of the bound."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    rows: str
    compare: Mapping[str, str]
    compare_where: Mapping[str, Mapping[str, str]]
    """The same for each kind of workload that has its own."""

    def bounds(self, kinds: Sequence[str] = ()) -> Mapping[str, str]:
        """What the view of a workload of these kinds is compared with -> name of the bound."""
        return next((self.compare_where[kind] for kind in kinds if kind in self.compare_where), self.compare)

    def layout_errors(self, view: Tensor, config: MegaMoEConfig, num_tokens: int) -> list[str]:
        """What is wrong with a tensor's dtype, shape and strides; [] when nothing is."""
        values = {**config_values(config), "num_tokens": num_tokens}
        shape = [evaluate(size, values) for size in self.shape]
        strides = [evaluate(stride, values) for stride in self.strides]
        errors = []
        if view.dtype != self.dtype or list(view.shape) != shape:
            errors.append(f"{self.name}: got {describe(view)}, expected {self.dtype} {shape}")
        # A stride says nothing where there is at most one element along it.
        elif view.numel() and any(
            size > 1 and got != want for size, got, want in zip(shape, view.stride(), strides, strict=True)
        ):
            errors.append(f"{self.name}: got strides {list(view.stride())}, expected {strides}")
        return errors


def _bounds(path: Path, name: str, value: Any, target: str) -> Mapping[str, str]:
    if isinstance(value, dict) and set(value) == {"against"}:
        sources = value["against"]
    else:
        sources = {ORACLE: value}
    chosen = {}
    for source, bound in sources.items():
        if isinstance(bound, dict):
            bound = bound.get(target)
        if bound not in BOUNDS:
            raise ValueError(f"{path}: {name}: no bound for target {target}: expected one of {list(BOUNDS)}")
        chosen[source] = bound
    return chosen


def _view(path: Path, name: str, entry: Any, target: str) -> ViewSpec:
    if not isinstance(entry, dict) or not _FIELDS <= set(entry) <= {*_FIELDS, "where"}:
        raise ValueError(f"{path}: {name}: expected the fields {sorted(_FIELDS)} and perhaps where, got {entry}")
    if entry["dtype"] not in DTYPES or entry["rows"] not in ROWS:
        raise ValueError(f"{path}: {name}: expected a dtype of {list(DTYPES)} and rows of {ROWS}, got {entry}")
    if len(entry["shape"]) != len(entry["strides"]):
        raise ValueError(f"{path}: {name}: expected as many strides as sizes, got {entry}")
    where = entry.get("where", {})
    if not isinstance(where, dict) or not set(where) <= set(KINDS):
        raise ValueError(f"{path}: {name}: where: expected some of {', '.join(KINDS)}, got {where}")
    return ViewSpec(
        name=name,
        dtype=DTYPES[entry["dtype"]],
        shape=tuple(entry["shape"]),
        strides=tuple(entry["strides"]),
        rows=entry["rows"],
        compare=_bounds(path, name, entry["compare"], target),
        compare_where={kind: _bounds(path, name, value, target) for kind, value in where.items()},
    )


def load_views(folder: Path, target: str) -> dict[str, ViewSpec]:
    """The views of a phase for a target, those it extends first.

    Raises:
        ValueError: a field is missing, unknown or of no use; names file and view.
    """
    path = folder / "views.yaml"
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict) or not isinstance(content.get("views"), dict):
        raise ValueError(f"{path}: expected a mapping with `views`, got {content!r}")
    unknown = set(content) - {"extends", "views"}
    if unknown:
        raise ValueError(f"{path}: unknown fields {sorted(unknown)}")
    views = load_views(folder.parent / f"phase{content['extends']}", target) if "extends" in content else {}
    return views | {name: _view(path, name, entry, target) for name, entry in content["views"].items()}
