"""The outcome of one case on the ranks of this process: views compared, conditions required, dumps of failures."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.reference import Comparison, Squares, compare
from phases.support.error_maps import Where, WorstSeen, error_map, index_words
from phases.support.view_specs import ORACLE

MAX_DUMPS = 4
"""Dumps that one rank writes in a step: the first failures say most."""


@dataclass(frozen=True)
class ViewCheck:
    """One comparison of one view on one rank."""

    view: str
    against: str
    rank: int
    compared: int
    wrong: int
    max_error: float
    bound: float
    ok: bool
    expect_empty: bool
    message: str
    own_error: float | None = None
    """Of this rank alone, where ``max_error`` is over all ranks."""
    map: Mapping[str, Any] | None = None
    """See `error_maps.error_map`; only where this is the worst comparison of the view so far."""


@dataclass
class CaseChecks:
    """What one case variant has found so far on the ranks here."""

    name: str
    worst_seen: WorstSeen = field(default_factory=WorstSeen)
    dumps_left: int = MAX_DUMPS
    views: list[ViewCheck] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    dumps: list[str] = field(default_factory=list)
    num_required: int = 0

    def require(self, condition: bool, message: str) -> None:
        """Note a failure, in words, unless the condition holds."""
        self.num_required += 1
        if not condition:
            self.failures.append(message)

    def compare(
        self,
        view: str,
        bound: str,
        actual: Tensor,
        expected: Tensor,
        *,
        rank: int,
        magnitude: Tensor | None = None,
        all_ranks: Squares | None = None,
        against: str = ORACLE,
        expect_empty: bool = False,
        where: Where = index_words,
    ) -> Comparison:
        """Compare one rank's view by the bound of a name and note the outcome. ``magnitude``, ``all_ranks``: see
        `megamoe.reference.compare`. ``where`` tells the place of an element in words."""
        outcome = compare(bound, actual, expected, magnitude=magnitude, all_ranks=all_ranks)
        found = None
        if outcome.num_elements and self.worst_seen.is_worse(view, outcome.ok, outcome.max_error, outcome.bound):
            found = error_map(bound, actual, expected, magnitude, where)
        worst = f", worst at {where(outcome.worst)}" if not outcome.ok else ""
        check = ViewCheck(
            view=view,
            against=against,
            rank=rank,
            compared=outcome.num_elements,
            wrong=outcome.num_wrong,
            max_error=outcome.max_error,
            bound=outcome.bound,
            ok=outcome.ok,
            expect_empty=expect_empty,
            message=f"rank {rank}: {view} against {against}{worst}: {outcome.message}",
            own_error=outcome.own_error,
            map=found,
        )
        self.views.append(check)
        if not outcome.ok:
            self.failures.append(check.message)
            self._dump(check, actual, expected)
        return outcome

    def equal(self, view: str, actual: Tensor, expected: Tensor, *, rank: int, against: str) -> None:
        """Compare bit for bit."""
        self.compare(view, "exact", actual.cpu(), expected.cpu(), rank=rank, against=against)

    def _dump(self, check: ViewCheck, actual: Tensor, expected: Tensor) -> None:
        folder = os.environ.get("MEGAMOE_RUN_DIR")
        if folder is None or self.dumps_left == 0:
            return
        self.dumps_left -= 1
        name = "".join(letter if letter.isalnum() else "_" for letter in f"{self.name}-{check.view}-{check.against}")
        path = Path(folder) / f"{name}-rank{check.rank}.pt"
        about = {"case": self.name, "view": check.view, "rank": check.rank, "message": check.message}
        torch.save({**about, "actual": actual.clone(), "expected": expected.clone()}, path)
        self.dumps.append(str(path))

    def transferable(self) -> dict[str, Any]:
        """What other processes need to know of it."""
        return {
            "views": [vars(check) for check in self.views],
            "failures": self.failures,
            "dumps": self.dumps,
            "num_required": self.num_required,
        }


def view_lines(case: str, checks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Record lines of a case: one for each view and what it was compared with, all ranks and launches together.

    Where ``max_error`` is a norm over all ranks, ``max_rank_error`` is the largest of a single rank, for information.
    Comparing nothing is a failure unless the case says that there is nothing; comparing something then, too.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for check in checks:
        groups.setdefault((check["view"], check["against"]), []).append(check)
    lines = []
    for (view, against), members in groups.items():
        compared = sum(member["compared"] for member in members)
        meant_empty = all(member["expect_empty"] for member in members)
        errors = [member["max_error"] for member in members]
        line = {
            "kind": "view",
            "case": case,
            "view": view,
            "against": against,
            "compared": compared,
            "wrong": sum(member["wrong"] for member in members),
            "max_error": math.nan if any(map(math.isnan, errors)) else max(errors),
            "bound": members[0]["bound"],
            "ok": all(member["ok"] for member in members) and (compared == 0) == meant_empty,
        }
        of_ranks = [member["own_error"] for member in members if member["own_error"] is not None]
        if of_ranks:
            line["max_rank_error"] = max(of_ranks)
        mapped = [member for member in members if member["map"] is not None]
        if mapped:
            worst = max(mapped, key=lambda member: (not member["ok"], member["max_error"]))
            line["map"] = {**worst["map"], "rank": worst["rank"]}
        lines.append(line | ({"expect_empty": True} if meant_empty else {}))
    return lines
