"""Each deliberate fault of the protocol is caught by a check of the ordinary suite (tests/test_protocol_stress.py).

The same command passes without the fault there: `python -m megamoe.stress CHECK`, here with `--mutation NAME
--stop-at-first`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megamoe import stress, stress_program
from megamoe.stress_program import Build

CHECKS: dict[str, Callable[..., stress.Verdict]] = {
    "plain": stress.plain,
    "perturb": stress.perturb,
    "tsan": stress.tsan,
}
BUILDS = {"plain": Build(), "perturb": Build(perturb=True), "tsan": Build(tsan=True)}
SUITE_SEEDS = 300

# The quickest check that catches it for certain; DESIGN.md has all of them.
CAUGHT_BY = {
    "publish_before_list": "perturb",
    "wait_for_stale_epoch": "perturb",
    "later_epoch_read_as_this": "perturb",
    "table_before_blocks": "perturb",
    "done_before_last_store": "perturb",
    "done_of_last_epoch": "perturb",
    "relaxed_publish": "tsan",
    "relaxed_arrival": "tsan",
    "relaxed_mask": "tsan",
    "relaxed_tile_counter": "tsan",
    "relaxed_wait": "tsan",
    "arrival_one_too_few": "plain",
    "arrival_one_too_many": "plain",
    "mask_bit_missing": "plain",
    "mask_before_store": "perturb",
    "claim_taken_twice": "perturb",
    "wrong_bank_cleared": "plain",
    "bank_not_cleared": "plain",
    "pool_order_by_arrival": "perturb",
    "combine_before_done": "perturb",
    "launch_ends_early": "perturb",
    "exit_before_last_worker": "perturb",
}


def build_of(name: str) -> Build:
    build = BUILDS[CAUGHT_BY[name]]
    return Build(tsan=build.tsan, perturb=build.perturb, mutation=name)


@pytest.fixture(scope="module", autouse=True)
def all_built() -> None:
    """Two at a time. A fault that does not compile is no fault that a test has caught."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(stress_program.program, map(build_of, CAUGHT_BY)))


def test_every_fault_is_listed() -> None:
    known = stress.mutations()
    assert set(CAUGHT_BY) == set(known)
    assert len(known) >= 12


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_fault_is_caught(name: str) -> None:
    check = CAUGHT_BY[name]
    options = {"num_seeds": SUITE_SEEDS} if check == "perturb" else {}
    verdict = CHECKS[check](name, stop_at_first=True, **options)
    print(f"{name}: {check}, run {verdict.num_runs}: {next(iter(verdict.wrong.values()), '')}")
    print(*verdict.faults[:2], verdict.reports[:3000], sep="\n")
    assert not verdict.ok
    if check == "tsan":
        assert verdict.num_reports > 0
