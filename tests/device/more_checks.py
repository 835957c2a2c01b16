"""What target sm90 must do beyond the phases, on real GPUs: one check a name, each in a process of its own.

    PYTHONPATH=. python3 tests/device/more_checks.py fill graphs several host_cost faults replay_faults foreign rerun

Prints ``ok`` or ``WRONG`` with what was seen for every claim; the exit code is 1 if any was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megamoe
from megamoe import L1Weights, L2Weights, MegaMoE, MegaMoEConfig, MegaMoEFault, VirtualGroup
from megamoe.faults import FaultKind
from megamoe.jit import compile_cubin, csrc_dir
from megamoe.quant import quantize_activations
from megamoe.reference import RankInputs, compare, moe_layer
from megamoe.targets import sm90
from phases.support.inputs import Tokens, Workload, make_tokens, make_weights
from phases.support.workloads import TILES

SMS = 132
_wrong: list[str] = []


def claim(holds: bool, words: str) -> None:
    print(f"{'ok   ' if holds else 'WRONG'}  {words}", flush=True)
    if not holds:
        _wrong.append(words)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Layer:
    """R ranks of this process over so many GPUs, with their weights and what they answer."""

    def __init__(self, ranks: int, gpus: int = 1, *, shape: tuple[int, int] = (1024, 512), experts: int = 16,
                 topk: int = 4, capacity: int = 256, timeout_s: float = 5.0, pool_rows: int | None = None,
                 max_ctas: int | None = None, granularity: int = 128) -> None:  # fmt: skip
        group = VirtualGroup(ranks, target="sm90", num_gpus=gpus)
        self.opened = megamoe.get_symm_buffer_for_mega_moe(
            group, experts, capacity, topk, *shape, timeout_s=timeout_s, pool_rows=pool_rows, max_ctas=max_ctas,
            l2_sf_granularity=granularity,
        )  # fmt: skip
        self.config: MegaMoEConfig = self.opened.config
        self.ranks = self.opened.ranks
        self.weights = [make_weights(self.config, b.rank, "normal", b.device) for b in self.ranks]
        self.y: list[Tensor] = []
        self.settle()

    def settle(self) -> None:
        for device in {b.device for b in self.ranks}:
            torch.cuda.synchronize(device)

    def tokens(self, name: object, counts: Sequence[int], **options: Any) -> list[Tokens]:
        return make_tokens(Workload(str(name), self.config, tuple(counts), **options))

    def fill(self, tokens: Sequence[Tokens]) -> None:
        for buffer, given in zip(self.ranks, tokens, strict=True):
            buffer.fill(*(part.to(buffer.device) for part in (given.x, given.topk_idx, given.topk_weights)))

    def outputs(self, rows: Sequence[int]) -> list[Tensor]:
        return [
            torch.full((n, self.config.hidden), torch.nan, dtype=torch.bfloat16, device=b.device)
            for b, n in zip(self.ranks, rows, strict=True)
        ]

    def launch(self, y: Sequence[Tensor], only: Sequence[int] | None = None, **options: Any) -> None:
        for rank in range(len(self.ranks)) if only is None else only:
            megamoe.fp8_mega_moe(y[rank], *self.weights[rank], self.ranks[rank], **options)

    def run(self, tokens: Sequence[Tokens]) -> list[Tensor]:
        self.fill(tokens)
        y = self.outputs([given.num_tokens for given in tokens])
        self.launch(y)
        self.opened.check()
        return y

    def expected(self, tokens: Sequence[Tokens]) -> list[Tensor]:
        inputs = [
            RankInputs(*(part.to(b.device) for part in (q.x, q.x_sf, q.topk_idx, q.topk_weights)))
            for b, q in zip(self.ranks, (given.quantised() for given in tokens), strict=True)
        ]
        return moe_layer(self.config, inputs, self.weights)

    def right(self, tokens: Sequence[Tokens], y: Sequence[Tensor]) -> str:
        """Nothing, or what is wrong by the bound of y."""
        outcomes = [compare("y", a, e) for a, e in zip(y, self.expected(tokens), strict=True)]
        return "; ".join(outcome.message for outcome in outcomes if not outcome.ok)

    def fault_of(self, rank: int | None = None) -> MegaMoEFault | None:
        try:
            (self.opened if rank is None else self.ranks[rank]).check()
        except MegaMoEFault as fault:
            return fault
        return None

    def close(self) -> None:
        self.opened.close()


def copies(weights: tuple[L1Weights, L2Weights]) -> tuple[L1Weights, L2Weights]:
    """The same weights at other addresses."""
    l1, l2 = weights
    return L1Weights(*(part.clone() for part in l1)), L2Weights(*(part.clone() for part in l2))


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


# --- fill ----------------------------------------------------------------------------------------------------------


def check_fill() -> None:
    """The fill launch against megamoe/quant.py on the CPU, bit for bit, with every kind of value."""
    draw = torch.Generator().manual_seed(1)
    for hidden in (640, 1024, 7168):
        layer = Layer(1, shape=(hidden, 128), experts=8, topk=4, capacity=130)
        buffer = layer.ranks[0]
        for rows in (1, 7, 130):
            x = torch.randn(rows, hidden, generator=draw) * torch.exp2(
                torch.randint(-30, 30, (rows, 1), generator=draw)
            )
            x[0, :128] = 0.0
            x[0, 128] = -0.0
            if rows > 5:
                x[1, 3], x[2, 4], x[3, 5] = torch.nan, torch.inf, -torch.inf
                x[4, :128] = torch.nan
                x[5] = 1e-30
            for dtype in (torch.bfloat16, torch.float32):
                for ids in (torch.int32, torch.int64):
                    for ue8m0 in (False, True):
                        given = x.to(dtype)
                        idx = torch.randint(-2, 9, (rows, 4), generator=draw).to(ids)
                        weights = torch.rand(rows, 4, generator=draw)
                        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                            view = buffer.view(name)
                            view.view({1: torch.uint8, 4: torch.int32, 8: torch.int64}[view.element_size()]).fill_(7)
                        buffer.fill(given.cuda(), idx.cuda(), weights.cuda(), routed_scaling_factor=2.5, ue8m0=ue8m0)
                        q, sf = quantize_activations(given, ue8m0=ue8m0)
                        good = same_bits(buffer.x[:rows].cpu(), q)
                        good &= same_bits(buffer.x_sf[:rows].cpu().contiguous(), sf)
                        good &= torch.equal(buffer.topk_idx[:rows].cpu(), idx.long())
                        good &= same_bits(buffer.topk_weights[:rows].cpu(), weights * 2.5)
                        good &= bool((buffer.x[rows:].view(torch.uint8) == 7).all())
                        good &= bool((buffer.topk_idx[rows:] == 7).all())
                        if not good:
                            claim(False, f"fill hidden {hidden} rows {rows} {dtype} {ids} ue8m0 {ue8m0}")
        wide = torch.randn(9, 2 * hidden, generator=draw).bfloat16().cuda()
        idx, weights = torch.zeros(9, 4, dtype=torch.int64).cuda(), torch.ones(9, 4).cuda()
        for view in (wide[:, :hidden], wide[:, 1 : hidden + 1], wide.reshape(-1)[1 : 1 + 9 * hidden].view(9, hidden)):
            buffer.fill(view, idx, weights)
            q, sf = quantize_activations(view.cpu())
            good = same_bits(buffer.x[:9].cpu(), q) and same_bits(buffer.x_sf[:9].cpu().contiguous(), sf)
            claim(good, f"fill hidden {hidden} of rows with strides {view.stride()} from {view.data_ptr() % 16}")
        layer.close()
    claim(not _wrong, "fill equals quantize_activations bit for bit")


# --- graphs, streams, buffers, weights -----------------------------------------------------------------------------


def check_graphs() -> None:
    """Capture and replay with other tokens, routes and counts; fill captured too; weights that come in the capture."""
    for ranks in (1, 2, 8):
        layer = Layer(ranks)
        capacity = layer.config.num_max_tokens_per_rank
        counts = [torch.zeros(1, dtype=torch.int32, device=b.device) for b in layer.ranks]
        y = layer.outputs([capacity] * ranks)
        sets = [
            layer.tokens(f"graph {i}", [(37 * (i + 1) * (rank + 3)) % (capacity + 1) for rank in range(ranks)])
            for i in range(6)
        ]
        eager = [layer.run(tokens) for tokens in sets]
        # Weights at addresses that no launch had yet: their tensor maps are made while the graph is captured.
        layer.weights = [copies(pair) for pair in layer.weights]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for rank, buffer in enumerate(layer.ranks):
                megamoe.fp8_mega_moe(y[rank], *layer.weights[rank], buffer, num_tokens=counts[rank])
        good = True
        for index in (0, 3, 1, 5, 2, 4, 0):
            layer.fill(sets[index])
            for rank, given in enumerate(sets[index]):
                counts[rank].fill_(given.num_tokens)
                y[rank].fill_(torch.nan)
            graph.replay()
            layer.opened.check()
            good &= equal([a[: len(e)] for a, e in zip(y, eager[index], strict=True)], eager[index])
            good &= all(bool(a[len(e) :].isnan().all()) for a, e in zip(y, eager[index], strict=True))
        claim(good, f"{ranks} ranks: 7 replays with other tokens, routes and counts equal eager launches bit for bit")
        for pair in layer.weights:  # in place
            pair[1].weight.view(torch.uint8).bitwise_xor_(0x80)
        graph.replay()
        layer.opened.check()
        changed = [torch.where(e == 0, e, -e) for e in eager[0]]
        good = all(torch.equal(a[: len(e)], e) for a, e in zip(y, changed, strict=True))
        claim(good, f"{ranks} ranks: a replay after the weights changed in place has their answer")
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer.opened.check()
            claim(False, "check() while a graph is captured was not refused")
        except ValueError as error:
            claim("captured" in str(error), f"check() in a capture: {error}")
        layer.close()
    layer = Layer(1)
    buffer = layer.ranks[0]
    module = MegaMoE(layer.weights[0], buffer, routed_scaling_factor=1.5)
    draw = [part.cuda() for part in vars(layer.tokens("module", [64])[0]).values()]
    static = [part.clone() for part in draw]
    expected = module(*draw).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(*static)
    other = [part.cuda() for part in vars(layer.tokens("module, other", [64])[0]).values()]
    expected_other = module(*other).clone()
    for source, wanted in ((draw, expected), (other, expected_other)):
        for to, part in zip(static, source, strict=True):
            to.copy_(part)
        graph.replay()
        buffer.check()
        claim(same_bits(y, wanted), "a captured module (fill and layer) replays as it runs")
    layer.close()


def check_several() -> None:
    """Several configs, buffers and streams at once; weights that move; dummy runs; a warm-up."""
    layers = [
        Layer(1, shape=(640, 384), max_ctas=40),
        Layer(1, shape=(1024, 512), max_ctas=40, granularity=64),
        Layer(2, shape=(1024, 256), max_ctas=20),
    ]
    for layer in layers:
        megamoe.warmup(layer.opened)
    sets = [layer.tokens(f"several {i}", [40 + 9 * i] * len(layer.ranks)) for i, layer in enumerate(layers)]
    alone = [layer.run(tokens) for layer, tokens in zip(layers, sets, strict=True)]
    for layer, tokens, y in zip(layers, sets, alone, strict=True):
        claim(not layer.right(tokens, y), f"{layer.config.hidden}/{layer.config.intermediate_hidden}: right alone")
    streams = [torch.cuda.Stream() for _ in layers]
    good = True
    for _ in range(50):
        together = []
        for layer, tokens, stream in zip(layers, sets, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                layer.fill(tokens)
                together.append(layer.outputs([given.num_tokens for given in tokens]))
                layer.launch(together[-1])
        for layer in layers:
            layer.opened.check()
        good &= all(equal(a, b) for a, b in zip(together, alone, strict=True))
    claim(good, "three buffers on three streams, 50 times: the answers they have alone")
    layer, tokens = layers[1], sets[1]
    good, kept = True, []
    for _ in range(80):  # more than one chunk of tensor maps
        kept.append(layer.weights[0])
        layer.weights[0] = copies(layer.weights[0])
        good &= equal(layer.run(tokens), alone[1])
    claim(good, "weights at 80 addresses: the same answer")
    layer = layers[2]
    tokens = [sets[2][0], sets[2][1].rows(slice(0))]
    layer.fill(tokens)
    y = layer.outputs([tokens[0].num_tokens, 0])
    megamoe.fp8_mega_moe(y[0], *layer.weights[0], layer.ranks[0])
    megamoe.dummy_run(*layer.weights[1], layer.ranks[1])
    layer.opened.check()
    claim(not layer.right(tokens, y), "an idle rank takes part by dummy_run")
    for layer in layers:
        layer.close()


def check_host_cost() -> None:
    """Microseconds that a call costs the host, once warm; the launches behind it are short."""
    for what, layer in (("1 rank", Layer(1, shape=(256, 128), experts=2, topk=1)),):
        tokens = layer.tokens("cost", [1])
        layer.fill(tokens)
        y = layer.outputs([1])
        call, buffer, weights = megamoe.fp8_mega_moe, layer.ranks[0], layer.weights[0]
        times = []
        for _ in range(30):
            begun = time.perf_counter()
            for _ in range(20):  # fewer than the queue of the driver holds: no call waits
                call(y[0], *weights, buffer)
            times.append((time.perf_counter() - begun) / 20 * 1e6)
            layer.opened.check()
        times.sort()
        claim(times[len(times) // 2] <= 25, f"{what}: a call costs the host {times[len(times) // 2]:.1f} us (median)")
        given = [part.cuda() for part in vars(tokens[0]).values()]
        begun = time.perf_counter()
        for _ in range(200):
            buffer.fill(*given)
        print(f"       fill costs the host {(time.perf_counter() - begun) / 200 * 1e6:.1f} us", flush=True)
        layer.close()


# --- faults --------------------------------------------------------------------------------------------------------


def two_ranks(**options: Any) -> Layer:
    """On two GPUs where there are two, so that each rank is launched for itself."""
    return Layer(2, min(2, torch.cuda.device_count()), **options)


def check_after(layer: Layer, tokens: Sequence[Tokens], before: Sequence[Tensor], what: str) -> None:
    claim(equal(layer.run(tokens), before), f"{what}: afterwards the same answer as before")


def check_faults() -> None:
    layer = two_ranks(timeout_s=3.0, max_ctas=60)  # so that two launches fit beside each other
    tokens = layer.tokens("faults", [40, 60])
    before = layer.run(tokens)
    claim(not layer.right(tokens, before), "right before any fault")

    layer.fill(tokens)
    y = layer.outputs([40, 60])
    begun = time.monotonic()
    layer.launch(y, [0])
    if torch.cuda.device_count() > 1:  # two grids: rank 1 comes late
        time.sleep(2.0)
        layer.launch(y, [1])
        fault = layer.fault_of()
        claim(fault is None and equal(y, before), f"a rank 2 s late: no fault and the same answer ({fault})")
        layer.fill(tokens)
        begun = time.monotonic()
        y = layer.outputs([40, 60])
        layer.launch(y, [0])
    fault = layer.fault_of(0)
    seconds = time.monotonic() - begun
    words = "waited 3.0 s for rank 1 to publish its routes"
    claim(fault is not None and words in str(fault), f"an absent rank, after {seconds:.1f} s: {str(fault)[:220]}")
    claim(bool(y[0].isnan().all()), "y of the rank that waited is NaN")
    y2 = layer.outputs([40, 60])
    begun = time.monotonic()
    layer.launch(y2)
    fault = layer.fault_of()
    claim(fault is not None and time.monotonic() - begun < 1.5, "a launch on the aborted group ends at once")
    layer.opened.reset()
    check_after(layer, tokens, before, "absent rank, reset")

    bad = [tokens[0], Tokens(tokens[1].x, tokens[1].topk_idx.clone(), tokens[1].topk_weights)]
    bad[1].topk_idx[7, 1] = layer.config.num_experts + 5
    layer.fill(bad)
    y = layer.outputs([40, 60])
    layer.launch(y)
    fault = layer.fault_of(1)
    claim(layer.fault_of(0) is None, "id >= E on rank 1: rank 0 notices nothing")
    named = f"rank 1: token 7 slot 1 of epoch {layer.ranks[1].epoch} names expert {layer.config.num_experts + 5}"
    claim(fault is not None and named in str(fault), f"id >= E: {fault}")
    claim(bool(y[1][7].isnan().all()) and int(y[1].isnan().any(dim=1).sum()) == 1, "that token's row alone is NaN")
    check_after(layer, tokens, before, "id >= E")

    second = torch.cuda.Stream(layer.ranks[0].device)
    layer.fill(tokens)
    layer.settle()
    y = layer.outputs([40, 60])
    late = layer.outputs([40, 60])
    layer.settle()
    if torch.cuda.device_count() > 1:
        layer.launch(y, [0])  # waits for rank 1
        time.sleep(0.2)
        megamoe.launch_mega_moe(late[0], *layer.weights[0], layer.ranks[0], stream=second)
        second.synchronize()
        with torch.cuda.stream(second):  # the current stream is behind the launch that waits
            claim(bool(late[0].isnan().all()), "a second launch on a buffer in use ends at once with NaN")
        layer.launch(y, [1])
        fault = layer.fault_of()
        claim(fault is not None and "in use by epoch" in str(fault), f"buffer in use: {fault}")
        claim(equal(y, before), "the first launch is right all the same")
        check_after(layer, tokens, before, "buffer in use")
    layer.close()

    small = two_ranks(timeout_s=3.0, pool_rows=1024)
    tokens = small.tokens("overflow", [250, 250], routing="one_expert")
    small.fill(tokens)
    y = small.outputs([250, 250])
    small.launch(y)
    fault = small.fault_of()
    kinds = {record.kind for record in fault.faults} if fault else set()
    claim(FaultKind.OVERFLOW in kinds and "pool_rows" in str(fault), f"pool_rows too small: {str(fault)[:200]}")
    claim(all(bool(part.isnan().all()) for part in y), "y is NaN on every rank")
    small.opened.reset()
    few = small.tokens("fits", [5, 5])
    claim(not small.right(few, small.run(few)), "after a reset a launch that fits is right")
    small.close()


def check_replay_faults() -> None:
    """The same behind graph replays: seen by the host-mapped word."""
    layer = Layer(1, timeout_s=3.0)
    tokens = layer.tokens("replay", [64])
    before = layer.run(tokens)
    y = layer.outputs([64])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(y)
    for slot in (0, 3):
        bad = Tokens(tokens[0].x, tokens[0].topk_idx.clone(), tokens[0].topk_weights)
        bad.topk_idx[9, slot] = layer.config.num_experts
        layer.fill([bad])
        graph.replay()
        fault = layer.fault_of()
        claim(fault is not None and f"token 9 slot {slot}" in str(fault), f"id >= E in a replay: {fault}")
        claim(bool(y[0][9].isnan().all()) and int(y[0].isnan().any(dim=1).sum()) == 1, "that token's row alone is NaN")
    layer.fill(tokens)
    graph.replay()
    claim(layer.fault_of() is None and equal(y, before), "the next replay is right")
    layer.close()
    if torch.cuda.device_count() < 2:
        return
    layer = two_ranks(timeout_s=2.0)
    tokens = layer.tokens("replay", [30, 30])
    before = layer.run(tokens)
    y = layer.outputs([30, 30])
    graphs = []
    for rank in (0, 1):
        with torch.cuda.device(rank):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=torch.cuda.Stream()):
                layer.launch(y, [rank])
    layer.fill(tokens)
    layer.settle()
    graphs[0].replay()
    fault = layer.fault_of(0)
    claim(fault is not None and "waited 2.0 s for rank 1" in str(fault), f"absent rank in a replay: {str(fault)[:160]}")
    claim(bool(y[0].isnan().all()), "y is NaN")
    layer.opened.reset()
    layer.fill(tokens)
    layer.settle()
    for graph in graphs:
        graph.replay()
    claim(layer.fault_of() is None and equal(y, before), "after a reset the same graphs replay right")
    layer.close()


# --- progress and stability ----------------------------------------------------------------------------------------


def hold_sms(ctas: int, seconds: float, stream: torch.cuda.Stream) -> Tensor:
    """Start a kernel that holds so many SMs; returns once all of its CTAs run."""
    cubin = compile_cubin("hold", Path(__file__).resolve().parent / "hold.cu")
    sm90.SHARED_BYTES["hold"] = 200 * 1024
    kernel = sm90.Module(cubin, [0]).kernels["hold"][0]
    started = torch.zeros(1, dtype=torch.int32, device="cuda:0")
    torch.cuda.synchronize()
    kernel.launch(ctas, 32, [ctypes.c_uint64(int(seconds * 1e9)), ctypes.c_uint64(started.data_ptr())], stream)
    reader = torch.cuda.Stream()
    with torch.cuda.stream(reader):
        while int(started.item()) < ctas:
            time.sleep(0.001)
    return started


def check_foreign() -> None:
    """A kernel that holds 100 of 132 SMs for 2 s beside a launch; grids of one CTA a rank."""
    for ranks in (1, 2, 8):
        layer = Layer(ranks, timeout_s=20.0)
        tokens = layer.tokens("foreign", [200] * ranks)
        before = layer.run(tokens)
        claim(not layer.right(tokens, before), f"{ranks} ranks: right alone")
        layer.fill(tokens)
        y = layer.outputs([200] * ranks)
        layer.settle()
        side = torch.cuda.Stream()
        begun = time.monotonic()
        started = hold_sms(100, 2.0, side)
        launched = time.monotonic()
        layer.launch(y)
        fault = layer.fault_of()
        ended = time.monotonic()
        held = not side.query()
        claim(fault is None and equal(y, before), f"{ranks} ranks beside 100 held SMs: right ({fault})")
        print(
            f"       launched {launched - begun:.2f} s after, ended {ended - launched:.3f} s later, the foreign kernel "
            f"{'still ran' if held else 'had ended'} ({int(started.item())} CTAs)",
            flush=True,
        )
        side.synchronize()
        layer.close()
    for ranks, ctas in ((1, 1), (2, 1), (8, 1), (8, 3)):
        layer = Layer(ranks, timeout_s=20.0, max_ctas=ctas)
        tokens = layer.tokens("foreign", [200] * ranks)
        claim(not layer.right(tokens, layer.run(tokens)), f"{ranks} ranks of {ctas} CTAs: right")
        layer.close()


def check_rerun() -> None:
    """200 launches with changing routing and counts, each equal to its rerun; and to one over other ranks."""
    gpus = min(2, torch.cuda.device_count())
    for ranks, over in ((1, 1), (2, gpus), (8, gpus)):
        layer = Layer(ranks, over, capacity=512)
        draw = torch.Generator().manual_seed(ranks)
        different = 0
        routings = ("random", "one_expert", "duplicate")
        for launch in range(200):
            counts = torch.randint(0, 513 if launch % 10 == 0 else 65, (ranks,), generator=draw).tolist()
            masked = (0.0, 0.3)[launch % 2]
            tokens = layer.tokens(f"rerun {launch}", counts, routing=routings[launch % 3], masked=masked)
            first = layer.run(tokens)
            different += not equal(first, layer.run(tokens))
            if launch % 40 == 0 and (message := layer.right(tokens, first)):
                claim(False, f"{ranks} ranks, launch {launch}: {message}")
        claim(different == 0, f"{ranks} ranks on {over} GPUs: 200 launches, {different} differ from their rerun")
        layer.close()
    answers = {}
    for ranks, over in ((1, 1), (2, 1), (2, gpus), (8, 1), (8, gpus)):
        layer = Layer(ranks, over, shape=(7168, 2048), experts=8, topk=4, capacity=512)
        whole = make_tokens(Workload("worlds", _one_rank(layer.config), (512,)))[0]
        tokens = [whole.rows(slice(r * 512 // ranks, (r + 1) * 512 // ranks)) for r in range(ranks)]
        answers[ranks, over] = torch.cat([part.cpu() for part in layer.run(tokens)])
        layer.close()
    base = answers[1, 1]
    for key, y in answers.items():
        claim(same_bits(y, base), f"7168/2048: {key[0]} ranks on {key[1]} GPUs answer as one rank, bit for bit")


def _one_rank(config: MegaMoEConfig) -> MegaMoEConfig:
    block_m, l1_block_n, l2_block_n = TILES["sm90"][0]
    return MegaMoEConfig(
        1, config.num_experts, config.num_topk, config.hidden, config.intermediate_hidden, 512,
        block_m=block_m, l1_block_n=l1_block_n, l2_block_n=l2_block_n,
    )  # fmt: skip


def check_litmus(launches: int = 10_000) -> None:
    """Small launches at full speed over NVLink, every row of every one compared, with the kernel as it is."""
    _litmus(launches, "as it is", must_be_right=True)


@contextmanager
def in_sm90(name: str, stand_in: object) -> Iterator[None]:
    """Another value for a name of the target's module, and kernels built anew."""
    before = getattr(sm90, name)
    setattr(sm90, name, stand_in)
    sm90._fused_module.cache_clear()
    try:
        yield
    finally:
        setattr(sm90, name, before)


def check_litmus_broken(launches: int = 10_000) -> None:
    """The same without ``fence.proxy.async.global``, and without the release of the tile counter: does it show?"""
    folder = Path(tempfile.mkdtemp()) / "csrc"
    shutil.copytree(csrc_dir(), folder)
    primitives = folder / "protocol" / "primitives.hpp"
    text = primitives.read_text()
    fence = 'asm volatile("fence.proxy.async.global;" ::: "memory");'
    assert text.count(fence) == 1
    primitives.write_text(text.replace(fence, ""))
    with in_sm90("csrc_dir", lambda: folder):
        _litmus(launches, "without fence.proxy.async.global", must_be_right=False)
    for mutation in ("relaxed_tile_counter", "relaxed_arrival"):
        options = (f"-DMEGAMOE_MUTATION={mutation}",)
        with in_sm90("extra_options", partial(tuple, options)):
            _litmus(launches, f"mutation {mutation}", must_be_right=False)


def _litmus(launches: int, what: str, *, must_be_right: bool) -> None:
    gpus = min(2, torch.cuda.device_count())
    layer = Layer(2, gpus, shape=(1024, 256), experts=8, topk=4, capacity=64, timeout_s=2.0)
    sets = [layer.tokens(f"litmus {i}", [(11 * i) % 40 + 8, (17 * i) % 40 + 8]) for i in range(8)]
    expected = [layer.run(tokens) for tokens in sets]
    if must_be_right:
        claim(all(not layer.right(t, y) for t, y in zip(sets, expected, strict=True)), f"litmus {what}: right first")
    placed = [
        [[part.to(b.device) for part in vars(given).values()] for b, given in zip(layer.ranks, tokens, strict=True)]
        for tokens in sets
    ]
    y = [layer.outputs([given.num_tokens for given in tokens]) for tokens in sets]
    wrong = [torch.zeros(1, dtype=torch.int64, device=b.device) for b in layer.ranks]
    layer.settle()
    begun = time.monotonic()
    fault: MegaMoEFault | None = None
    done = 0
    for launch in range(launches):
        index = launch * 5 % len(sets) if launch % 3 else launch % len(sets)
        for rank, buffer in enumerate(layer.ranks):
            with torch.cuda.device(buffer.device):
                buffer.fill(*placed[index][rank])
        layer.launch(y[index])
        for rank in range(2):
            with torch.cuda.device(layer.ranks[rank].device):
                differs = y[index][rank].view(torch.int32) != expected[index][rank].view(torch.int32)
                wrong[rank] += differs.any(dim=1).sum()
        done += 1
        if launch % 500 == 499 and (fault := layer.fault_of()):
            break
    fault = fault or layer.fault_of()
    rows = sum(int(count.item()) for count in wrong)
    seconds = time.monotonic() - begun
    words = f"litmus {what}: {done} launches in {seconds:.1f} s, {rows} wrong rows, fault: {str(fault)[:90]}"
    if must_be_right:
        claim(rows == 0 and fault is None, words)
    else:
        print(f"{'seen ' if rows or fault else 'NOT SEEN'}  {words}", flush=True)
    layer.close()


CHECKS: dict[str, Callable[[], None]] = {
    "fill": check_fill,
    "graphs": check_graphs,
    "several": check_several,
    "host_cost": check_host_cost,
    "faults": check_faults,
    "replay_faults": check_replay_faults,
    "foreign": check_foreign,
    "rerun": check_rerun,
    "litmus": check_litmus,
    "litmus_broken": check_litmus_broken,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", choices=list(CHECKS))
    for name in parser.parse_args().checks:
        begun = time.monotonic()
        print(f"== {name}", flush=True)
        CHECKS[name]()
        print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)
    return 1 if _wrong else 0


if __name__ == "__main__":
    sys.exit(main())
