"""The three regimes on a made-up GPU: what is inside a time, what is outside, and in which order contenders run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest
import torch

from bench import timing
from bench.timing import Timer, turn_orders
from tests.bench_worlds import HostWorld


class FakeGpu:
    """A stream whose work takes exactly as long as it says; the clock moves by that work alone."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.slept_us = 0.0


class FakeEvent:
    gpu: FakeGpu

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_us = -1.0

    def record(self, stream: object) -> None:
        self.at_us = self.gpu.now_us

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at_us - self.at_us) * 1e-3

    def synchronize(self) -> None:
        return None


class FakeContender:
    accumulate = "fp32"
    combine = "bf16"
    asynchronous = True

    def __init__(self, name: str, gpu: FakeGpu, us: float, log: list[str]) -> None:
        self.name = name
        self._gpu = gpu
        self._us = us
        self._log = log
        self.loads: list[int] = []

    def load(self, index: int) -> None:
        self.loads.append(index)
        self._gpu.now_us += 1000.0  # never in a time

    def call(self) -> None:
        self._log.append(self.name)
        self._gpu.now_us += self._us

    def check(self) -> None:
        return None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()

    class Event(FakeEvent):
        gpu = fake

    @contextlib.contextmanager
    def device(which: object) -> Iterator[None]:
        yield

    def sleep(cycles: int) -> None:
        fake.slept_us += cycles / timing._CYCLES_PER_US
        fake.now_us += cycles / timing._CYCLES_PER_US

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which: None)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    return fake


@pytest.mark.parametrize("regime", ["bursts", "cold", "sustained"])
def test_a_time_holds_the_calls_alone(regime: str, gpu: FakeGpu) -> None:
    log: list[str] = []
    contenders = [FakeContender("a", gpu, 20_000.0, log), FakeContender("b", gpu, 9_000.0, log)]
    timer = Timer(HostWorld(1))
    timings = getattr(timer, regime)(contenders, 3, 0.5)
    assert [one.us for one in timings] == pytest.approx([20_000.0, 9_000.0])
    assert [one.low_us for one in timings] == pytest.approx([20_000.0, 9_000.0])
    assert all(one.repetitions >= (4 if regime == "sustained" else timing.MIN_REPETITIONS) for one in timings)
    assert all(set(contender.loads) == {0, 1, 2} for contender in contenders)
    assert (gpu.slept_us > 0) == (regime != "sustained")
    turns = [name for index, name in enumerate(log) if index == 0 or log[index - 1] != name]
    assert len(turns) >= 10  # in turn, not one after the other


def test_each_contender_follows_each_other_one() -> None:
    rounds = list(islice(turn_orders(3), 40))
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    turns = [index for order in rounds for index in order]
    followed = Counter(pairwise(turns))
    assert set(followed) == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert min(followed.values()) >= 10  # of 119
    assert list(islice(turn_orders(3), 40)) == rounds  # on every rank
    assert next(turn_orders(0)) == []
    assert next(turn_orders(1)) == [0]


def test_a_contender_that_waits_is_not_slept_for(gpu: FakeGpu) -> None:
    contender = FakeContender("a", gpu, 100.0, [])
    contender.asynchronous = False
    (measured,) = Timer(HostWorld(1)).bursts([contender], 1, 0.001)
    assert gpu.slept_us == pytest.approx(measured.repetitions * timing._QUEUE_US, rel=0.01)


def test_nothing_to_time(gpu: FakeGpu) -> None:
    timer = Timer(HostWorld(1))
    assert timer.bursts([], 1, 1.0) == timer.cold([], 1, 1.0) == timer.sustained([], 1, 1.0) == []
