"""Bad calls: the message names the argument, what came and what was expected, and nothing was launched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import megamoe
from megamoe import DebugWindow, L1Weights, L2Weights, MegaMoEFault, SymmBuffer, VirtualGroup, VirtualSymmBuffer
from megamoe.quant import quantize_weights
from megamoe.targets import get_target
from megamoe.targets.host import HostStream
from tests.layers import draw_batches, draw_weights, open_buffer, small_config

CONFIG = small_config(2)
TOKENS = 5


@pytest.fixture
def buffers() -> Iterator[VirtualSymmBuffer]:
    opened = open_buffer(VirtualGroup(2), CONFIG, timeout_s=0.5)
    yield opened
    opened.close()


@pytest.fixture
def buffer(buffers: VirtualSymmBuffer) -> SymmBuffer:
    return buffers.ranks[0]


def good_call(**changes: Any) -> dict[str, Any]:
    l1, l2 = draw_weights(CONFIG)[0]
    y = torch.full((TOKENS, CONFIG.hidden), 7.0, dtype=torch.bfloat16)
    return {"y": y, "l1_weights": l1, "l2_weights": l2, **changes}


def refused(buffer: Any, words: tuple[str, ...], **changes: Any) -> None:
    """The call raises ValueError with these words, launches nothing and leaves y as it was."""
    call = good_call(**changes)
    open_one = buffer if isinstance(buffer, SymmBuffer) and not buffer._closed else None
    epoch = open_one.epoch if open_one else 0
    with pytest.raises(ValueError) as error:
        megamoe.launch_mega_moe(sym_buffer=buffer, **call)
    for word in words:
        assert word in str(error.value)
    if open_one:
        assert open_one._rank.stream.last_ticket == 0
        open_one.check()
        assert open_one.epoch == epoch
    y = call["y"]
    if isinstance(y, Tensor) and y.device.type == "cpu" and y.dtype == torch.bfloat16:
        assert bool((y == 7.0).all())


def sevens(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    return torch.full(shape, 7.0, dtype=dtype, device=device)


def test_the_good_call_is_good(buffers: VirtualSymmBuffer) -> None:
    """Otherwise the refusals below might have another reason."""
    for buffer in buffers.ranks:
        megamoe.launch_mega_moe(sym_buffer=buffer, **good_call())
    buffers.check()
    assert [buffer.epoch for buffer in buffers.ranks] == [1, 1]


# --- y and num_tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (sevens(TOKENS, 128, dtype=torch.float32), ("y: got float32 [5, 128] on cpu", "expected bf16 [tokens, 128]")),
        (sevens(TOKENS, 256), ("y: got bfloat16 [5, 256]", "expected bf16 [tokens, 128]")),
        (sevens(128), ("y: got bfloat16 [128]", "expected bf16 [tokens, 128]")),
        (sevens(1, TOKENS, 128), ("y: got bfloat16 [1, 5, 128]", "expected bf16 [tokens, 128]")),
        (sevens(128, TOKENS).t(), ("y: got strides (1, 5) of shape [5, 128]", "contiguous")),
        (sevens(TOKENS, 256)[:, :128], ("y: got strides (256, 1) of shape [5, 128]", "contiguous")),
        (sevens(TOKENS, 128, device="meta"), ("y: got bfloat16 [5, 128] on meta", "the buffer's device cpu")),
        (None, ("y: got NoneType None", "expected bf16 [tokens, 128]")),
        (sevens(25, 128), ("num_tokens: got 25", "expected 0 to num_max_tokens_per_rank = 24")),
    ],
    ids=["dtype", "hidden", "vector", "3d", "transposed", "slice", "device", "none", "too_many"],
)
def test_y(buffer: SymmBuffer, y: Any, words: tuple[str, ...]) -> None:
    refused(buffer, words, y=y)


@pytest.mark.parametrize(
    ("num_tokens", "words"),
    [
        (6, ("num_tokens: got 6", "expected 0 to y.shape[0] = 5")),
        (-1, ("num_tokens: got -1", "expected 0 to y.shape[0] = 5")),
        (2.0, ("num_tokens: got 2.0", "expected 0 to y.shape[0] = 5")),
        (True, ("num_tokens: got True", "expected 0 to y.shape[0] = 5")),
        (torch.tensor([2]), ("num_tokens: got int64 [1] on cpu", "expected one int32 on the buffer's device cpu")),
        (torch.zeros(2, dtype=torch.int32), ("num_tokens: got int32 [2]", "expected one int32")),
        (torch.zeros(1, dtype=torch.int32, device="meta"), ("num_tokens: got int32 [1] on meta", "expected one int32")),
    ],
    ids=["more_than_y", "negative", "float", "bool", "int64", "two", "device"],
)
def test_num_tokens(buffer: SymmBuffer, num_tokens: Any, words: tuple[str, ...]) -> None:
    refused(buffer, words, num_tokens=num_tokens)


# --- weights ------------------------------------------------------------------------------------------------------


def natural(experts: int = 2, hidden: int = 128, intermediate: int = 128) -> tuple[Any, Any]:
    l1, l2 = torch.ones(experts, 2 * intermediate, hidden), torch.ones(experts, hidden, intermediate)
    return quantize_weights(l1), quantize_weights(l2)


def test_weights_that_are_not_transformed(buffer: SymmBuffer) -> None:
    l1, l2 = natural()
    words = ("got tuple", "from transform_weights_for_mega_moe")
    refused(buffer, ("l1_weights: ", "L1Weights", *words), l1_weights=l1)
    refused(buffer, ("l2_weights: ", "L2Weights", *words), l2_weights=l2)


def test_weights_that_are_swapped(buffer: SymmBuffer) -> None:
    l1, l2 = draw_weights(CONFIG)[0]
    refused(buffer, ("l1_weights: got L2Weights", "expected L1Weights"), l1_weights=l2, l2_weights=l1)


def test_no_weights(buffer: SymmBuffer) -> None:
    refused(buffer, ("l1_weights: got NoneType", "expected L1Weights"), l1_weights=None)


def test_weights_of_another_size(buffer: SymmBuffer) -> None:
    l1, l2 = megamoe.transform_weights_for_mega_moe(*natural(experts=4))
    words = ("l1_weights.weight: got float8_e4m3fn [4, 256, 128]", "expected e4m3 [2, 256, 128]")
    refused(buffer, words, l1_weights=l1, l2_weights=l2)
    l1, l2 = megamoe.transform_weights_for_mega_moe(*natural(hidden=256))
    words = ("l1_weights.weight: got float8_e4m3fn [2, 256, 256]", "expected e4m3 [2, 256, 128]")
    refused(buffer, words, l1_weights=l1, l2_weights=l2)
    l1, l2 = megamoe.transform_weights_for_mega_moe(*natural(intermediate=256))
    refused(buffer, ("l1_weights.weight: got float8_e4m3fn [2, 512, 128]",), l1_weights=l1, l2_weights=l2)


def test_weights_of_another_dtype(buffer: SymmBuffer) -> None:
    l1, l2 = draw_weights(CONFIG)[0]
    refused(buffer, ("l1_weights", "bfloat16", "e4m3"), l1_weights=L1Weights(l1.weight.bfloat16(), l1.sf))
    refused(buffer, ("l2_weights", "float64", "fp32"), l2_weights=L2Weights(l2.weight, l2.sf.double()))


def test_weights_with_strides(buffer: SymmBuffer) -> None:
    l1, l2 = draw_weights(CONFIG)[0]
    wide = torch.zeros(2, 256, 256, dtype=torch.uint8).view(l1.weight.dtype)[:, :, :128]
    words = ("l1_weights.weight: got strides (65536, 256, 1) of shape [2, 256, 128]", "contiguous")
    refused(buffer, words, l1_weights=L1Weights(wide, l1.sf))
    odd = torch.zeros(2 * 128 * 128 + 8, dtype=torch.uint8)[8:].view(l2.weight.dtype).view(2, 128, 128)
    refused(buffer, ("l2_weights.weight: got address", "multiple of 16 bytes"), l2_weights=L2Weights(odd, l2.sf))


def test_weights_on_another_device(buffer: SymmBuffer) -> None:
    l1, l2 = draw_weights(CONFIG)[0]
    elsewhere = L1Weights(l1.weight.to("meta"), l1.sf.to("meta")), L2Weights(l2.weight.to("meta"), l2.sf.to("meta"))
    words = ("l1_weights: got float8_e4m3fn [2, 256, 128] on meta", "expected the buffer's device cpu")
    refused(buffer, words, l1_weights=elsewhere[0], l2_weights=elsewhere[1])
    refused(buffer, ("meta", "cpu"), l2_weights=elsewhere[1])


# --- the rest of a launch -----------------------------------------------------------------------------------------


def test_stats(buffer: SymmBuffer) -> None:
    for stats, came in (
        (torch.zeros(2, dtype=torch.int64), "int64 [2] on cpu"),
        (torch.zeros(4, dtype=torch.int32), "int32 [4] on cpu"),
        (torch.zeros(4, dtype=torch.int32)[::2], "int32 [2] on cpu"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "int32 [2] on meta"),
        ([0, 0], "list [0, 0]"),
    ):
        words = (f"cumulative_local_expert_recv_stats: got {came}", "expected contiguous int32 [2] on cpu")
        refused(buffer, words, cumulative_local_expert_recv_stats=stats)


@pytest.mark.parametrize("recipe", [(1, 1, 128), (128, 128), None, 128])
def test_recipe(buffer: SymmBuffer, recipe: Any) -> None:
    refused(buffer, (f"recipe: got {recipe!r}", "expected (1, 128, 128)"), recipe=recipe)


@pytest.mark.parametrize("activation", ["gelu", None])
def test_activation(buffer: SymmBuffer, activation: Any) -> None:
    refused(buffer, (f"activation: got {activation!r}", "expected 'swiglu'"), activation=activation)


@pytest.mark.parametrize("clamp", [0, 0.0, -1.0, float("inf"), float("nan"), "10", 1e-300, 1e300, 10**400])
def test_activation_clamp(buffer: SymmBuffer, clamp: Any) -> None:
    words = (f"activation_clamp: got {clamp!r}", "expected a positive finite number or None")
    refused(buffer, words, activation_clamp=clamp)


@pytest.mark.parametrize("fast_math", [None, "yes"])
def test_fast_math(buffer: SymmBuffer, fast_math: Any) -> None:
    refused(buffer, (f"fast_math: got {fast_math!r}", "expected a bool"), fast_math=fast_math)


def test_stage(buffer: SymmBuffer) -> None:
    for stage in (0, 7, None):
        refused(buffer, (f"stage: got {stage}, expected one of",), stage=stage)


def test_debug_window(buffer: SymmBuffer) -> None:
    refused(buffer, ("debug.row_block: got 99", "expected a block of 128 within"), debug=DebugWindow(row_block=99))
    refused(buffer, ("debug.column_block: got 2", "within 256"), debug=DebugWindow(column_block=2))
    refused(buffer, ("debug.column_block: got -1",), debug=DebugWindow(column_block=-1))
    refused(buffer, ("debug.row_block: got 0.5",), debug=DebugWindow(row_block=0.5))  # type: ignore[arg-type]
    refused(buffer, ("debug: got 5, expected a megamoe.DebugWindow or None",), debug=5)


def test_role_times(buffer: SymmBuffer) -> None:
    words = ("role_times: got", "expected contiguous int64 [5]")
    refused(buffer, words, role_times=torch.zeros(4, dtype=torch.int64))
    refused(buffer, words, role_times=torch.zeros(5, dtype=torch.float32))
    refused(buffer, words, role_times=torch.zeros(5, dtype=torch.int64, device="meta"))


def test_a_closed_stream(buffer: SymmBuffer) -> None:
    stream = HostStream()
    stream.close()
    refused(buffer, ("stream: got a closed HostStream", "expected an open one"), stream=stream)
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        HostStream(0)


def test_more_threads_than_there_can_be() -> None:
    """In a process of its own, with room for the stacks of few of them."""
    script = """
import resource
from megamoe.targets.host import HostStream
HostStream(2).close()
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), held + (1 << 30)))
try:
    HostStream(10000)
except OSError as error:
    print(error)
HostStream(2).close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "num_workers: got 10000, but the system gives no more threads\n"


def test_what_is_no_stream_leaves_the_buffer_usable(buffer: SymmBuffer) -> None:
    """It was kept and waited for, so that check() and close() failed for ever."""
    refused(buffer, ("stream: got 5, expected a HostStream or None",), stream=5)
    buffer.close()


# --- which buffer -------------------------------------------------------------------------------------------------


def test_a_virtual_buffer_is_no_ranks_buffer(buffers: VirtualSymmBuffer) -> None:
    refused(buffers, ("sym_buffer: got VirtualSymmBuffer", "expected one rank's SymmBuffer (take one of .ranks)"))
    assert [buffer.epoch for buffer in buffers.ranks] == [0, 0]


def test_no_buffer() -> None:
    words = "sym_buffer: got NoneType, expected one rank's SymmBuffer"
    refused(None, (words,))
    nothing: Any = None
    for call in (lambda: megamoe.warmup(nothing), lambda: megamoe.dummy_run(*draw_weights(CONFIG)[0], nothing)):
        with pytest.raises(ValueError, match=words):
            call()


def test_a_closed_buffer() -> None:
    buffers = open_buffer(VirtualGroup(2), CONFIG)
    buffer = buffers.ranks[1]
    buffers.close()
    words = "sym_buffer: the buffer of rank 1 is closed, expected an open one"
    refused(buffer, (words,))
    (batch, _) = draw_batches(CONFIG, [3, 3])
    for call in (
        buffer.check,
        lambda: buffer.epoch,
        lambda: buffer.x,
        lambda: buffer.view("abort"),
        buffer.read_faults,
        lambda: batch.fill(buffer),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for both in (buffers.check, buffers.reset):
        with pytest.raises(ValueError, match="the buffer of rank 0 is closed"):
            both()
    alone = open_buffer(VirtualGroup(1), small_config(1)).ranks[0]
    alone.close()
    with pytest.raises(ValueError, match="the buffer of rank 0 is closed"):
        alone.reset()
    buffers.close()  # again: nothing
    assert "closed" in repr(buffer)


def test_reset_of_one_virtual_rank(buffers: VirtualSymmBuffer, buffer: SymmBuffer) -> None:
    megamoe.launch_mega_moe(sym_buffer=buffer, **good_call())
    words = r"reset\(\) is collective: call reset\(\) of the VirtualSymmBuffer that holds this rank"
    with pytest.raises(ValueError, match=words):
        buffer.reset()
    with pytest.raises(MegaMoEFault):
        buffer.check()  # still aborted
    buffers.reset()
    buffers.check()


def test_a_view_that_does_not_exist(buffer: SymmBuffer) -> None:
    with pytest.raises(ValueError, match=r"name must be a region of the layout \(x, x_sf, .*\), got 'weights'"):
        buffer.view("weights")
    with pytest.raises(ValueError, match="name must be a region of the layout"):
        buffer.view(["x"])  # type: ignore[arg-type]
    for rank in (2, -1, "a"):
        with pytest.raises(ValueError, match=f"rank must be 0 to 1 or None, got {rank!r}"):
            buffer.view("x", rank=rank)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="SymmBuffer has no attribute 'weights'"):
        _ = buffer.weights


# --- fill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(5, 256).bfloat16()}, ("x: got bfloat16 [5, 256]", "expected bf16 or fp32 [tokens, 128]")),
        ({"x": torch.ones(128).bfloat16()}, ("x: got bfloat16 [128]", "expected bf16 or fp32 [tokens, 128]")),
        ({"x": torch.ones(5, 128).half()}, ("x: got float16 [5, 128]", "expected bf16 or fp32 [tokens, 128]")),
        ({"x": torch.ones(5, 128).int()}, ("x: got int32 [5, 128]", "expected bf16 or fp32 [tokens, 128]")),
        ({"x": torch.ones(25, 128).bfloat16()}, ("num_tokens: got 25", "num_max_tokens_per_rank = 24")),
        ({"x": torch.ones(5, 128, device="meta")}, ("x: got float32 [5, 128] on meta", "the buffer's cpu")),
        ({"x": None}, ("x: got NoneType None", "a tensor")),
        ({"topk_idx": torch.zeros(5, 3, dtype=torch.int64)}, ("topk_idx: got int64 [5, 3]", "int32 or int64 [5, 2]")),
        ({"topk_idx": torch.zeros(4, 2, dtype=torch.int64)}, ("topk_idx: got int64 [4, 2]", "int32 or int64 [5, 2]")),
        ({"topk_idx": torch.zeros(5, 2)}, ("topk_idx: got float32 [5, 2]", "int32 or int64 [5, 2]")),
        ({"topk_idx": [[0, 1]] * 5}, ("topk_idx: got list", "a tensor")),
        (
            {"topk_idx": torch.zeros(5, 2, dtype=torch.int64, device="meta")},
            ("topk_idx: got int64 [5, 2] on meta", "cpu"),
        ),
        ({"topk_weights": torch.ones(5, 2).double()}, ("topk_weights: got float64 [5, 2]", "fp32 [5, 2]")),
        ({"topk_weights": torch.ones(10)}, ("topk_weights: got float32 [10]", "fp32 [5, 2]")),
        ({"x": torch.ones(5, 128).to_sparse()}, ("x: got float32 [5, 128]", "torch.sparse_coo, expected a dense")),
        ({"topk_idx": torch.ones(5, 2).long().to_sparse()}, ("topk_idx: got int64 [5, 2]", "expected a dense")),
        ({"routed_scaling_factor": "2"}, ("routed_scaling_factor: got '2'", "expected a finite number (fp32)")),
        ({"routed_scaling_factor": None}, ("routed_scaling_factor: got None", "expected a finite number")),
        ({"routed_scaling_factor": 1e300}, ("routed_scaling_factor: got 1e+300", "expected a finite number")),
        ({"topk_weights": torch.ones(5, 2, device="meta")}, ("topk_weights: got float32 [5, 2] on meta", "cpu")),
    ],
)
def test_fill(buffer: SymmBuffer, change: dict[str, Any], words: tuple[str, ...]) -> None:
    good: dict[str, Any] = {
        "x": torch.ones(5, 128).bfloat16(),
        "topk_idx": torch.ones(5, 2, dtype=torch.int64),
        "topk_weights": torch.ones(5, 2),
    }
    with pytest.raises(ValueError) as error:
        buffer.fill(**{**good, **change})
    for word in words:
        assert word in str(error.value)
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        view = buffer.view(name)
        assert not (view.view(torch.uint8) if name == "x" else view).any(), f"{name} was written"
    assert buffer.fill(**good) == 5


def test_fill_takes_any_strides(buffer: SymmBuffer) -> None:
    (batch, _) = draw_batches(CONFIG, [6, 6])
    batch.fill(buffer)
    wanted = [buffer.view(name)[:6].clone() for name in ("x_sf", "topk_idx", "topk_weights")]
    buffer.fill(
        batch.x.t().contiguous().t(), batch.topk_idx.int().t().contiguous().t(), batch.topk_weights.repeat(1, 2)[:, :2]
    )
    for name, before in zip(("x_sf", "topk_idx", "topk_weights"), wanted, strict=True):
        assert torch.equal(buffer.view(name)[:6], before)


# --- creation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e300, "5"])
def test_timeout(timeout_s: Any) -> None:
    with pytest.raises(ValueError) as error:
        open_buffer(VirtualGroup(2), CONFIG, timeout_s=timeout_s)
    assert f"timeout_s must be above 0 and at most 1e+09 seconds, got {timeout_s!r}" in str(error.value)


def test_timeout_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="MEGAMOE_TIMEOUT_S: got 'soon', expected seconds"):
        open_buffer(VirtualGroup(2), CONFIG)
    monkeypatch.setenv("MEGAMOE_TIMEOUT_S", "2.5")
    buffers = open_buffer(VirtualGroup(2), CONFIG)
    assert buffers.ranks[0].timeout_s == 2.5
    buffers.close()
    monkeypatch.delenv("MEGAMOE_TIMEOUT_S")
    buffers = open_buffer(VirtualGroup(2), CONFIG)
    assert buffers.ranks[0].timeout_s == 300
    buffers.close()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"check_every": 0}, "check_every must be at least 1 or None, got 0"),
        ({"check_every": 1.5}, "check_every must be at least 1 or None, got 1.5"),
        ({"max_ctas": 0}, "max_ctas must be at least 1 or None, got 0"),
        ({"max_ctas": 1.5}, "max_ctas must be at least 1 or None, got 1.5"),
        ({"max_ctas": "2"}, "max_ctas must be at least 1 or None, got '2'"),
        ({"check_every": True}, "check_every must be at least 1 or None, got True"),
    ],
)
def test_options(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_buffer(VirtualGroup(2), CONFIG, **option)


def test_creation_checks_the_config() -> None:
    with pytest.raises(ValueError, match="num_experts must be divisible by num_ranks, got 5 experts over 2 ranks"):
        megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(2), 5, 8, 2, 128, 128)
    with pytest.raises(ValueError, match="l2_sf_granularity must be one of"):
        megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(2), 4, 8, 2, 128, 128, l2_sf_granularity=32)
    with pytest.raises(ValueError, match="pool_rows must be a positive integer, got 0"):
        megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(2), 4, 8, 2, 128, 128, pool_rows=0)


@pytest.mark.parametrize("number", ["2", 2.0, None, True, 0])
def test_numbers_of_a_virtual_group(number: Any) -> None:
    for name in ("num_ranks", "num_workers"):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {number!r}"):
            VirtualGroup(**{"num_ranks": 1, name: number})


def test_creation_checks_the_schedule() -> None:
    with pytest.raises(ValueError, match=r"schedule: got 'fast', expected a megamoe\.Schedule or None"):
        megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(2), 4, 8, 2, 128, 128, schedule="fast")  # type: ignore[arg-type]


def test_a_buffer_that_no_machine_has_room_for() -> None:
    with pytest.raises(OSError, match=r"no memory for a buffer of \d+ bytes: this machine has \d+ bytes"):
        megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(1), 4, 10**9, 2, 16384, 128)


def test_a_target_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"target must be one of \('host', 'sm90'\), got 'tpu'"):
        get_target("tpu")
    with pytest.raises(ValueError, match=r"target must be one of \('host', 'sm90'\), got 'tpu'"):
        VirtualGroup(2, target="tpu")
