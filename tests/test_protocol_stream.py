"""The host target's stream: what was queued runs whole, whenever the stream is closed."""

from __future__ import annotations

import itertools

import pytest
import torch

from megamoe.config import MegaMoEConfig, Stage
from megamoe.layout import LAUNCH_STRUCT, buffer_layout
from megamoe.targets.host import HostRank, HostStream, SharedMemory


@pytest.mark.parametrize("workers", [1, 3])
def test_closing_a_stream_ends_every_launch_that_was_queued(workers: int) -> None:
    layout = buffer_layout(MegaMoEConfig(1, 2, 1, 128, 128, 4))
    numbers = itertools.count(1)
    for _ in range(50):
        memory = SharedMemory(torch.zeros(layout.num_bytes, dtype=torch.uint8), -1)
        rank = HostRank(layout, 0, [memory], HostStream(workers))
        for _ in range(8):
            arguments = LAUNCH_STRUCT.ctype(
                timeout_ns=5 * 10**9, launch=next(numbers), stage=int(Stage.DISPATCH), num_tokens=0
            )
            rank.launch(arguments, None)
        rank.stream.close()  # does not wait for the launches first
        assert rank.status.completed_epoch == 8
        rank.close()
