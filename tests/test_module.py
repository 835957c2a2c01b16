"""The layer as a torch module, on the host target."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megamoe
from megamoe import MegaMoE, SymmBuffer, VirtualGroup
from megamoe.quant import quantize_activations, quantize_weights
from megamoe.reference import RankInputs, compare, moe_layer

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, INTERMEDIATE, EXPERTS, TOPK, CAPACITY = 256, 128, 4, 2, 24


def natural(seed: int, experts: int = EXPERTS) -> Any:
    draw = torch.Generator().manual_seed(seed)
    l1 = torch.randn(experts, 2 * INTERMEDIATE, HIDDEN, generator=draw) / HIDDEN**0.5
    l2 = torch.randn(experts, HIDDEN, INTERMEDIATE, generator=draw) / INTERMEDIATE**0.5
    return quantize_weights(l1), quantize_weights(l2)


def batch(seed: int, *leading: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, HIDDEN, generator=draw).bfloat16()
    ids = torch.rand(*leading, EXPERTS, generator=draw).argsort(-1)[..., :TOPK].contiguous()
    return x, ids, torch.rand(*leading, TOPK, generator=draw)


def answers(config: Any, weights: list[Any], batches: list[Any], factor: float = 1.0) -> list[Tensor]:
    inputs = [
        RankInputs(
            *quantize_activations(x.reshape(-1, HIDDEN)), ids.reshape(-1, TOPK).long(), w.reshape(-1, TOPK) * factor
        )
        for x, ids, w in batches
    ]
    return moe_layer(config, inputs, weights)


@pytest.fixture
def layer() -> Any:
    made = MegaMoE(natural(0), VirtualGroup(1), num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, timeout_s=20.0)
    yield made
    made.close()


def transformed(layer: MegaMoE) -> Any:
    return megamoe.L1Weights(layer.l1_weight, layer.l1_sf), megamoe.L2Weights(layer.l2_weight, layer.l2_sf)


def test_answers_like_the_oracle_in_any_shape(layer: MegaMoE) -> None:
    for leading in ((12,), (2, 3, 4), (0,)):
        x, ids, w = batch(1, *leading)
        y = layer(x, ids.int(), w)
        assert y.shape == x.shape
        assert y.dtype == torch.bfloat16
        (expected,) = answers(layer.sym_buffer.config, [transformed(layer)], [(x, ids, w)])
        assert compare("y", y.reshape(-1, HIDDEN), expected).ok


def test_routed_scaling_factor() -> None:
    layer = MegaMoE(
        natural(0), VirtualGroup(1), num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, routed_scaling_factor=2.5
    )
    x, ids, w = batch(2, 8)
    (expected,) = answers(layer.sym_buffer.config, [transformed(layer)], [(x, ids, w)], 2.5)
    assert compare("y", layer(x, ids, w), expected).ok
    layer.close()


def test_accumulate_is_the_buffers_and_the_host_target_is_exact_whatever_it_says() -> None:
    x, ids, w = batch(3, 9)
    answers_of = {}
    for accumulate in ("fp32", "fast"):
        layer = MegaMoE(
            natural(0), VirtualGroup(1), num_topk=TOPK, num_max_tokens_per_rank=CAPACITY, accumulate=accumulate
        )
        assert layer.sym_buffer.config.accumulate == accumulate
        answers_of[accumulate] = layer(x, ids, w)
        layer.close()
    assert torch.equal(answers_of["fp32"], answers_of["fast"])


def test_virtual_ranks_share_buffers_between_layers() -> None:
    """Two layers of two ranks over one pair of buffers."""
    opened = megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(2), EXPERTS, CAPACITY, TOPK, HIDDEN, INTERMEDIATE)
    layers = [
        [MegaMoE(natural(10 * number + rank, EXPERTS // 2), buffer) for rank, buffer in enumerate(opened.ranks)]
        for number in range(2)
    ]
    for ranks in (layers[0], layers[1], layers[0]):
        batches = [batch(3 + rank, 5 + rank) for rank in range(2)]
        y = [layer(*given) for layer, given in zip(ranks, batches, strict=True)]
        opened.check()
        expected = answers(opened.config, [transformed(layer) for layer in ranks], batches)
        for found, wanted in zip(y, expected, strict=True):
            assert compare("y", found, wanted).ok
    layers[0][0].close()  # it was given its buffer
    opened.ranks[0].check()
    opened.close()


def test_weights_replaced_in_place_and_by_others(layer: MegaMoE) -> None:
    x, ids, w = batch(4, 6)
    first = layer(x, ids, w)
    other = MegaMoE(natural(9), VirtualGroup(1), num_topk=TOPK, num_max_tokens_per_rank=CAPACITY)
    expected = other(x, ids, w)
    assert not torch.equal(first, expected)
    state = other.state_dict()
    assert set(state) == {"l1_weight", "l1_sf", "l2_weight", "l2_sf"}
    layer.load_state_dict(state)
    assert torch.equal(layer(x, ids, w), expected)
    layer.l1_weight = other.l1_weight.clone()
    assert torch.equal(layer(x, ids, w), expected)
    other.close()


def test_token_count_from_a_tensor(layer: MegaMoE) -> None:
    x, ids, w = batch(5, 6)
    whole = layer(x, ids, w)
    part = layer(x, ids, w, num_tokens=torch.tensor([4], dtype=torch.int32))
    assert torch.equal(part[:4], whole[:4])


def test_what_it_refuses(layer: MegaMoE) -> None:
    x, ids, w = batch(6, 6)
    shared: SymmBuffer = layer.sym_buffer
    nothing: Any = None
    opened: Any = megamoe.get_symm_buffer_for_mega_moe(VirtualGroup(1), EXPERTS, CAPACITY, TOPK, HIDDEN, INTERMEDIATE)
    calls: dict[str, Any] = {
        "x: got": lambda: layer(x[:, 1:], ids, w),
        "topk_idx: got": lambda: layer(x, ids[1:], w),
        "topk_weights: got float64": lambda: layer(x, ids, w.double()),
        "num_tokens: got 25": lambda: layer(*batch(0, 25)),
        "several|virtual ranks": lambda: MegaMoE(
            natural(0), VirtualGroup(2), num_topk=2, num_max_tokens_per_rank=CAPACITY
        ),
        "num_topk: got None": lambda: MegaMoE(natural(0), VirtualGroup(1), num_max_tokens_per_rank=CAPACITY),
        "no options": lambda: MegaMoE(natural(0), shared, num_topk=2),
        "l1_weights.weight": lambda: MegaMoE(natural(0, 2), shared),
        "weights: got NoneType, expected": lambda: MegaMoE(nothing, shared),
        "topk_idx: got int64": lambda: layer(x[0], torch.tensor(1), torch.tensor(1.0)),
        "group: got a VirtualSymmBuffer": lambda: MegaMoE(natural(0), opened),
        "x: got a tensor that requires grad": lambda: layer(x.clone().requires_grad_(), ids, w),
        "topk_weights: got a tensor that requires grad": lambda: layer(x, ids, w.clone().requires_grad_()),
        "routed_scaling_factor": lambda: shared.fill(x, ids, w, routed_scaling_factor=float("nan")),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words):
            call()
    opened.close()
    with torch.no_grad():
        assert layer(x.clone().requires_grad_(), ids, w).isfinite().all()


def test_a_copy_says_what_to_keep_instead(layer: MegaMoE) -> None:
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a SymmBuffer is memory that ranks share: .*state_dict\(\)"):
            make(layer)


def test_the_example_of_the_readme() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    config = names["layer"].sym_buffer.config
    given = [(names["x"], names["topk_idx"], names["scores"])]
    (expected,) = answers(config, [transformed(names["layer"])], given)
    assert compare("y", names["y"], expected).ok
    names["layer"].close()


class Residual(torch.nn.Module):
    def __init__(self, moe: MegaMoE) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)
        self.moe = moe

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        answer: Tensor = self.moe(self.linear(x), ids, w)
        return answer + x


@torch.no_grad()
def test_torch_compile_leaves_it_alone(layer: MegaMoE) -> None:
    model, inputs = Residual(layer), batch(8, 5)
    for plain in (layer, model):
        compiled = torch.compile(plain, backend="aot_eager")
        for _ in range(2):
            assert torch.equal(compiled(*inputs), plain(*inputs))

    def by_functions(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        layer.sym_buffer.fill(x + 0, ids, w)
        y = torch.empty_like(x)
        l1, l2 = transformed(layer)
        megamoe.fp8_mega_moe(y, l1, l2, layer.sym_buffer)
        layer.sym_buffer.check()
        return y + 0

    assert torch.equal(torch.compile(by_functions, backend="aot_eager")(*inputs), layer(*inputs))


def test_a_fault_is_raised_where_the_call_waits(layer: MegaMoE) -> None:
    x, ids, w = batch(7, 3)
    ids[1, 0] = EXPERTS
    with pytest.raises(megamoe.MegaMoEFault, match=f"names expert {EXPERTS}"):
        layer(x, ids, w)
    assert layer(*batch(7, 3)).isfinite().all()
