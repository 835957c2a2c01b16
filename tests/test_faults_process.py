"""Faults among real processes: ranks that die, stop, stay away or disagree. One scenario is one set of processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import megamoe
from megamoe import MegaMoEConfig, MegaMoEFault, SymmBuffer, VirtualGroup
from megamoe.faults import FaultKind
from megamoe.inspect.names import memfd_name
from megamoe.targets import host
from megamoe.targets.host import HostStream
from tests.layers import (
    Batch,
    answers,
    assert_right,
    draw_batches,
    draw_weights,
    open_buffer,
    small_config,
)
from tests.rank_processes import (
    Rank,
    assert_nothing_held,
    megamoe_descriptors,
    megamoe_mappings,
    run_ranks,
    send_signal,
    wait_for,
)

DEADLINE_S = 1.0
ENDS_WITHIN_S = DEADLINE_S + 1.0
AT_ONCE_S = 0.5
ABORTED = (
    r"the group is aborted since epoch {epoch}: y is NaN from there on, later launches end at once, and reset\(\) "
    r"\(every rank alive\) or a new group makes it work again"
)
CONFIG = small_config(3)


def launch(buffer: SymmBuffer, batches: list[Batch]) -> Tensor:
    """Fill and launch this rank's part; not waited for."""
    y = batches[buffer.rank].fill(buffer)
    megamoe.fp8_mega_moe(y, *draw_weights(buffer.config)[buffer.rank], buffer)
    return y


def works(buffer: SymmBuffer, seed: int) -> None:
    """A launch on all ranks gives this one the oracle's answer. Collective."""
    config = buffer.config
    tokens = [(seed + 7 * rank) % (config.num_max_tokens_per_rank + 1) for rank in range(config.num_ranks)]
    batches = draw_batches(config, tokens, seed)
    y = launch(buffer, batches)
    buffer.check()
    assert_right(y, answers(config, batches, draw_weights(config))[buffer.rank])


def faults_within(seconds: float, buffer: SymmBuffer, batches: list[Batch], words: str) -> MegaMoEFault:
    """A launch that ends in a fault with these words, in time, and in NaN."""
    began = time.monotonic()
    y = launch(buffer, batches)
    with pytest.raises(MegaMoEFault) as caught:
        buffer.check()
    took = time.monotonic() - began
    assert took < seconds, f"{took:.2f} s"
    assert re.search(words, str(caught.value)), caught.value
    assert bool(y.isnan().all())
    return caught.value


def drains_at_once(buffer: SymmBuffer, batches: list[Batch], epoch: int) -> None:
    """Several launches on an aborted group end at once, in NaN."""
    began = time.monotonic()
    for _ in range(3):
        y = launch(buffer, batches)
    with pytest.raises(MegaMoEFault, match=ABORTED.format(epoch=epoch)):
        buffer.check()
    assert time.monotonic() - began < AT_ONCE_S
    assert bool(y.isnan().all())


def closes(buffer: SymmBuffer) -> None:
    began = time.monotonic()
    buffer.close()
    assert time.monotonic() - began < AT_ONCE_S


def meet_anew(me: Rank, survivors: list[int]) -> None:
    """The survivors, in a new process group, with a new buffer, in the same processes."""
    group = me.join("survivors", survivors.index(me.rank), len(survivors))
    buffer = open_buffer(group, small_config(len(survivors)), timeout_s=DEADLINE_S)
    for seed in (1, 2, 3):
        works(buffer, seed)
    buffer.close()


def routes_to_all(config: MegaMoEConfig, tokens: int = 8) -> list[Batch]:
    """Every rank sends routes to every rank."""
    batches = draw_batches(config, [tokens] * config.num_ranks, seed=5)
    for batch in batches:
        batch.topk_idx[: config.num_experts, 0] = torch.arange(config.num_experts)
    return batches


def has_published(buffer: SymmBuffer, source: int, epoch: int) -> bool:
    words = buffer.view("route_count").view(torch.int64)[source]
    return all(int(word) >> 32 == epoch for word in words)


# --- a rank dies --------------------------------------------------------------------------------------------------


def killed_before_a_launch(me: Rank) -> None:
    buffer, batches = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S), routes_to_all(CONFIG)
    assert megamoe_descriptors() != []
    names = {line.split("memfd:")[1].removesuffix(" (deleted)") for line in megamoe_mappings()}
    assert names == {memfd_name(CONFIG, rank) for rank in range(3)}
    assert not any("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines())
    works(buffer, 1)
    works(buffer, 2)
    if me.rank == 1:
        me.tell("victim")
        signal.pause()
    victim = me.await_sign("victim")
    if me.rank == 0:
        send_signal(victim, signal.SIGKILL)
        me.tell("killed")
    me.await_sign("killed")
    words = (
        rf"rank [02] waited 1\.\d s for rank 1 to publish its routes for epoch 3 \(last seen 2\): rank 1 did not "
        rf"launch, or its stream has not come to it; .*{ABORTED.format(epoch=3)}"
    )
    fault = faults_within(ENDS_WITHIN_S, buffer, batches, words)
    assert fault.aborted_epoch == 3
    assert {(found.kind, found.peer) for found in fault.faults} == {(FaultKind.TIMEOUT, 1)}
    drains_at_once(buffer, batches, epoch=3)
    closes(buffer)
    assert_nothing_held()
    meet_anew(me, [0, 2])
    assert_nothing_held()


def killed_during_a_launch(me: Rank) -> None:
    """The victim has published its routes and waits for the others, when it dies."""
    buffer, batches = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S), routes_to_all(CONFIG)
    launch(buffer, batches)
    buffer.check()
    if me.rank == 1:
        launch(buffer, batches)
        me.tell("victim")
        signal.pause()
    victim = me.await_sign("victim")
    wait_for(lambda: has_published(buffer, 1, epoch=2), "the victim's routes")
    me.tell(f"seen-{me.rank}")
    if me.rank == 0:
        me.await_sign("seen-2")
        send_signal(victim, signal.SIGKILL)
        me.tell("killed")
    me.await_sign("killed")
    words = (
        rf"rank [02] waited 1\.\d s for rank 1 to finish expert [23] in epoch 2 \(last seen 1\): rank 1 launched late, "
        rf"stopped on the way, or waits for somebody itself; .*{ABORTED.format(epoch=2)}"
    )
    faults_within(ENDS_WITHIN_S, buffer, batches, words)
    drains_at_once(buffer, batches, epoch=2)
    closes(buffer)
    assert_nothing_held()
    meet_anew(me, [0, 2])
    assert_nothing_held()


def killed_while_it_computes(me: Rank) -> None:
    """All routes go to the victim, whose launch would take seconds; it dies between two of its tiles."""
    config = small_config(3, hidden=1024, intermediate_hidden=1024, num_topk=4, num_max_tokens_per_rank=256)
    buffer, batches = open_buffer(me.group, config, timeout_s=DEADLINE_S), draw_batches(config, [256] * 3)
    for batch in batches:
        batch.topk_idx[:] = torch.tensor([2, 3, 2, 3])
    draw_weights(config)
    me.tell(f"ready-{me.rank}")
    victim = [me.await_sign(f"ready-{rank}") for rank in range(3)][1]
    began = time.monotonic()
    y = launch(buffer, batches)
    if me.rank == 0:
        masks = buffer.layout["l2_arrival_mask"]
        wait_for(
            lambda: bool(buffer._rank.peer_memory(1)[masks.offset : masks.offset + masks.num_bytes].any()),
            "the victim's first L1 tile",
        )
        done = buffer.view("expert_done").view(torch.int64)[2:4].tolist()
        send_signal(victim, signal.SIGKILL)
        assert done == [0, 0], "the launch was too short to be interrupted"
    with pytest.raises(MegaMoEFault, match=r"for rank 1 to finish expert [23] in epoch 1 \(last seen 0\)"):
        buffer.check()
    took = time.monotonic() - began
    assert took < ENDS_WITHIN_S, f"{took:.2f} s"
    assert bool(y.isnan().all())
    drains_at_once(buffer, batches, epoch=1)
    closes(buffer)
    assert_nothing_held()


@pytest.mark.parametrize("scenario", [killed_before_a_launch, killed_during_a_launch, killed_while_it_computes])
def test_a_rank_is_killed(scenario: Callable[[Rank], None], tmp_path: Path) -> None:
    run_ranks(scenario, 3, tmp_path, dies={1})


def killed_before_creation(me: Rank) -> None:
    me.tell(f"joined-{me.rank}")
    if me.rank == 1:
        for other in (0, 2):  # of which one may still be joining
            me.await_sign(f"joined-{other}")
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S)
    assert time.monotonic() - began < 5
    assert_nothing_held()
    meet_anew(me, [0, 2])
    assert_nothing_held()


def killed_within_creation(me: Rank, monkey: str) -> None:
    """The victim has shared its memory, and dies before the others could map it."""
    if me.rank == 1:
        from megamoe.targets import host

        def die(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(host, monkey, die)
    began = time.monotonic()
    with pytest.raises((RuntimeError, OSError)):
        open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S)
    assert time.monotonic() - began < 5
    assert_nothing_held()


def test_a_rank_is_killed_before_there_is_a_buffer(tmp_path: Path) -> None:
    run_ranks(killed_before_creation, 3, tmp_path / "before", dies={1})
    for monkey in ("_share", "_attach"):
        run_ranks(killed_within_creation, 3, tmp_path / monkey, monkey, dies={1})


# --- a rank is stopped, stays away, or is late --------------------------------------------------------------------


def stopped_during_a_launch(me: Rank) -> None:
    """SIGSTOP in the middle of a launch, SIGCONT after the others have given up: alive again, so reset() works."""
    buffer, batches = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S), routes_to_all(CONFIG)
    launch(buffer, batches)
    buffer.check()
    if me.rank == 1:
        y = launch(buffer, batches)
        me.tell("victim")
        me.await_sign("continued")
        with pytest.raises(MegaMoEFault, match=ABORTED.format(epoch=2)):
            buffer.check()
        assert bool(y.isnan().all())
    else:
        victim = me.await_sign("victim")
        wait_for(lambda: has_published(buffer, 1, epoch=2), "the victim's routes")
        me.tell(f"seen-{me.rank}")
        if me.rank == 0:
            me.await_sign("seen-2")
            send_signal(victim, signal.SIGSTOP)
            me.tell("stopped")
        me.await_sign("stopped")
        words = r"for rank 1 to finish expert [23] in epoch 2 \(last seen 1\): rank 1 launched late, stopped on the way"
        faults_within(ENDS_WITHIN_S, buffer, batches, words)
        drains_at_once(buffer, batches, epoch=2)
        me.tell(f"drained-{me.rank}")
        if me.rank == 0:
            me.await_sign("drained-2")
            send_signal(victim, signal.SIGCONT)
            me.tell("continued")
    buffer.reset()
    for seed in (1, 2, 3):
        works(buffer, seed)
    buffer.close()
    assert_nothing_held()


def test_a_rank_is_stopped_and_continued(tmp_path: Path) -> None:
    run_ranks(stopped_during_a_launch, 3, tmp_path)


def never_launches(me: Rank) -> None:
    """Twice, a different rank each time: an abort, a reset, an abort, a reset."""
    buffer, batches = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S), routes_to_all(CONFIG)
    epoch = 0
    for absent in (1, 2):
        works(buffer, absent)
        epoch = buffer.epoch + 1
        if me.rank == absent:
            for other in {0, 1, 2} - {absent}:
                me.await_sign(f"gave-up-{absent}-{other}")
            # The others' records are there to read, and a launch of this rank drains.
            words = rf"rank \d waited 1\.\d s for rank {absent} to publish its routes for epoch {epoch}"
            faults_within(AT_ONCE_S, buffer, batches, words)
        else:
            words = (
                rf"for rank {absent} to publish its routes for epoch {epoch} \(last seen {epoch - 1}\): rank {absent}"
            )
            faults_within(ENDS_WITHIN_S, buffer, batches, words)
            drains_at_once(buffer, batches, epoch)
            me.tell(f"gave-up-{absent}-{me.rank}")
        buffer.reset()
        for seed in (3, 4):
            works(buffer, seed)
    buffer.close()
    assert_nothing_held()


def test_a_rank_never_launches(tmp_path: Path) -> None:
    run_ranks(never_launches, 3, tmp_path)


def two_seconds_late(me: Rank) -> None:
    buffer = open_buffer(me.group, CONFIG, timeout_s=5)
    works(buffer, 1)
    began = time.monotonic()
    if me.rank == 1:
        time.sleep(2)
    works(buffer, 2)
    assert time.monotonic() - began > 1.5, "the others did wait"
    works(buffer, 3)
    buffer.close()
    assert_nothing_held()


def test_a_rank_is_two_seconds_late(tmp_path: Path) -> None:
    run_ranks(two_seconds_late, 3, tmp_path)


# --- faults of input and use --------------------------------------------------------------------------------------


def unknown_expert(me: Rank) -> None:
    buffer = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S)
    batches, masked = routes_to_all(CONFIG), routes_to_all(CONFIG)
    batches[1].topk_idx[3, 1], masked[1].topk_idx[3, 1] = 6, -1
    same = launch(buffer, masked)
    buffer.check()
    y = launch(buffer, batches)
    if me.rank == 1:
        with pytest.raises(MegaMoEFault) as caught:
            buffer.check()
        assert str(caught.value) == (
            "rank 1: token 3 slot 1 of epoch 2 names expert 6, but there are 6 experts: the route was masked and the "
            "token's y row is NaN"
        )
        assert bool(y[3].isnan().all())
        y[3] = same[3]
    else:
        buffer.check()
    assert torch.equal(y.view(torch.int16), same.view(torch.int16))
    works(buffer, 4)
    buffer.close()
    assert_nothing_held()


def test_an_expert_that_does_not_exist(tmp_path: Path) -> None:
    run_ranks(unknown_expert, 3, tmp_path)


def used_twice(me: Rank) -> None:
    buffer, batches = open_buffer(me.group, CONFIG, timeout_s=5), routes_to_all(CONFIG)
    expected = answers(CONFIG, batches, draw_weights(CONFIG))[me.rank]
    if me.rank != 0:
        me.await_sign("refused")
        y = launch(buffer, batches)
        buffer.check()
        assert_right(y, expected)
    else:
        first = launch(buffer, batches)
        wait_for(lambda: bool(buffer.view("in_use").view(torch.int64)[0]), "the first launch")
        stream, second = HostStream(), torch.zeros_like(first)
        megamoe.launch_mega_moe(second, *draw_weights(CONFIG)[0], buffer, stream=stream)
        assert stream.synchronize(2)
        assert bool(second.isnan().all())
        me.tell("refused")
        with pytest.raises(MegaMoEFault, match=r"rank 0: the buffer was in use by epoch 1 when a second launch came"):
            buffer.check()
        assert_right(first, expected)
        stream.close()
    for seed in (1, 2):
        works(buffer, seed)
    buffer.close()
    assert_nothing_held()


def test_two_launches_on_one_buffer(tmp_path: Path) -> None:
    run_ranks(used_twice, 3, tmp_path)


def too_few_rows(me: Rank) -> None:
    config = replace(CONFIG, pool_rows=32)
    buffer, batches = open_buffer(me.group, config, timeout_s=DEADLINE_S), draw_batches(config, [20, 20, 20])
    for batch in batches:
        batch.topk_idx[:] = 3
    words = (
        r"rank 1: epoch 1 needs 128 pool rows and pool_rows allows 32: create the buffer with a larger pool_rows; "
        + ABORTED.format(epoch=1)
    )
    faults_within(AT_ONCE_S * 2, buffer, batches, words)
    drains_at_once(buffer, batches, epoch=1)
    buffer.reset()
    fitting = draw_batches(config, [2, 3, 0])
    fitting[0].topk_idx[:], fitting[1].topk_idx[:] = 3, 0
    y = launch(buffer, fitting)
    buffer.check()
    assert_right(y, answers(config, fitting, draw_weights(config))[me.rank])
    buffer.close()
    assert_nothing_held()


def test_pool_rows_too_small(tmp_path: Path) -> None:
    run_ranks(too_few_rows, 3, tmp_path)


def disagree(me: Rank) -> None:
    mine = replace(CONFIG, num_topk=3, hidden=256, accumulate="fast") if me.rank == 2 else CONFIG
    with pytest.raises(ValueError) as caught:
        open_buffer(me.group, mine, timeout_s=DEADLINE_S)
    assert str(caught.value) == (
        "config differs between ranks: num_topk is 2 on rank 0 and 3 on rank 2, hidden is 128 on rank 0 and 256 on "
        "rank 2, accumulate is fp32 on rank 0 and fast on rank 2; every rank must create the buffer with the same "
        "arguments"
    )
    assert_nothing_held()
    buffer = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S)
    works(buffer, 1)
    buffer.close()
    assert_nothing_held()


def one_is_wrong(me: Rank) -> None:
    """One rank's own arguments break a rule: it says so, and the others do not wait for it."""
    for change, words in (
        ({"hidden": 200}, "hidden must be a multiple of 128, got 200"),
        ({"timeout_s": -1.0}, "timeout_s must be above 0 and at most 1e+09 seconds, got -1.0"),
        ({"max_ctas": 0}, "max_ctas must be at least 1 or None, got 0"),
        ({"max_ctas": "2"}, "max_ctas must be at least 1 or None, got '2'"),
        ({"schedule": 5}, "schedule: got 5, expected a megamoe.Schedule or None"),
        ({"accumulate": "fp16"}, "accumulate must be one of ('fp32', 'fast'), got 'fp16'"),
    ):
        arguments: dict[str, Any] = {"hidden": 128, **(change if me.rank == 1 else {})}
        with pytest.raises(ValueError) as caught:
            megamoe.get_symm_buffer_for_mega_moe(me.group, 6, 8, 2, intermediate_hidden=128, **arguments)
        assert str(caught.value) == ("" if me.rank == 1 else "rank 1 could not create its buffer: ") + words
        assert_nothing_held()
    buffer = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S)
    works(buffer, 1)
    buffer.close()


def test_a_rank_with_a_config_that_breaks_a_rule(tmp_path: Path) -> None:
    run_ranks(one_is_wrong, 3, tmp_path)


def one_has_no_memory(me: Rank) -> None:
    """One rank cannot allocate its buffer, or not map another's: it says so, and the others do not wait for it."""
    for name in ("_share", "_attach"):
        with pytest.MonkeyPatch.context() as patch:
            if me.rank == 1:
                patch.setattr(host, name, out_of_memory)
            with pytest.raises(OSError) as caught:
                open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S)
        assert str(caught.value) == ("" if me.rank == 1 else "rank 1 could not create its buffer: ") + "no room"
        caught = None  # type: ignore[assignment]  # its traceback holds what was allocated
        gc.collect()
        assert_nothing_held()
    buffer = open_buffer(me.group, CONFIG, timeout_s=DEADLINE_S)
    works(buffer, 1)
    buffer.close()


def out_of_memory(*arguments: object) -> NoReturn:
    raise OSError("no room")


def test_a_rank_without_memory(tmp_path: Path) -> None:
    run_ranks(one_has_no_memory, 3, tmp_path)


def test_ranks_with_different_configs(tmp_path: Path) -> None:
    run_ranks(disagree, 3, tmp_path)


# --- life cycle ---------------------------------------------------------------------------------------------------


def many_buffers(me: Rank) -> None:
    """Buffers of several configs side by side, closed in another order, dropped without close, views kept."""
    configs = [CONFIG, replace(CONFIG, hidden=256, num_topk=1), replace(CONFIG, block_m=64, l2_sf_granularity=64)]
    buffers = [open_buffer(me.group, config, timeout_s=5) for config in configs]
    for seed in range(3):
        for buffer in buffers:
            works(buffer, seed)
    kept = buffers[1].x
    buffers[1].close()
    before = kept[0].view(torch.uint8).clone()
    works(buffers[0], 5)
    buffers[0].close()
    dropped = buffers.pop()
    buffers.clear()
    works(dropped, 6)
    del dropped, buffer
    gc.collect()
    assert len(megamoe_mappings()) == 1, "the one that the kept view shows"
    assert torch.equal(kept[0].view(torch.uint8), before)
    del kept
    assert_nothing_held()


def test_buffers_come_and_go(tmp_path: Path) -> None:
    run_ranks(many_buffers, 3, tmp_path)


def dropped_while_it_runs(me: Rank) -> str:
    """Dropping, forking or exiting with a launch under way neither crashes nor hangs."""
    config = small_config(2)
    batches = draw_batches(config, [6, 6])
    for _ in range(3):
        buffers = open_buffer(VirtualGroup(2), config, timeout_s=0.2)
        y = launch(buffers.ranks[0], batches)
        del buffers  # its only owner
        gc.collect()
        assert bool(y.isnan().all()), "the launch had ended before its memory went"

    buffers = open_buffer(VirtualGroup(2), config, timeout_s=0.5)
    y = launch(buffers.ranks[0], batches)
    child = os.fork()
    if child == 0:  # has the objects, not their threads
        try:
            launch(buffers.ranks[1], batches)
        except ValueError as error:
            del buffers
            gc.collect()
            os._exit(3 if "a forked child cannot launch" in str(error) else 1)
        os._exit(2)
    ended: list[int] = []

    def child_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.append(os.waitstatus_to_exitcode(status) if pid else -1)
        return pid == child

    wait_for(child_ended, "the end of the forked child", 5)
    assert ended[-1] == 3
    with pytest.raises(MegaMoEFault, match="for rank 1 to publish its routes"):
        buffers.check()
    buffers.reset()

    launch(buffers.ranks[0], batches)
    globals()["_until_exit"] = buffers
    return "the process ends with a launch under way"


def test_a_buffer_is_dropped_with_a_launch_under_way(tmp_path: Path) -> None:
    assert run_ranks(dropped_while_it_runs, 1, tmp_path) == ["the process ends with a launch under way"]
