"""Faults among virtual ranks: what the host says, how long it takes, and that the group works again."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import megamoe
from megamoe import Fault, MegaMoEConfig, MegaMoEFault, VirtualGroup, VirtualSymmBuffer, api
from megamoe.faults import FaultKind, WaitFor, read_fault_records
from megamoe.layout import FAULT_RECORD, LAUNCH_DECISION_SLOTS, MAX_FAULT_RECORDS
from megamoe.targets.host import HostStream
from tests.layers import (
    answers,
    assert_right,
    assert_works,
    draw_batches,
    draw_weights,
    launch_all,
    open_buffer,
    run_all,
    small_config,
)

ABORTED = r"the group is aborted since epoch {epoch}: y is NaN from there on, later launches end at once, and reset\(\)"
AT_ONCE_S = 0.5


@contextmanager
def opened(
    config: MegaMoEConfig, *, workers: int = 1, timeout_s: float = 0.5, check_every: int | None = None
) -> Iterator[VirtualSymmBuffer]:
    group = VirtualGroup(config.num_ranks, num_workers=workers)
    buffers = open_buffer(group, config, timeout_s=timeout_s, check_every=check_every)
    try:
        yield buffers
    finally:
        buffers.close()


def all_nan(y: Tensor) -> bool:
    return bool(y.isnan().all())


# --- words --------------------------------------------------------------------------------------------------------


def fault(kind: FaultKind, wait: WaitFor = WaitFor.NOTHING, **values: int) -> Fault:
    numbers = {"rank": 2, "peer": 5, "index": 0, "epoch": 41, "expected": 0, "seen": 0, **values}
    return Fault(kind=kind, wait=wait, waited_s=5.004, **numbers)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            fault(FaultKind.TIMEOUT, WaitFor.ROUTES, seen=40 << 32 | 7),
            (
                "rank 2 waited 5.0 s for rank 5 to publish its routes for epoch 41 (last seen 40): rank 5 did not "
                "launch, or its stream has not come to it"
            ),
        ),
        (
            fault(FaultKind.TIMEOUT, WaitFor.EXPERT_DONE, index=11, seen=40 << 32 | 1),
            (
                "rank 2 waited 5.0 s for rank 5 to finish expert 11 in epoch 41 (last seen 40): rank 5 launched late, "
                "stopped on the way, or waits for somebody itself"
            ),
        ),
        (
            fault(FaultKind.TIMEOUT, WaitFor.ROWS, index=3, expected=32, seen=31),
            (
                "rank 2 waited 5.0 s in epoch 41 for pool block 3: 31 of 32 rows arrived: a worker of this rank "
                "stopped on the way"
            ),
        ),
        (
            fault(FaultKind.TIMEOUT, WaitFor.L1_TILES, index=3, expected=7, seen=5),
            (
                "rank 2 waited 5.0 s in epoch 41 for the L1 tiles of pool block 3: mask 0x5 of 0x7: a worker of this "
                "rank stopped on the way"
            ),
        ),
        (
            fault(FaultKind.TIMEOUT, WaitFor.TABLE),
            "rank 2 waited 5.0 s in epoch 41 for its own block table: a worker of this rank stopped on the way",
        ),
        (
            fault(FaultKind.TIMEOUT, WaitFor.ROUTE_CHUNKS, index=4, expected=6, seen=5),
            (
                "rank 2 waited 5.0 s in epoch 41 for all its route chunks to be counted (5 of 6), to list chunk 4: a "
                "worker of this rank stopped on the way"
            ),
        ),
        (
            fault(FaultKind.INPUT, index=7, expected=8, seen=9),
            (
                "rank 2: token 3 slot 1 of epoch 41 names expert 9, but there are 8 experts: the route was masked and "
                "the token's y row is NaN"
            ),
        ),
        (
            fault(FaultKind.OVERFLOW, expected=64, seen=96),
            "rank 2: epoch 41 needs 96 pool rows and pool_rows allows 64: create the buffer with a larger pool_rows",
        ),
        (
            fault(FaultKind.IN_USE, seen=41),
            (
                "rank 2: the buffer was in use by epoch 41 when a second launch came: the second one did nothing and "
                "filled y with NaN; launch on one stream, or use one buffer a stream"
            ),
        ),
        (
            fault(FaultKind.TOKEN_COUNT, expected=8, seen=2**64 - 3),
            "rank 2: num_tokens on the device was -3 in epoch 41, outside 0 to 8: it was cut to that range",
        ),
    ],
    ids=lambda value: f"{value.kind.name}-{value.wait.name}" if isinstance(value, Fault) else "",
)
def test_a_record_in_words(record: Fault, words: str) -> None:
    assert record.describe(small_config(4)) == words


def test_every_wait_has_words_of_its_own() -> None:
    sentences = {fault(FaultKind.TIMEOUT, wait).describe(small_config(4)) for wait in WaitFor}
    assert len(sentences) == len(WaitFor)


def test_records_are_decoded_word_by_word() -> None:
    records = torch.zeros(MAX_FAULT_RECORDS, FAULT_RECORD.num_words, dtype=torch.int32)
    words = {"written": 1, "kind": 3, "wait": 1, "rank": 1, "peer": 2, "index": 3, "epoch_low": 5, "epoch_high": 1}
    words |= {"expected_low": -1, "expected_high": 0, "seen_low": 0, "seen_high": 4, "waited_us_low": 1_500_000}
    for row in (0, 2):  # row 1 is counted, and not written yet
        for name, word in words.items():
            records[row, FAULT_RECORD.words.index(name)] = word
    decoded = Fault(FaultKind.TIMEOUT, WaitFor.ROUTES, 1, 2, 3, 2**32 + 5, 2**32 - 1, 4 << 32, 1.5)
    assert read_fault_records(1, records) == [decoded]
    assert read_fault_records(2, records) == [decoded]
    assert read_fault_records(1000, records) == [decoded, decoded]
    assert read_fault_records(0, records) == []


# --- a rank that is late or never comes ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_rank_never_launches(workers: int) -> None:
    config = small_config(3)
    with opened(config, workers=workers) as buffers:
        assert_works(buffers, 1)
        assert_works(buffers, 2)
        batches, weights = draw_batches(config, [8, 8, 8]), draw_weights(config)
        ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
        began = time.monotonic()
        for rank in (0, 2):
            megamoe.fp8_mega_moe(ys[rank], *weights[rank], buffers.ranks[rank])
        for rank in (0, 2):
            with pytest.raises(MegaMoEFault) as caught:
                buffers.ranks[rank].check()
            assert re.search(
                rf"rank [02] waited 0\.\d s for rank 1 to publish its routes for epoch 3 \(last seen 2\): "
                rf"rank 1 did not launch, or its stream has not come to it; .*{ABORTED.format(epoch=3)}",
                str(caught.value),
            ), caught.value
            assert caught.value.aborted_epoch == 3
            assert {found.peer for found in caught.value.faults} == {1}, "the cause and nothing that follows from it"
            assert all_nan(ys[rank])
        assert time.monotonic() - began < 0.5 + 1

        # The late rank drains, and later launches end at once.
        began = time.monotonic()
        megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
        for rank in (0, 1, 2):
            megamoe.fp8_mega_moe(ys[rank], *weights[rank], buffers.ranks[rank])
            with pytest.raises(MegaMoEFault, match=ABORTED.format(epoch=3)):
                buffers.ranks[rank].check()
        assert time.monotonic() - began < AT_ONCE_S
        assert all_nan(ys[1])

        buffers.reset()
        assert len({buffer.epoch for buffer in buffers.ranks}) == 1
        for seed in (3, 4, 5):
            assert_works(buffers, seed)


def test_a_rank_may_be_late() -> None:
    config = small_config(2)
    with opened(config, timeout_s=5) as buffers:
        batches, weights = draw_batches(config, [9, 4]), draw_weights(config)
        ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
        megamoe.fp8_mega_moe(ys[0], *weights[0], buffers.ranks[0])
        time.sleep(2)
        megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
        buffers.check()
        for y, expected in zip(ys, answers(config, batches, weights), strict=True):
            assert_right(y, expected)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_record_names_the_cause_when_others_came_late(workers: int) -> None:
    """Rank 1 comes at 1.2 s, rank 2 never: a wait that hangs on these must not speak first, nor the deadline grow."""
    config = small_config(3)
    with opened(config, workers=workers, timeout_s=1.5) as buffers:
        batches, weights = draw_batches(config, [8, 8, 8]), draw_weights(config)
        ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
        began = time.monotonic()
        megamoe.fp8_mega_moe(ys[0], *weights[0], buffers.ranks[0])
        time.sleep(1.2)
        megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
        with pytest.raises(MegaMoEFault) as caught:
            buffers.ranks[0].check()
        assert time.monotonic() - began < 1.5 + 0.8
        assert re.match(r"rank 0 waited 1\.[5-9] s for rank 2 to publish its routes for epoch 1", str(caught.value))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_group_can_be_aborted_and_reset_again_and_again(workers: int) -> None:
    config = small_config(2)
    weights = draw_weights(config)
    with opened(config, workers=workers, timeout_s=0.1) as buffers:
        for round_number in range(6):
            present = round_number % 2
            epoch = buffers.ranks[0].epoch
            batch = draw_batches(config, [6, 6], round_number)[present]
            for _ in range(round_number % 3 + 1):  # the ranks' epochs drift apart
                y = batch.fill(buffers.ranks[present])
                megamoe.fp8_mega_moe(y, *weights[present], buffers.ranks[present])
            with pytest.raises(MegaMoEFault) as caught:
                buffers.check()
            assert caught.value.aborted_epoch == epoch + 1
            assert len(caught.value.faults) == 1, "records of earlier rounds are gone"
            buffers.reset()
            buffers.check()
            assert {buffer.epoch for buffer in buffers.ranks} == {epoch + round_number % 3 + 2}
            assert_works(buffers, round_number)


def test_reset_of_a_healthy_group_changes_nothing_but_the_epoch() -> None:
    config = small_config(2)
    with opened(config) as buffers:
        assert_works(buffers, 1)
        buffers.reset()
        assert [buffer.epoch for buffer in buffers.ranks] == [2, 2]
        assert_works(buffers, 2)


def test_reset_waits_for_launches_on_every_stream() -> None:
    config = small_config(2)
    stream = HostStream()
    with opened(config, timeout_s=0.4) as buffers:
        (batch, _), weights = draw_batches(config, [6, 6]), draw_weights(config)
        y = batch.fill(buffers.ranks[0])
        megamoe.launch_mega_moe(y, *weights[0], buffers.ranks[0], stream=stream)
        buffers.reset()
        assert all_nan(y), "it had not ended before the reset"
        buffers.check()
        assert_works(buffers)
    stream.close()


# --- input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", [6, 7, 2**40])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_expert_that_does_not_exist(expert: int, workers: int) -> None:
    config = small_config(3)
    batches, weights = draw_batches(config, [10, 9, 8]), draw_weights(config)
    masked = draw_batches(config, [10, 9, 8])
    batches[1].topk_idx[4, 1] = expert
    masked[1].topk_idx[4, 1] = -1
    with opened(config, workers=workers) as buffers:
        reference = run_all(buffers, masked, weights)
        ys = launch_all(buffers, batches, weights)
        buffers.ranks[0].check()
        buffers.ranks[2].check()
        with pytest.raises(MegaMoEFault) as caught:
            buffers.ranks[1].check()
        assert str(caught.value) == (
            f"rank 1: token 4 slot 1 of epoch 2 names expert {expert}, but there are 6 experts: the route was masked "
            "and the token's y row is NaN"
        )
        assert caught.value.aborted_epoch == 0
        assert all_nan(ys[1][4])
        reference[1][4] = float("nan")
        for y, same in zip(ys, reference, strict=True):
            assert torch.equal(y.view(torch.int16)[~y.isnan().any(1)], same.view(torch.int16)[~same.isnan().any(1)])
        for y, expected in zip(ys, answers(config, batches, weights), strict=True):
            assert_right(y, expected)
        buffers.check()  # told once
        assert_works(buffers, 3)


def test_more_faults_than_records() -> None:
    config = small_config(2)
    batches, weights = draw_batches(config, [24, 3]), draw_weights(config)
    batches[0].topk_idx[:] = 9
    with opened(config) as buffers:
        for _ in range(2):
            ys = launch_all(buffers, batches, weights)
            with pytest.raises(MegaMoEFault) as caught:
                buffers.ranks[0].check()
            assert len(caught.value.faults) == MAX_FAULT_RECORDS
            assert str(caught.value).endswith("; 16 more faults: a buffer keeps records of 32")
            buffers.ranks[1].check()
            assert all_nan(ys[0])
        assert_works(buffers)


def test_faults_of_several_ranks_are_all_told() -> None:
    config = small_config(2)
    batches, weights = draw_batches(config, [2, 3]), draw_weights(config)
    batches[0].topk_idx[0, 0] = 4
    batches[1].topk_idx[2, 1] = 5
    with opened(config) as buffers:
        launch_all(buffers, batches, weights)
        with pytest.raises(MegaMoEFault) as caught:
            buffers.check()
        assert [(found.rank, found.seen) for found in caught.value.faults] == [(0, 4), (1, 5)]
        assert "rank 0: token 0" in str(caught.value)
        assert "rank 1: token 2" in str(caught.value)
        buffers.check()


@pytest.mark.parametrize("check_every", [1, 3])
def test_polling_tells_each_fault_once(check_every: int) -> None:
    """check_every polls at a launch, after it is queued; what it told, check() does not tell again."""
    config = small_config(1, num_experts=2)
    (batch,), (pair,) = draw_batches(config, [3]), draw_weights(config)
    told: list[int] = []
    with opened(config, check_every=check_every) as buffers:
        (buffer,) = buffers.ranks
        for launch in range(1, 13):
            batch.topk_idx[0, 0] = 100 + launch
            y = batch.fill(buffer)
            polled = launch % check_every == 0
            try:
                megamoe.fp8_mega_moe(y, *pair, buffer)
            except MegaMoEFault as caught:
                assert polled
                told += [found.seen for found in caught.faults]
            assert buffer._rank.synchronize()
            assert len(told) >= (launch // check_every) * check_every - 1, "all but the launch just queued"
        try:
            buffer.check()
        except MegaMoEFault as caught:
            told += [found.seen for found in caught.faults]
        assert told == [100 + launch for launch in range(1, 13)]
        assert buffer.read_faults() == [], "a check without launches under way recycles the records"
        buffer.check()


# --- token counts on the device -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("word", "tokens"), [(0, 0), (5, 5), (10, 10), (11, 10), (24, 10), (25, 10), (-3, 0)])
def test_num_tokens_on_the_device(word: int, tokens: int, workers: int) -> None:
    """y has 10 rows and the buffer room for 24: not even a wrong count writes beyond y."""
    config = small_config(2)
    batches, weights = draw_batches(config, [10, 6]), draw_weights(config)
    with opened(config, workers=workers) as buffers:
        batches[0].fill(buffers.ranks[0])
        y1 = batches[1].fill(buffers.ranks[1])
        guarded = torch.full((24, config.hidden), 7.0, dtype=torch.bfloat16)
        count = torch.tensor([word], dtype=torch.int32)
        megamoe.fp8_mega_moe(guarded[:10], *weights[0], buffers.ranks[0], num_tokens=count)
        megamoe.fp8_mega_moe(y1, *weights[1], buffers.ranks[1])
        buffers.ranks[1].check()
        if word == tokens:
            buffers.ranks[0].check()
        else:
            words = rf"rank 0: num_tokens on the device was {word} in epoch 1, outside 0 to 10: it was cut"
            with pytest.raises(MegaMoEFault, match=words):
                buffers.ranks[0].check()
        cut = type(batches[0])(*(tensor[:tokens] for tensor in vars(batches[0]).values()))
        expected = answers(config, [cut, batches[1]], weights)
        assert_right(guarded[:tokens], expected[0])
        assert bool((guarded[tokens:] == 7.0).all())
        assert_right(y1, expected[1])
        assert_works(buffers)


# --- two launches at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_two_launches_on_one_buffer(workers: int) -> None:
    config = small_config(2)
    batches, weights = draw_batches(config, [8, 8]), draw_weights(config)
    stream = HostStream(workers)
    with opened(config, workers=workers, timeout_s=5) as buffers:
        assert_works(buffers, 1)
        ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
        second = torch.zeros_like(ys[0])
        megamoe.fp8_mega_moe(ys[0], *weights[0], buffers.ranks[0])  # waits for rank 1
        while not int(buffers.ranks[0].view("in_use").view(torch.int64)[0]):
            time.sleep(0.001)
        megamoe.launch_mega_moe(second, *weights[0], buffers.ranks[0], stream=stream)
        assert stream.synchronize(2), "a refused launch waits for nobody"
        assert all_nan(second)
        megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
        with pytest.raises(MegaMoEFault) as caught:
            buffers.check()
        assert str(caught.value) == (
            "rank 0: the buffer was in use by epoch 2 when a second launch came: the second one did nothing and filled "
            "y with NaN; launch on one stream, or use one buffer a stream"
        )
        assert [buffer.epoch for buffer in buffers.ranks] == [2, 2], "a refused launch is no epoch"
        for y, expected in zip(ys, answers(config, batches, weights), strict=True):
            assert_right(y, expected)
        for seed in range(4):
            assert_works(buffers, seed)
    stream.close()


def test_the_refused_launch_leaves_the_rest_of_y_alone() -> None:
    config = small_config(2)
    batches, weights = draw_batches(config, [8, 8]), draw_weights(config)
    stream = HostStream()
    with opened(config, timeout_s=5) as buffers:
        ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
        second = torch.ones_like(ys[0])
        megamoe.fp8_mega_moe(ys[0], *weights[0], buffers.ranks[0])
        while not int(buffers.ranks[0].view("in_use").view(torch.int64)[0]):
            time.sleep(0.001)
        megamoe.launch_mega_moe(second, *weights[0], buffers.ranks[0], stream=stream, num_tokens=3)
        stream.synchronize()
        assert all_nan(second[:3])
        assert bool((second[3:] == 1).all())
        megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
        with pytest.raises(MegaMoEFault, match="in use by epoch 1"):
            buffers.check()
    stream.close()


def test_launches_that_share_a_decision_slot_are_decided_once() -> None:
    """Two streams of four workers fight for one buffer. A late worker must not decide again for its launch: then fewer
    workers than the launch has would run it, it would never end, and the buffer would stay in use for ever."""
    config = small_config(1, num_experts=2, num_topk=1)
    (batch,), (pair,) = draw_batches(config, [8]), draw_weights(config)
    expected = answers(config, [batch], [pair])[0]
    stream = HostStream(4)
    refused = 0
    with opened(config, workers=4, timeout_s=5) as buffers:
        (buffer,) = buffers.ranks
        ys = [batch.fill(buffer), batch.fill(buffer)]
        for turn in range(3000):
            if turn >= 300 and refused > 0:  # on a busy machine none may meet in 300
                break
            epoch = buffer.epoch
            for y, where in zip(ys, (None, stream), strict=True):
                y.fill_(7.0)
                megamoe.launch_mega_moe(y, *pair, buffer, stream=where)
                for _ in range(LAUNCH_DECISION_SLOTS - 1):
                    next(api._launch_numbers)
            faults: tuple[Fault, ...] = ()
            try:
                buffer.check()
            except MegaMoEFault as caught:
                faults = caught.faults
            assert all(found.kind is FaultKind.IN_USE for found in faults)
            assert int(buffer.view("in_use").view(torch.int64)[0]) == 0
            assert buffer.epoch - epoch + len(faults) == 2, "each launch ran or was refused"
            assert sum(all_nan(y) for y in ys) == len(faults)
            refused += len(faults)
        for y in ys:
            if not all_nan(y):
                assert_right(y, expected)
        assert refused > 0, "no two launches met: the test showed nothing"
    stream.close()


# --- a pool that is too small -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_pool_rows_too_small(workers: int) -> None:
    config = small_config(3, pool_rows=64)
    batches, weights = draw_batches(config, [20, 20, 20]), draw_weights(config)
    for batch in batches:  # rank 1 owns experts 2 and 3: 60 routes each, two blocks of 32 each
        batch.topk_idx[:] = torch.tensor([2, 3])
    fitting = draw_batches(config, [4, 5, 6])
    with opened(config, workers=workers, timeout_s=2) as buffers:
        run_all(buffers, fitting, weights)
        began = time.monotonic()
        ys = launch_all(buffers, batches, weights)
        for rank, buffer in enumerate(buffers.ranks):
            with pytest.raises(MegaMoEFault) as caught:
                buffer.check()
            assert str(caught.value).startswith(
                "rank 1: epoch 2 needs 128 pool rows and pool_rows allows 64: create the buffer with a larger "
                "pool_rows; the group is aborted since epoch 2"
            )
            assert [found.kind for found in caught.value.faults] == [FaultKind.OVERFLOW]
            assert all_nan(ys[rank])
        assert time.monotonic() - began < 1, "nobody waits for a deadline"
        with pytest.raises(MegaMoEFault, match="aborted since epoch 2"):
            run_all(buffers, fitting, weights)
        buffers.reset()
        for y, expected in zip(run_all(buffers, fitting, weights), answers(config, fitting, weights), strict=True):
            assert_right(y, expected)


def test_a_pool_that_is_just_large_enough() -> None:
    config = small_config(2, pool_rows=96)
    batches, weights = draw_batches(config, [24, 24]), draw_weights(config)
    for batch in batches:
        batch.topk_idx[:] = 0
    with opened(config) as buffers:  # 96 routes of one expert
        for y, expected in zip(run_all(buffers, batches, weights), answers(config, batches, weights), strict=True):
            assert_right(y, expected)
        batches[1].topk_idx[3, 1] = 1  # 95 of one and 1 of another: one block more
        launch_all(buffers, batches, weights)
        with pytest.raises(MegaMoEFault, match="needs 128 pool rows and pool_rows allows 96"):
            buffers.check()
