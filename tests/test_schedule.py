"""The schedule of a shape, and MEGAMOE_CONFIG."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megamoe
from megamoe.schedule import DEFAULT_SCHEDULE, Schedule, override_schedule
from tests.layers import small_config


@given(hidden=st.integers(1, 128), granularity=st.sampled_from([64, 128]))
def test_the_default_schedule_fits_every_shape(hidden: int, granularity: int) -> None:
    config = small_config(2, hidden=128 * hidden, l2_sf_granularity=granularity, **vars(DEFAULT_SCHEDULE))
    last_tile = config.hidden - (config.num_l2_tiles - 1) * config.l2_block_n
    assert 0 < last_tile <= config.l2_block_n


def test_it_prints_as_what_sets_it() -> None:
    schedule = Schedule(block_m=64, l1_block_n=512, l2_block_n=128)
    assert str(schedule) == "block_m=64,l1_block_n=512,l2_block_n=128"
    assert override_schedule(Schedule(1, 2, 3), str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (128, 256, 128)),
        ("block_m=32", (32, 256, 128)),
        (" l2_block_n=384 , block_m=64,", (64, 256, 384)),
    ],
)
def test_the_environment_overrides(text: str, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_CONFIG", text)
    assert override_schedule(Schedule(128, 256, 128)) == Schedule(*expected)
    config = megamoe.make_config(2, 4, 8, 2, 128, 128)
    assert (config.block_m, config.l1_block_n) == expected[:2]
    assert megamoe.get_token_alignment_for_sm90_mega_moe() == expected[0]


@pytest.mark.parametrize("text", ["block_m", "block_m=", "block_m=x", "block_m=-32", "block_m=²", "rows=32", "=32"])
def test_a_bad_override_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_CONFIG", f"l2_block_n=128,{text}")
    with pytest.raises(ValueError) as error:
        megamoe.make_config(2, 4, 8, 2, 128, 128)
    assert f"MEGAMOE_CONFIG: got {text!r}, expected NAME=INTEGER" in str(error.value)
    assert "block_m" in str(error.value)


def test_a_name_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_CONFIG", "block_m=64,l2_block_n=128,block_m=32")
    with pytest.raises(ValueError, match="MEGAMOE_CONFIG: got block_m twice, expected it once"):
        megamoe.make_config(2, 4, 8, 2, 128, 128)


def test_an_override_is_checked_like_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_CONFIG", "block_m=48")
    with pytest.raises(ValueError, match=r"block_m must be one of \(32, 64, 128\), got 48"):
        megamoe.make_config(2, 4, 8, 2, 128, 128)
