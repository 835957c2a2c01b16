"""A buffer over its life: many epochs, changing tokens and weights, several buffers, odd inputs, memory given back."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megamoe
from megamoe import (
    L1Weights,
    L2Weights,
    MegaMoEConfig,
    MegaMoEFault,
    SymmBuffer,
    VirtualGroup,
    VirtualSymmBuffer,
)
from megamoe.buffer import DEBUG_VIEWS
from megamoe.groups import LocalGroup
from megamoe.layout import buffer_layout
from tests.layers import (
    Batch,
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

CONFIG = small_config(2)


@pytest.fixture
def buffers() -> Iterator[VirtualSymmBuffer]:
    opened = open_buffer(VirtualGroup(2, num_workers=2), CONFIG, timeout_s=5)
    yield opened
    opened.close()


def bits(y: Tensor) -> Tensor:
    return y.view(torch.int16)


def test_a_rank_whose_package_lays_buffers_out_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(group: LocalGroup, offer: Any) -> list[Any]:
        return [offer, ("0" * 64, offer[1])]

    monkeypatch.setattr(LocalGroup, "all_gather", gather)
    with pytest.raises(ValueError, match="rank 1 has another version of megamoe than rank 0"):
        open_buffer(VirtualGroup(2), CONFIG)


# --- many launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_hundred_epochs_with_changing_tokens(workers: int) -> None:
    """Fresh routing and counts in each; every answer against the oracle, the first inputs again at the end."""
    config = small_config(3)
    weights = draw_weights(config)
    generator = torch.Generator().manual_seed(7)
    buffers = open_buffer(VirtualGroup(3, num_workers=workers), config, timeout_s=5)
    first = draw_batches(config, [24, 5, 13], seed=1000)
    once = run_all(buffers, first, weights)
    for epoch in range(2, 100):
        tokens = torch.randint(0, 25, (3,), generator=generator).tolist()
        if epoch % 10 == 0:
            tokens[epoch // 10 % 3] = 0
        batches = draw_batches(config, tokens, seed=epoch, lowest=-(epoch % 3))
        ys = run_all(buffers, batches, weights)
        assert [buffer.epoch for buffer in buffers.ranks] == [epoch] * 3
        for y, expected in zip(ys, answers(config, batches, weights), strict=True):
            assert_right(y, expected)
    for y, same in zip(run_all(buffers, first, weights), once, strict=True):
        assert torch.equal(bits(y), bits(same))
    buffers.close()


def test_launches_may_be_queued(buffers: VirtualSymmBuffer) -> None:
    """The same inputs twenty times without a check between: the launches of the ranks follow one another."""
    batches, weights = draw_batches(CONFIG, [9, 17]), draw_weights(CONFIG)
    ys: list[list[Tensor]] = [[], []]
    for buffer, batch in zip(buffers.ranks, batches, strict=True):
        batch.fill(buffer)
    for rank in (1, 0):  # one rank's whole queue before the other's
        for _ in range(20):
            y = torch.zeros(batches[rank].num_tokens, CONFIG.hidden, dtype=torch.bfloat16)
            megamoe.fp8_mega_moe(y, *weights[rank], buffers.ranks[rank])
            ys[rank].append(y)
    buffers.check()
    for rank, expected in enumerate(answers(CONFIG, batches, weights)):
        assert_right(ys[rank][0], expected)
        assert all(torch.equal(bits(y), bits(ys[rank][0])) for y in ys[rank])
    assert [buffer.epoch for buffer in buffers.ranks] == [20, 20]


def test_weights_replaced_between_launches(buffers: VirtualSymmBuffer) -> None:
    batches = draw_batches(CONFIG, [12, 12])
    results = []
    for seed in (1, 2, 1):
        weights = draw_weights(CONFIG, seed)
        ys = run_all(buffers, batches, weights)
        for y, expected in zip(ys, answers(CONFIG, batches, weights), strict=True):
            assert_right(y, expected)
        results.append(torch.cat(ys))
    assert torch.equal(bits(results[0]), bits(results[2]))
    assert not torch.equal(bits(results[0]), bits(results[1]))


def test_weights_changed_in_place_between_launches(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [12, 12]), draw_weights(CONFIG)
    mine = [(type(l1)(l1.weight.clone(), l1.sf.clone()), l2) for l1, l2 in weights]
    run_all(buffers, batches, mine)
    for l1, _ in mine:
        l1.sf.mul_(0.5)
    for y, expected in zip(run_all(buffers, batches, mine), answers(CONFIG, batches, mine), strict=True):
        assert_right(y, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("freed", "l1_weights.weight: got .* with 0 bytes of memory"),
        ("shrunk", "l1_weights.weight: got .* with 16 bytes of memory"),
        ("transposed", r"l1_weights weight: got float8_e4m3fn \[2, 128, 256\]"),
    ],
)
def test_weights_that_lost_their_memory_or_their_order(change: str, words: str, buffers: VirtualSymmBuffer) -> None:
    """They are the same tensors as in the launch before, at the same address but where it is gone."""
    batches, weights = draw_batches(CONFIG, [12, 12]), draw_weights(CONFIG)
    l1 = L1Weights(weights[0][0].weight.clone(), weights[0][0].sf.clone())
    run_all(buffers, batches, [(l1, weights[0][1]), weights[1]])
    if change == "transposed":
        l1.weight.transpose_(1, 2)
    else:
        l1.weight.untyped_storage().resize_(0 if change == "freed" else 16)
    y = batches[0].fill(buffers.ranks[0])
    with pytest.raises(ValueError, match=words):
        megamoe.fp8_mega_moe(y, l1, weights[0][1], buffers.ranks[0])
    y.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"y: got .* with 0 bytes of memory, expected"):
        megamoe.fp8_mega_moe(y, *weights[0], buffers.ranks[0])
    assert_works(buffers)


def test_without_threads_no_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(num_workers: int) -> None:
        raise OSError("no more threads")

    def descriptors() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    before = descriptors()
    monkeypatch.setattr("megamoe.targets.host.HostStream", no_more)
    with pytest.raises(OSError, match="no more threads"):
        open_buffer(VirtualGroup(2), CONFIG)
    assert descriptors() == before


@pytest.mark.parametrize("name", ["cumulative_local_expert_recv_stats", "num_tokens", "role_times"])
def test_small_arguments_that_lost_their_memory(name: str, buffers: VirtualSymmBuffer) -> None:
    """Their address would say that there is none."""
    (batch, _), weights = draw_batches(CONFIG, [5, 5]), draw_weights(CONFIG)
    size, dtype = {"num_tokens": (1, torch.int32), "role_times": (5, torch.int64)}.get(name, (2, torch.int32))
    lost: Any = torch.zeros(size, dtype=dtype)
    lost.untyped_storage().resize_(0)
    y = batch.fill(buffers.ranks[0])
    with pytest.raises(ValueError, match=f"{name}: got .* with 0 bytes of memory"):
        megamoe.launch_mega_moe(y, *weights[0], buffers.ranks[0], **{name: lost})
    assert_works(buffers)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT as a terminal's program has it; it is ignored in what a shell starts in the background, CI say."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_ends_the_wait_for_a_launch() -> None:
    buffers = open_buffer(VirtualGroup(2), CONFIG, timeout_s=60)
    batches, weights = draw_batches(CONFIG, [5, 5]), draw_weights(CONFIG)
    ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
    megamoe.fp8_mega_moe(ys[0], *weights[0], buffers.ranks[0])  # waits for the other rank
    started = time.monotonic()
    interrupt = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (it may come at once)
        interrupt.start()
        buffers.ranks[0].check()
    interrupt.join()
    assert time.monotonic() - started < 30
    megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
    buffers.check()
    assert_right(ys[0], answers(CONFIG, batches, weights)[0])
    buffers.close()


def test_several_buffers_and_configs_at_once() -> None:
    configs = [
        CONFIG,
        small_config(3, hidden=256, num_topk=3, block_m=64),
        small_config(2, intermediate_hidden=384, l2_sf_granularity=64, l1_block_n=128),
        CONFIG,
    ]
    opened = [open_buffer(VirtualGroup(config.num_ranks), config, timeout_s=5) for config in configs]
    for seed in range(3):
        drawn = [draw_batches(config, [8 + seed] * config.num_ranks, seed + 10 * i) for i, config in enumerate(configs)]
        ys = [
            launch_all(buffers, batches, draw_weights(config))
            for buffers, batches, config in zip(opened, drawn, configs, strict=True)
        ]
        for buffers, batches, config, each in reversed(list(zip(opened, drawn, configs, ys, strict=True))):
            buffers.check()
            for y, expected in zip(each, answers(config, batches, draw_weights(config)), strict=True):
                assert_right(y, expected)
    opened[1].close()
    assert_works(opened[2])
    for buffers in opened:
        buffers.close()


# --- tokens -------------------------------------------------------------------------------------------------------


def test_no_tokens_anywhere(buffers: VirtualSymmBuffer) -> None:
    ys = run_all(buffers, draw_batches(CONFIG, [0, 0]), draw_weights(CONFIG))
    assert [tuple(y.shape) for y in ys] == [(0, CONFIG.hidden)] * 2
    assert_works(buffers)


def test_an_idle_rank_takes_part(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [10, 0]), draw_weights(CONFIG)
    for _ in range(3):
        y = batches[0].fill(buffers.ranks[0])
        megamoe.fp8_mega_moe(y, *weights[0], buffers.ranks[0])
        megamoe.dummy_run(*weights[1], buffers.ranks[1])
        buffers.check()
        assert_right(y, answers(CONFIG, batches, weights)[0])
    assert [buffer.epoch for buffer in buffers.ranks] == [3, 3]


def test_fewer_tokens_than_y_has_rows(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [10, 7]), draw_weights(CONFIG)
    ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
    megamoe.fp8_mega_moe(ys[0], *weights[0], buffers.ranks[0], num_tokens=4)
    megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
    buffers.check()
    cut = Batch(*(tensor[:4] for tensor in vars(batches[0]).values()))
    expected = answers(CONFIG, [cut, batches[1]], weights)
    assert_right(ys[0][:4], expected[0])
    assert bool((ys[0][4:] == 7.0).all())
    assert_right(ys[1], expected[1])


def test_the_device_count_is_read_by_the_launch_itself(buffers: VirtualSymmBuffer) -> None:
    """Changed after the call, before the launch can have started: the queue is held up by the other rank."""
    batches, weights = draw_batches(CONFIG, [10, 10]), draw_weights(CONFIG)
    ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
    count = torch.tensor([10], dtype=torch.int32)
    second = torch.full_like(ys[0], 7.0)
    megamoe.fp8_mega_moe(ys[0], *weights[0], buffers.ranks[0])  # waits for rank 1
    megamoe.fp8_mega_moe(second, *weights[0], buffers.ranks[0], num_tokens=count)
    count.fill_(2)
    for _ in range(2):
        megamoe.fp8_mega_moe(ys[1], *weights[1], buffers.ranks[1])
    buffers.check()
    assert torch.equal(bits(second[:2]), bits(ys[0][:2]))
    assert bool((second[2:] == 7.0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(buffers: VirtualSymmBuffer, bad: float) -> None:
    batches, weights = draw_batches(CONFIG, [10, 9]), draw_weights(CONFIG)
    clean = run_all(buffers, batches, weights)
    batches[0].x[3, 17] = bad
    ys = run_all(buffers, batches, weights)
    assert bool(ys[0][3].isnan().all())
    others = torch.arange(10) != 3
    assert torch.equal(bits(ys[0][others]), bits(clean[0][others]))
    assert torch.equal(bits(ys[1]), bits(clean[1]))
    for y, expected in zip(ys, answers(CONFIG, batches, weights), strict=True):
        assert_right(y, expected)


def test_masked_routes_and_the_same_expert_twice(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [8, 8], lowest=-4), draw_weights(CONFIG)
    batches[0].topk_idx[0], batches[0].topk_idx[1] = -1, 3
    batches[1].topk_idx[2, 0] = -(2**62)
    ys = run_all(buffers, batches, weights)
    assert bool((ys[0][0] == 0).all())
    for y, expected in zip(ys, answers(CONFIG, batches, weights), strict=True):
        assert_right(y, expected)


def test_clamp(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [8, 8]), draw_weights(CONFIG)
    ys = [batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True)]
    for y, pair, buffer in zip(ys, weights, buffers.ranks, strict=True):
        megamoe.fp8_mega_moe(y, *pair, buffer, activation_clamp=0.5)
    buffers.check()
    free = answers(CONFIG, batches, weights)
    for y, expected, other in zip(ys, answers(CONFIG, batches, weights, activation_clamp=0.5), free, strict=True):
        assert_right(y, expected)
        assert (y.double() - other).norm() > 0.1 * other.norm(), "the clamp changes something"


def test_stats_accumulate(buffers: VirtualSymmBuffer) -> None:
    weights = draw_weights(CONFIG)
    stats = [torch.full((2,), 100, dtype=torch.int32) for _ in range(2)]
    routes = torch.full((4,), 100)
    for seed in range(4):
        batches = draw_batches(CONFIG, [5 * seed, 7], seed, lowest=-1)
        for buffer, batch, pair, counts in zip(buffers.ranks, batches, weights, stats, strict=True):
            megamoe.fp8_mega_moe(batch.fill(buffer), *pair, buffer, counts)
        buffers.check()
        for batch in batches:
            routes += torch.bincount(batch.topk_idx.flatten() + 1, minlength=5)[1:]
        assert torch.cat(stats).tolist() == routes.tolist()


# --- memory -------------------------------------------------------------------------------------------------------


def shared_mappings() -> int:
    """Bytes of the memory of ranks that this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if re.search(r"rw-s .*/memfd:megamoe-rank", line):
            first, last = line.split()[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


@pytest.mark.parametrize("how", ["close", "drop"])
def test_memory_is_given_back(how: str) -> None:
    gc.collect()
    before = shared_mappings()
    buffers = open_buffer(VirtualGroup(2), CONFIG, timeout_s=5)
    assert_works(buffers)
    one = -(-buffer_layout(CONFIG).num_bytes // 4096) * 4096
    assert shared_mappings() - before == 2 * one
    view = buffers.ranks[1].topk_idx
    if how == "close":
        buffers.close()
    del buffers
    gc.collect()
    assert shared_mappings() - before == one, "a view keeps its rank's memory, and no other"
    view.fill_(3)
    del view
    gc.collect()
    assert shared_mappings() == before


def test_closing_one_rank_leaves_the_others(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [6, 6]), draw_weights(CONFIG)
    run_all(buffers, batches, weights)
    buffers.ranks[0].close()
    other = buffers.ranks[1]
    other.view("abort", rank=0)  # still mapped
    other.timeout_s = 0.3
    y = batches[1].fill(other)
    megamoe.fp8_mega_moe(y, *weights[1], other)
    with pytest.raises(MegaMoEFault, match="for rank 0 to publish its routes for epoch 2"):
        other.check()


def test_close_waits_for_the_launch(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [24, 24]), draw_weights(CONFIG)
    ys = launch_all(buffers, batches, weights)
    buffers.close()
    for y, expected in zip(ys, answers(CONFIG, batches, weights), strict=True):
        assert_right(y, expected)


def test_what_a_launch_uses_is_kept_alive_until_it_ends(buffers: VirtualSymmBuffer) -> None:
    batches, weights = draw_batches(CONFIG, [9, 9]), draw_weights(CONFIG)
    expected = answers(CONFIG, batches, weights)
    y, other = (batch.fill(buffer) for batch, buffer in zip(batches, buffers.ranks, strict=True))
    l1 = L1Weights(weights[0][0].weight.clone(), weights[0][0].sf.clone())
    l2 = L2Weights(weights[0][1].weight.clone(), weights[0][1].sf.clone())
    stats, count = torch.zeros(2, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    megamoe.fp8_mega_moe(y, l1, l2, buffers.ranks[0], stats, num_tokens=count)  # waits for rank 1
    watched = [weakref.ref(tensor) for tensor in (*l1, *l2, stats, count)]
    del l1, l2, stats, count
    gc.collect()
    assert all(reference() is not None for reference in watched)
    megamoe.fp8_mega_moe(other, *weights[1], buffers.ranks[1])
    buffers.check()
    assert_right(y, expected[0])
    gc.collect()
    assert all(reference() is None for reference in watched), "and no longer"


# --- what it says of itself ---------------------------------------------------------------------------------------


def test_debug_views_are_attributes(buffers: VirtualSymmBuffer) -> None:
    assert_works(buffers)
    buffer = buffers.ranks[0]
    for name in DEBUG_VIEWS:
        view = getattr(buffer, name)
        assert view.data_ptr() == buffer.view(name).data_ptr()
    # A banked view shows the bank of the last launch: epoch 1 now, epoch 2 next.
    first = buffer.l1_arrival_count.data_ptr()
    assert int(buffer.l1_arrival_count.view(torch.int32).sum()) > 0
    assert_works(buffers, 1)
    assert buffer.l1_arrival_count.data_ptr() != first


def test_repr(buffers: VirtualSymmBuffer) -> None:
    assert_works(buffers)
    size = buffers.ranks[1].layout.num_bytes
    assert repr(buffers.ranks[1]) == f"SymmBuffer(rank 1 of 2, host, {size} bytes, epoch 1)"
    buffers.close()
    assert repr(buffers.ranks[1]) == "SymmBuffer(rank 1 of 2, host, closed)"


# --- threads and processes ----------------------------------------------------------------------------------------


def test_threads_share_a_buffer() -> None:
    """Launches of four threads: each with its own arguments, and its y kept until the launch that writes it ended."""
    config = small_config(1)
    buffer, pair = open_buffer(VirtualGroup(1), config, timeout_s=5).ranks[0], draw_weights(config)[0]
    (batch,) = draw_batches(config, [24])
    batch.fill(buffer)
    (expected,) = answers(config, [batch], [pair])

    def launch_often(tokens: int) -> None:
        for _ in range(60):
            guarded = torch.full((tokens + 24, config.hidden), 7.0, dtype=torch.bfloat16)
            megamoe.fp8_mega_moe(guarded[:tokens], *pair, buffer)
            buffer.check()
            assert_right(guarded[:tokens], expected[:tokens])
            assert bool((guarded[tokens:] == 7.0).all())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(launch_often, (1, 7, 15, 24)))
    finally:
        sys.setswitchinterval(interval)
    assert buffer.epoch == 240
    buffer.close()


def test_a_buffer_is_closed_while_another_thread_uses_it() -> None:
    config = small_config(1)
    pair, (batch,) = draw_weights(config)[0], draw_batches(config, [24])

    def use(buffer: SymmBuffer) -> str:
        y = torch.empty(24, config.hidden, dtype=torch.bfloat16)
        try:
            while True:
                megamoe.fp8_mega_moe(y, *pair, buffer)
                buffer.check()
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        for _ in range(10):
            buffer = open_buffer(VirtualGroup(1), config, timeout_s=5).ranks[0]
            batch.fill(buffer)
            users = [threads.submit(use, buffer) for _ in range(2)]
            time.sleep(0.005)
            buffer.close()
            for user in users:
                assert user.result(10) == "sym_buffer: the buffer of rank 0 is closed, expected an open one"


def test_a_forked_child_does_not_write_into_the_parents_buffer(buffers: VirtualSymmBuffer) -> None:
    assert_works(buffers, 1)
    buffer = buffers.ranks[0]
    before = buffer._rank.memory.clone()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (lambda: buffer.view("x"), lambda: buffer.epoch, buffer.check, buffers.reset):
                with pytest.raises(ValueError, match="a forked child cannot launch on it or use it"):
                    call()
            buffers.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(buffer._rank.memory, before)
    assert_works(buffers, 2)


def test_a_buffer_made_in_inference_mode_is_for_any_mode() -> None:
    with torch.inference_mode():
        buffers = open_buffer(VirtualGroup(2), CONFIG, timeout_s=5)
        assert_works(buffers, 1)
    assert_works(buffers, 2)
    buffers.reset()
    buffers.close()


def test_max_ctas_limits_the_workers() -> None:
    """Whatever the number of workers, the same bits."""
    config, results = replace(CONFIG, num_max_tokens_per_rank=48), []
    batches, weights = draw_batches(config, [48, 31]), draw_weights(config)
    for group_workers, max_ctas in ((1, None), (4, None), (4, 2), (2, 8)):
        buffers = open_buffer(VirtualGroup(2, num_workers=group_workers), config, timeout_s=5, max_ctas=max_ctas)
        results.append(torch.cat(run_all(buffers, batches, weights)))
        buffers.close()
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)


def test_warmup_is_for_either_kind(buffers: VirtualSymmBuffer) -> None:
    megamoe.warmup(buffers)
    megamoe.warmup(buffers.ranks[0])
    assert isinstance(buffers.ranks[0], SymmBuffer)
    assert isinstance(buffers.config, MegaMoEConfig)
