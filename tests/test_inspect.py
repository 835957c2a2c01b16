"""The counters of a buffer in words: after a launch, while one waits, and after it gave up."""

from __future__ import annotations

import re
import time

import pytest
import torch

from megamoe import MegaMoEFault, Stage, launch_mega_moe
from megamoe.inspect import describe_counters
from megamoe.inspect.counters import CLAIM_WORDS
from megamoe.layout import CLAIM_NAMES
from phases.support.inputs import Workload, make_tokens
from phases.support.launches import Launcher, Options
from phases.support.ranks import open_ranks
from phases.support.workloads import make_config


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "0.6")
    return Launcher(open_ranks("virtual", "host", 2))


def test_every_claim_has_words() -> None:
    assert set(CLAIM_WORDS) == set(CLAIM_NAMES)


def test_after_a_launch_everything_is_there(launcher: Launcher) -> None:
    config = make_config(launcher.ranks)
    launch = launcher.launch(config, make_tokens(Workload("inspect", config, (8, 8))))
    text = describe_counters(launch.buffers[1])
    assert text.startswith("rank 1 of 2: epoch 1 ended")
    assert "published here by all 2 ranks for epoch 1" in text
    assert "pool blocks: 4 of 4 have all rows and all L1 tiles" in text
    assert "no id in topk_idx waits" in text
    launcher.close()
    with pytest.raises(ValueError, match="closed"):
        describe_counters(launch.buffers[1])


def test_a_launch_that_stops_early_shows_what_is_missing(launcher: Launcher) -> None:
    config = make_config(launcher.ranks)
    tokens = make_tokens(Workload("inspect", config, (8, 8)))
    launch = launcher.launch(config, tokens, Options(stage=Stage.DISPATCH))
    text = describe_counters(launch.buffers[0])
    assert "pool blocks: 0 of 4" in text
    assert re.search(r"block 0 \(expert 0\): (\d+) of \1 rows arrived, 0 of 2 L1 tiles stored \(mask 0x0\)", text)
    launcher.close()


def test_a_launch_that_waits_is_shown_in_its_own_bank(launcher: Launcher) -> None:
    config = make_config(launcher.ranks)
    tokens = make_tokens(Workload("inspect", config, (8, 8)))
    launcher.launch(config, tokens)
    launch = launcher.prepare(config, tokens)
    launch_mega_moe(launch.y[0], *launcher.weights(config, 0), launch.buffers[0])
    time.sleep(0.2)
    waiting = describe_counters(launch.buffers[0])
    assert waiting.startswith("rank 0 of 2: epoch 2 under way")
    assert "not published here for epoch 2 by rank 1 (last for epoch 1)" in waiting
    assert "block table: not built for epoch 2" in waiting
    assert "expert 4 of rank 1 (last for epoch 1)" in waiting
    with pytest.raises(MegaMoEFault):
        launch.buffers[0].check()
    ended = describe_counters(launch.buffers[0])
    assert "aborted in epoch 2" in ended
    assert "fault: rank 0 waited" in ended
    launcher.close()


def test_long_lists_are_cut() -> None:
    launcher = Launcher(open_ranks("single", "host", 1))
    config = make_config(launcher.ranks, num_experts=40, num_topk=1)
    everyone = Workload("inspect", config, (40,), routing="counts", counts=(1,) * 40)
    launch = launcher.launch(config, make_tokens(everyone), Options(stage=Stage.DISPATCH))
    text = describe_counters(launch.buffers[0])
    assert "block 15 " in text
    assert "block 16 " not in text
    assert "and 24 more blocks" in text
    assert "and 24 more experts" in text
    bank = launch.buffers[0].view("l1_arrival_count").view(torch.int32)
    bank[30] = 0
    text = describe_counters(launch.buffers[0])
    assert "block 30 (expert 30): 0 of 1 rows arrived" in text, "what lacks rows is among those listed"
    assert "block 14 " in text
    assert "block 15 " not in text
    assert "and 24 more blocks" in text
    launcher.close()
