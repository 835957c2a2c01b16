"""What target sm90 must do beyond the phases, on real GPUs: one check a name, each in a process of its own.

    PYTHONPATH=. python3 tests/device/more_checks.py fill graphs several host_cost host_views faults foreign

Prints ``ok`` or ``WRONG`` with what was seen for every claim; the exit code is 1 if any was wrong.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megamoe
from megamoe import MegaMoE, Stage
from megamoe.faults import FaultKind
from megamoe.jit import compile_cubin
from megamoe.quant import quantize_activations
from megamoe.reference import as_bits, dispatch
from megamoe.targets import sm90
from phases.support.device_checks import Layer, claim, copies, equal, nothing_wrong, run_checks, same_bits
from phases.support.inputs import Tokens

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
    claim(nothing_wrong(), "fill equals quantize_activations bit for bit")


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
        layer.claim_right(tokens, y, f"{layer.config.hidden}/{layer.config.intermediate_hidden}: right alone")
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
    layer.claim_right(tokens, y, "an idle rank takes part by dummy_run")
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


# --- beside the host target ----------------------------------------------------------------------------------------


POOL_VIEWS = ("l1_acts", "l1_acts_sf", "l1_topk_weights", "token_src_metadata")
TOKEN_VIEWS = ("x", "x_sf", "topk_idx", "topk_weights")
WHOLE_VIEWS = ("expert_recv_count_sum", "l1_arrival_count", "l2_arrival_mask")


def check_host_views() -> None:
    """The same tokens on both targets in one process: what numerics.md calls exact is equal bit for bit."""
    gpus = min(2, torch.cuda.device_count())
    for ranks, over, shape, counts in (
        (1, 1, (640, 384), [200]),
        (2, gpus, (640, 384), [130, 1]),
        (8, gpus, (640, 384), [0, 192, 1, 48, 8, 0, 17, 3]),
        (2, gpus, (7168, 2048), [12, 3]),
    ):
        options: dict[str, Any] = {"shape": shape, "experts": 8, "topk": 3, "timeout_s": 20.0}
        layers = [Layer(ranks, over, **options), Layer(ranks, target="host", **options)]
        assert layers[0].config == layers[1].config
        tokens = layers[0].tokens("host views", counts, masked=0.1)
        for layer in layers:
            layer.fill(tokens)
            for rank, y in enumerate(layer.outputs(counts)):
                megamoe.launch_mega_moe(y, *layer.weights[rank], layer.ranks[rank], stage=Stage.L1_EPILOGUE)
            layer.opened.check()
        different, compared = _different_views(layers, tokens)
        words = f"{ranks} ranks on {over} GPUs, {shape[0]}/{shape[1]}: {compared} bytes of views equal the host's"
        claim(not different and compared > 0, f"{words}{', but not: ' * bool(different)}{', '.join(different)}")
        for layer in layers:
            layer.close()


def _different_views(layers: Sequence[Layer], tokens: Sequence[Tokens]) -> tuple[list[str], int]:
    """What differs between two targets, and the number of bytes that were compared."""
    inputs = [given.quantised() for given in tokens]
    different, compared = [], 0
    for rank, given in enumerate(tokens):
        rows = dispatch(layers[0].config, inputs, rank).rows
        buffers = [layer.ranks[rank] for layer in layers]
        for name in (*TOKEN_VIEWS, *POOL_VIEWS, *WHOLE_VIEWS):
            parts = []
            for buffer in buffers:
                view = as_bits(buffer.view(name)).cpu()
                whole = view[: given.num_tokens] if name in TOKEN_VIEWS else view
                parts.append((whole[rows] if name in POOL_VIEWS else whole).contiguous())
            compared += parts[0].numel() * parts[0].element_size()
            if not torch.equal(*parts):
                different.append(f"{name} of rank {rank}")
    return different, compared


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
    layer.claim_right(tokens, before, "right before any fault")

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
    small.claim_right(few, small.run(few), "after a reset a launch that fits is right")
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
        layer.claim_right(tokens, before, f"{ranks} ranks: right alone")
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
        layer.claim_right(tokens, layer.run(tokens), f"{ranks} ranks of {ctas} CTAs: right")
        layer.close()


CHECKS: dict[str, Callable[[], None]] = {
    "fill": check_fill,
    "graphs": check_graphs,
    "several": check_several,
    "host_cost": check_host_cost,
    "host_views": check_host_views,
    "faults": check_faults,
    "replay_faults": check_replay_faults,
    "foreign": check_foreign,
}


if __name__ == "__main__":
    sys.exit(run_checks(__doc__, CHECKS))
