"""What the layer is benchmarked beside, without a GPU: the baseline's data movement, and the adapter of deep_gemm."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from bench import baseline, moe, peers
from bench.builds import build_variants
from bench.inputs import draw_inputs, random_weights
from tests.bench_worlds import CPU, SMALL, HostWorld, baseline_error, grouped_on_cpu


def test_rows_are_placed_by_expert() -> None:
    counts = torch.tensor([[2, 0, 1], [0, 3, 20]])  # [source, expert]
    placement = baseline.place_rows(counts, 26)
    assert placement.offsets.tolist() == [16, 32, 64]
    assert placement.place[:3].tolist() == [0, 1, 32]
    assert placement.place[3:6].tolist() == [16, 17, 18]
    assert placement.place[6:].tolist() == list(range(33, 53))


def test_nothing_received_places_nothing() -> None:
    placement = baseline.place_rows(torch.zeros(2, 3, dtype=torch.int64), 0)
    assert placement.place.numel() == 0
    assert placement.offsets.tolist() == [0, 0, 0]


def test_rows_are_quantised_with_one_scale() -> None:
    values = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    values[3] = 0
    q, sf = baseline.quantize_rows(values)
    assert q.dtype == torch.float8_e4m3fn
    assert sf.shape == (5,)
    assert float(q.float().abs().max()) == 448
    assert float((q.float() * sf[:, None] - values).norm() / values.norm()) < 0.03


@pytest.mark.parametrize("tokens", [1, 40])
def test_baseline_computes_the_layer(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "_grouped", grouped_on_cpu)
    error = baseline_error(HostWorld(1), SMALL, 5, tokens, "balanced")
    assert 1e-4 < error < baseline.TorchBaseline.tolerance


def test_baseline_exchanges_over_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.bench_worlds"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert ran.stdout.count("e-02") == 3


def test_baseline_needs_processes() -> None:
    assert baseline.missing_baseline(HostWorld(1)) is None
    assert "torchrun" in str(baseline.missing_baseline(HostWorld(2)))


class ProcessLike(HostWorld):
    kind = "process"


def _fake_deep_gemm(calls: list[str], bounded: bool = False) -> types.ModuleType:
    """The Python API of sgl-deep-gemm 0.1.5 as far as the adapter uses it, or of 0.2.5, which has a bound on the tokens
    of a call; buffers are padded as theirs are."""
    module = types.ModuleType("deep_gemm")

    class Buffer:
        def __init__(self, tokens: int, topk: int, hidden: int) -> None:
            padded = -(-tokens // 8) * 8
            self.x = torch.zeros(padded, hidden, dtype=torch.uint8).view(torch.float8_e4m3fn)
            self.x_sf = torch.zeros(padded, hidden // 128)
            self.topk_idx = torch.full((padded, topk), -1)
            self.topk_weights = torch.zeros(padded, topk)

        def destroy(self) -> None:
            calls.append("destroy")

    def get_buffer(group: object, experts: int, tokens: int, topk: int, hidden: int, intermediate: int) -> Buffer:
        calls.append(f"buffer {experts} {tokens} {topk} {hidden} {intermediate}")
        return Buffer(tokens, topk, hidden)

    def call(y: torch.Tensor, l1: object, l2: object, buffer: Buffer) -> None:
        calls.append("call")
        y.copy_(buffer.x[: y.shape[0]].float())

    def bounded_call(
        y: torch.Tensor, l1: object, l2: object, buffer: Buffer, num_tokens_bound: int | None = None
    ) -> None:
        calls.append(f"at most {num_tokens_bound}")
        call(y, l1, l2, buffer)

    module.get_symm_buffer_for_sm90_mega_moe = get_buffer  # type: ignore[attr-defined]
    module.transform_weights_for_mega_moe_sm90 = lambda l1, l2: (l1, l2)  # type: ignore[attr-defined]
    module.fp8_mega_moe = bounded_call if bounded else call  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("bounded", [False, True])
def test_deep_gemm_is_driven_by_its_api(monkeypatch: pytest.MonkeyPatch, bounded: bool) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "deep_gemm", _fake_deep_gemm(calls, bounded))
    world = ProcessLike(1)
    module, reason = peers.find_deep_gemm(world)
    assert reason is None
    peer = peers.DeepGemm(module, world, SMALL, 4, {0: random_weights(SMALL, 4, CPU, seed=1)})
    for tokens in (3, 9):
        sets = [draw_inputs(world, SMALL, 4, tokens, "balanced", seed=seed) for seed in (1, 2)]
        peer.use(sets)
        peer.load(1)
        peer.call()
        peer.check()
        assert torch.equal(peer.answer()[0].float(), sets[1].tokens[0].x.float())
    peer.close()
    told = {tokens: [f"at most {tokens}"] * bounded for tokens in (3, 9)}
    first, second = ([f"buffer 4 {tokens} 2 256 128", *told[tokens], "call", "destroy"] for tokens in (3, 9))
    assert calls == first + second


def test_a_deep_gemm_that_cannot_take_the_weights_is_a_skipped_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(l1: object, l2: object) -> None:
        raise AssertionError("unsupported architecture")

    module = _fake_deep_gemm([])
    module.transform_weights_for_mega_moe_sm90 = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setattr(moe, "Timer", lambda world: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    bench = moe.Bench(moe.parse(["--beside", "deep_gemm", "--out", str(tmp_path)]), ProcessLike(1))
    present: list[moe.Layer] = []
    absent: list[moe.Absent] = []
    bench._add_others(SMALL, {0: random_weights(SMALL, 32, CPU, seed=1)}, present, absent)
    assert present == []
    assert [one.reason for one in absent] == ["FAILED: AssertionError: unsupported architecture"]


def test_why_there_is_no_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "process group" in str(peers.find_deep_gemm(HostWorld(1))[1])
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    assert "import deep_gemm" in str(peers.find_deep_gemm(ProcessLike(1))[1])
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    assert "has no fp8_mega_moe" in str(peers.find_deep_gemm(ProcessLike(1))[1])


def test_a_variant_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="does not compile"):
        build_variants(["--no-such-option"], 1, ["fp32"])
