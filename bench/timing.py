"""Three ways to time a layer: back-to-back bursts, single calls on a cold L2, and seconds without a pause.

Every figure is a median over repetitions of the largest time of any rank. While the GPU sleeps on the stream, the
host queues what is to be timed, so that Python is not in the figures where the GPU is faster than it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bench.world import World

REGIMES = ("bursts", "cold", "sustained")
FLUSH_BYTES = 512 << 20
"""Written before a cold call: ten times the L2 of an H200."""
BURST_CALLS = 10
MIN_REPETITIONS = 5
MAX_REPETITIONS = 200
CHUNK_S = 0.1
"""Length of one contender's turn in the sustained regime."""
_QUEUE_US = 200.0
_FLUSH_US = 300.0
_CYCLES_PER_US = 2000  # at most 1980 MHz: sleeps a little longer than asked


class Contender(Protocol):
    """One way to run the layer."""

    name: str
    accumulate: str
    combine: str
    asynchronous: bool
    """Whether a call only queues work; False: it waits for some of it."""

    def load(self, index: int) -> None:
        """Put input set ``index`` where the next calls read it, by work on the current streams."""
        ...

    def call(self) -> None:
        """Queue one call on every rank of this process."""
        ...

    def check(self) -> None:
        """Wait, and raise for what went wrong."""
        ...


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        us: median.
        low_us: tenth percentile.
        high_us: ninetieth percentile.
        repetitions: samples behind them.
        calls: calls in a sample.
        host_us: host time to queue one call, median.
    """

    us: float
    low_us: float
    high_us: float
    repetitions: int
    calls: int
    host_us: float


def summarize(samples_us: Sequence[float], calls: int, host_us: Sequence[float]) -> Timing:
    """Median and percentiles of samples that are already the maximum over the ranks."""
    ordered = sorted(samples_us)
    last = len(ordered) - 1
    return Timing(
        us=statistics.median(ordered),
        low_us=ordered[round(0.1 * last)],
        high_us=ordered[round(0.9 * last)],
        repetitions=len(ordered),
        calls=calls,
        host_us=statistics.median(host_us) if host_us else 0.0,
    )


def plan_repetitions(call_us: float, calls: int, overhead_us: float, seconds: float) -> tuple[int, int]:
    """(repetitions, calls in each) that fit ``seconds``; long calls get shorter bursts rather than too few of them."""
    while calls > 4 and MIN_REPETITIONS * ((calls + 1) * call_us + overhead_us) > seconds * 1e6:
        calls -= 1
    each = (calls + 1) * call_us + overhead_us
    return max(MIN_REPETITIONS, min(MAX_REPETITIONS, int(seconds * 1e6 / each))), calls


def turn_orders(count: int) -> Iterator[list[int]]:
    """Orders of ``count`` contenders, round after round, the same on every rank; of several none comes twice in a row.
    Where power is the limit a contender's clock depends on who ran before it, so that changes."""
    shuffle = random.Random(count).shuffle  # a seed that every rank knows
    order = list(range(count))
    while True:
        last = order[-1:]
        shuffle(order)
        while count > 1 and order[:1] == last:
            shuffle(order)
        yield list(order)


@dataclass(frozen=True)
class _Plan:
    """How a contender is repeated; ``sleep_us`` is how long the GPU sleeps while the host queues a repetition."""

    contender: Contender
    repetitions: int
    calls: int
    sleep_us: float
    lead_in: bool


class Timer:
    """Times contenders on one world; keeps the buffer that flushes the L2."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._flush = [torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) for device in world.devices]

    def _events(self) -> list[torch.cuda.Event]:
        events = []
        for device in self._world.devices:
            with torch.cuda.device(device):
                event = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(device))
            events.append(event)
        return events

    def _sleep(self, us: float) -> None:
        for device in self._world.devices:
            with torch.cuda.device(device):
                torch.cuda._sleep(int(us * _CYCLES_PER_US))

    def _elapsed_us(self, begin: Sequence[torch.cuda.Event], end: Sequence[torch.cuda.Event]) -> float:
        return max(1e3 * first.elapsed_time(last) for first, last in zip(begin, end, strict=True))

    def warm_up(self, contender: Contender, num_sets: int) -> tuple[float, float]:
        """Run until everything is loaded. Returns microseconds of a call and of its queuing, rough, equal on all."""
        for index in range(num_sets):
            contender.load(index)
            contender.call()
            contender.check()
        calls = 3
        self._world.align()
        begin = self._events()
        started = time.perf_counter()
        for _ in range(calls):
            contender.call()
        host_us = (time.perf_counter() - started) / calls * 1e6
        end = self._events()
        contender.check()
        self._world.synchronize()
        call_us, host_us = self._world.largest([self._elapsed_us(begin, end) / calls, host_us])
        return call_us, host_us

    def bursts(self, contenders: Sequence[Contender], num_sets: int, seconds: float) -> list[Timing]:
        """Bursts of calls on the same inputs, another set each time, a burst of every contender in turn. The first call
        of a burst is not in the time: it brings the ranks to the same place."""
        plans = []
        for contender in contenders:
            call_us, host_us = self.warm_up(contender, num_sets)
            host_us = host_us if contender.asynchronous else 0.0  # what waits for the GPU cannot be queued ahead
            repetitions, calls = plan_repetitions(
                call_us, BURST_CALLS, _QUEUE_US + host_us * (BURST_CALLS + 1), seconds
            )
            plans.append(_Plan(contender, repetitions, calls, _QUEUE_US + host_us * (calls + 1), lead_in=True))
        return self._in_turn(plans, num_sets, self._sleep)

    def cold(self, contenders: Sequence[Contender], num_sets: int, seconds: float) -> list[Timing]:
        """Single calls after a buffer larger than the L2 was written, the ranks aligned on the device, in turn."""
        plans = []
        for contender in contenders:
            call_us, host_us = self.warm_up(contender, num_sets)
            host_us = host_us if contender.asynchronous else 0.0
            repetitions, _ = plan_repetitions(call_us, 1, _FLUSH_US + _QUEUE_US + host_us, seconds)
            plans.append(_Plan(contender, repetitions, 1, _QUEUE_US + host_us, lead_in=False))

        def prepare(us: float) -> None:
            self._sleep(us)
            for buffer in self._flush:
                buffer.zero_()
            self._world.align()

        return self._in_turn(plans, num_sets, prepare)

    def _in_turn(self, plans: Sequence[_Plan], num_sets: int, prepare: Callable[[float], None]) -> list[Timing]:
        samples: list[list[float]] = [[] for _ in plans]
        host: list[list[float]] = [[] for _ in plans]
        orders = turn_orders(len(plans))
        for repetition in range(max((plan.repetitions for plan in plans), default=0)):
            for index in next(orders):
                plan = plans[index]
                if repetition < plan.repetitions:
                    call_us, host_us = self._once(plan, repetition % num_sets, prepare)
                    samples[index].append(call_us)
                    host[index].append(host_us)
        return [
            summarize(self._world.largest(samples[index]), plan.calls, host[index]) for index, plan in enumerate(plans)
        ]

    def _once(self, plan: _Plan, set_index: int, prepare: Callable[[float], None]) -> tuple[float, float]:
        """One repetition: microseconds of a call on the slowest GPU of this process, and of its queuing."""
        contender = plan.contender
        contender.load(set_index)
        prepare(plan.sleep_us)
        if plan.lead_in:
            contender.call()
        begin = self._events()
        started = time.perf_counter()
        for _ in range(plan.calls):
            contender.call()
        host_us = (time.perf_counter() - started) / plan.calls * 1e6
        end = self._events()
        contender.check()
        self._world.synchronize()
        return self._elapsed_us(begin, end) / plan.calls, host_us

    def sustained(self, contenders: Sequence[Contender], num_sets: int, seconds: float) -> list[Timing]:
        """Contenders in turn without a pause for ``seconds`` each; the first third of the turns is thrown away."""
        estimates = [self.warm_up(contender, num_sets)[0] for contender in contenders]
        calls = [max(2, int(CHUNK_S * 1e6 / us)) for us in estimates]
        rounds = max(6, int(seconds / CHUNK_S))
        turns: list[list[tuple[list[torch.cuda.Event], list[torch.cuda.Event]]]] = [[] for _ in contenders]
        host: list[list[float]] = [[] for _ in contenders]
        previous: list[torch.cuda.Event] = []
        orders = turn_orders(len(contenders))
        for turn in range(rounds):
            for index in next(orders):
                contender = contenders[index]
                contender.load(turn % num_sets)
                contender.call()
                begin = self._events()
                started = time.perf_counter()
                for _ in range(calls[index]):
                    contender.call()
                host[index].append((time.perf_counter() - started) / calls[index] * 1e6)
                turns[index].append((begin, self._events()))
                for event in previous:  # at most one turn ahead: queues have an end, and a hang should be noticed
                    event.synchronize()
                previous = turns[index][-1][1]
        self._world.synchronize()
        timings = []
        for index, contender in enumerate(contenders):
            contender.check()
            kept = turns[index][rounds // 3 :]
            samples = [self._elapsed_us(begin, end) / calls[index] for begin, end in kept]
            timings.append(summarize(self._world.largest(samples), calls[index], host[index]))
        return timings
