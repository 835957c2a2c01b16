"""Groups: what may be one, and what each kind says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import megamoe
from megamoe import SymmBuffer, VirtualGroup, VirtualSymmBuffer
from megamoe.groups import DistributedGroup, LocalGroup, as_group
from tests.layers import answers, assert_right, draw_batches, draw_weights, open_buffer, small_config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_ranks": 0}, "num_ranks must be 1 to 72, got 0"),
        ({"num_ranks": 73}, "num_ranks must be 1 to 72, got 73"),
        ({"num_ranks": 2, "target": "tpu"}, r"target must be one of \('host', 'sm90'\), got 'tpu'"),
        ({"num_ranks": 2, "num_workers": 0}, "num_workers must be at least 1, got 0"),
    ],
)
def test_a_virtual_group_has_rules(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VirtualGroup(**arguments)


def test_a_virtual_group_is_all_here() -> None:
    group = as_group(VirtualGroup(5, num_workers=2))
    assert isinstance(group, LocalGroup)
    assert (group.num_ranks, list(group.local_ranks), group.target, group.num_workers) == (
        5,
        [0, 1, 2, 3, 4],
        "host",
        2,
    )
    assert group.all_gather("value") == ["value"]
    group.barrier()


@pytest.mark.parametrize("group", [None, 2, "gloo", object()])
def test_anything_else_is_no_group(group: Any) -> None:
    words = f"group must be a torch.distributed ProcessGroup or a megamoe.VirtualGroup, got {type(group).__name__}"
    with pytest.raises(ValueError) as error:
        megamoe.get_symm_buffer_for_mega_moe(group, 4, 8, 2, 128, 128)
    assert str(error.value) == words


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_process_group_has_one_rank_here(alone: dist.ProcessGroup) -> None:
    group = as_group(alone)
    assert isinstance(group, DistributedGroup)
    assert (group.num_ranks, list(group.local_ranks), group.target, group.num_workers) == (1, [0], "host", 1)
    assert group.all_gather({"a": 1}) == [{"a": 1}]
    group.barrier()


def test_one_rank_alone_runs_on_either_kind(alone: dist.ProcessGroup) -> None:
    config = small_config(1)
    batches, weights = draw_batches(config, [11]), draw_weights(config)
    one = open_buffer(alone, config)
    virtual = open_buffer(VirtualGroup(1), config)
    assert isinstance(one, SymmBuffer)
    assert isinstance(virtual, VirtualSymmBuffer)
    expected = answers(config, batches, weights)[0]
    for buffer in (one, virtual.ranks[0]):
        y = batches[0].fill(buffer)
        megamoe.fp8_mega_moe(y, *weights[0], buffer)
        buffer.check()
        assert_right(y, expected)
        buffer.reset()  # collective over one rank: allowed on both
        buffer.close()
