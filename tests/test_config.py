"""Every rule of MegaMoEConfig, and what it derives."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.config import BLOCK_M_CHOICES, MAX_RANKS, MAX_TOPK, MegaMoEConfig, Stage
from tests.layers import small_config

NUMBERS = [field.name for field in dataclasses.fields(MegaMoEConfig) if field.name != "accumulate"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_every_number_is_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        small_config(2, **{name: value})
    assert str(error.value) == f"{name} must be a positive integer, got {value!r}"


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "pool_rows"])
def test_only_pool_rows_may_be_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got None"):
        small_config(2, **{name: None})


@pytest.mark.parametrize("value", ["fp16", "FAST", "", None, 1, True, ["fast"]])
def test_accumulate_is_one_of_two_words(value: Any) -> None:
    assert [small_config(2, accumulate=word).accumulate for word in ("fp32", "fast")] == ["fp32", "fast"]
    assert small_config(2).accumulate == "fp32"
    with pytest.raises(ValueError) as error:
        small_config(2, accumulate=value)
    assert str(error.value) == f"accumulate must be one of ('fp32', 'fast'), got {value!r}"


# Each entry breaks exactly one rule; the message has the field, the value and the rule.
BROKEN: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"num_ranks": 73, "num_experts": 146}, ("num_ranks", "at most 72", "73")),
    ({"num_ranks": 3, "num_experts": 8}, ("num_experts", "divisible by num_ranks", "8 experts over 3 ranks")),
    ({"num_experts": 2**20 + 2}, ("num_experts", "at most 1048576", "1048578")),
    ({"num_topk": 33, "num_experts": 64}, ("num_topk", "at most 32", "33")),
    ({"num_topk": 5, "num_experts": 4}, ("num_topk", "top-5 of 4 experts")),
    ({"hidden": 192}, ("hidden", "multiple of 128", "192")),
    ({"hidden": 64}, ("hidden", "multiple of 128", "64")),
    ({"intermediate_hidden": 448}, ("intermediate_hidden", "multiple of 128", "448")),
    ({"l2_sf_granularity": 32}, ("l2_sf_granularity", "(64, 128)", "32")),
    ({"block_m": 16}, ("block_m", "(32, 64, 128)", "16")),
    ({"block_m": 256}, ("block_m", "(32, 64, 128)", "256")),
    ({"l1_block_n": 128}, ("l1_block_n", "2 * l2_sf_granularity = 256", "128")),
    ({"l1_block_n": 64, "l2_sf_granularity": 64}, ("l1_block_n", "2 * l2_sf_granularity = 128", "64")),
    ({"l2_block_n": 192}, ("l2_block_n", "multiple of 128", "192")),
    ({"num_max_tokens_per_rank": 2**32}, ("num_max_tokens_per_rank = 4294967296", "pool rows", "at most 4294901760")),
    (
        {"num_max_tokens_per_rank": 30_000_000, "num_topk": 4, "hidden": 65536, "intermediate_hidden": 32768},
        ("num_max_tokens_per_rank = 30000000", "output tiles", "at most 4294901760"),
    ),
    ({"pool_rows": 2**32}, ("pool_rows = 4294967296", "pool rows")),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_broken_rule_is_named(changes: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        small_config(changes.get("num_ranks", 2), **changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 144},
        {"num_experts": 2**20 // MAX_RANKS * MAX_RANKS},
        {"num_topk": 32, "num_experts": 144},
        {"hidden": 8192},
        {"hidden": 16384, "intermediate_hidden": 18432},
        {"l1_block_n": 128, "l2_sf_granularity": 64},
        {"pool_rows": 1},
        {"num_max_tokens_per_rank": 200_000, "num_topk": 32, "num_experts": 288, "hidden": 7168},
    ],
)
def test_the_edge_of_a_rule_is_allowed(changes: dict[str, int]) -> None:
    config = small_config(MAX_RANKS, **changes)
    assert config.num_ranks == MAX_RANKS
    assert all(f"{name}={value}" in repr(config) for name, value in changes.items())


def test_a_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_config(2).hidden = 256  # type: ignore[misc]


@given(
    ranks=st.integers(1, MAX_RANKS),
    local=st.integers(1, 8),
    topk=st.integers(1, MAX_TOPK),
    tokens=st.integers(1, 200_000),
    block_m=st.sampled_from(BLOCK_M_CHOICES),
    pool_rows=st.none() | st.integers(1, 10**6),
)
def test_the_worst_case_holds_every_routing(
    ranks: int, local: int, topk: int, tokens: int, block_m: int, pool_rows: int | None
) -> None:
    config = small_config(
        ranks,
        num_experts=ranks * local,
        num_topk=min(topk, ranks * local),
        num_max_tokens_per_rank=tokens,
        block_m=block_m,
    )
    routes = ranks * tokens * config.num_topk
    # The routing that needs most rows: one route for each expert but one, which gets the rest.
    used = min(local, routes)
    needed = (used - 1) * block_m + math.ceil((routes - used + 1) / block_m) * block_m
    assert needed <= config.num_pool_rows < needed + block_m * used + block_m
    assert config.num_pool_rows % block_m == 0
    limited = dataclasses.replace(config, pool_rows=pool_rows)
    if pool_rows is not None:
        assert pool_rows <= limited.num_pool_rows < pool_rows + block_m
    assert limited.num_pool_blocks * block_m == limited.num_pool_rows


@given(
    hidden=st.integers(1, 128),
    intermediate=st.integers(1, 128),
    granularity=st.sampled_from([64, 128]),
    l1=st.integers(1, 8),
    l2=st.integers(1, 8),
)
def test_tiles_cover_the_products(hidden: int, intermediate: int, granularity: int, l1: int, l2: int) -> None:
    config = small_config(
        2,
        hidden=128 * hidden,
        intermediate_hidden=128 * intermediate,
        l2_sf_granularity=granularity,
        l1_block_n=2 * granularity * l1,
        l2_block_n=128 * l2,
    )
    for tiles, width, columns in (
        (config.num_l1_tiles, config.l1_block_n, 2 * config.intermediate_hidden),
        (config.num_l2_tiles, config.l2_block_n, config.hidden),
    ):
        assert (tiles - 1) * width < columns <= tiles * width
    assert (config.num_mask_words - 1) * 64 < config.num_l1_tiles <= config.num_mask_words * 64
    assert config.hidden_scales * 128 == config.hidden
    assert config.intermediate_scales * granularity == config.intermediate_hidden


def test_experts_live_in_order() -> None:
    config = small_config(3, num_experts=12)
    assert [config.rank_of_expert(expert) for expert in range(12)] == [0] * 4 + [1] * 4 + [2] * 4


def test_stages_count_from_one() -> None:
    assert [stage.value for stage in Stage] == [1, 2, 3, 4, 5, 6]
