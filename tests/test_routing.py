"""Routing against the transformers routers, and its properties over random routers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megamoe.routing import RouterConfig, count_routes, route
from tests.checkpoint_files import (
    EXPERTS,
    TOPK,
    SmallLayer,
    random_hidden,
    random_layer,
    transformers_block,
    transformers_routed,
)

NEAR = 1e-5


def router_of(layer: SmallLayer) -> RouterConfig:
    config = layer.config
    return RouterConfig(
        scoring="softmax" if layer.bias is None else "sigmoid",
        num_experts=EXPERTS,
        num_topk=TOPK,
        normalize_weights=config["norm_topk_prob"],
        routed_scaling_factor=config.get("routed_scaling_factor", 1.0),
        num_groups=config.get("n_group", 1),
        topk_groups=config.get("topk_group", 1),
    )


def exact_scores(config: RouterConfig, hidden: Tensor, gate: Tensor) -> Tensor:
    logits = hidden.double() @ gate.double().T
    return logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(-1)


def decision_margin(config: RouterConfig, selection: Tensor) -> Tensor:
    """How far each token is from another choice of groups or experts: float64 [tokens]."""
    grouped = selection.unflatten(1, (config.num_groups, -1))
    margin = torch.full((selection.shape[0],), math.inf, dtype=torch.float64)
    if config.topk_groups < config.num_groups:
        group_scores = grouped.topk(2, -1).values.sum(-1).sort(dim=-1, descending=True)
        margin = group_scores.values[:, config.topk_groups - 1] - group_scores.values[:, config.topk_groups]
        chosen = torch.zeros(grouped.shape[:2], dtype=torch.bool)
        chosen.scatter_(1, group_scores.indices[:, : config.topk_groups], True)
        selection = grouped.masked_fill(~chosen.unsqueeze(-1), -math.inf).flatten(1)
    ordered = selection.sort(dim=-1, descending=True).values
    if config.num_topk < config.num_experts:
        margin = torch.minimum(margin, ordered[:, config.num_topk - 1] - ordered[:, config.num_topk])
    return margin


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"n_group": 8, "topk_group": 3, "routed_scaling_factor": 1.0}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_same_routes_as_transformers(model_type: str, changes: dict[str, object]) -> None:
    layer = random_layer(model_type, seed=3, **changes)
    config = router_of(layer)
    hidden = random_hidden(512, seed=4)
    routing = route(config, hidden, layer.gate, layer.bias)
    _, their_idx, their_weights = transformers_routed(transformers_block(layer), hidden)

    selection = exact_scores(config, hidden, layer.gate)
    selection = selection if layer.bias is None else selection + layer.bias.double()
    clear = decision_margin(config, selection) > NEAR
    assert clear.sum() >= 500  # the comparison below is about nearly all tokens
    ours, order = routing.topk_idx.sort(dim=-1)
    theirs, their_order = their_idx.sort(dim=-1)
    assert torch.equal(ours[clear], theirs[clear])
    torch.testing.assert_close(
        routing.topk_weights.gather(1, order)[clear], their_weights.gather(1, their_order)[clear], rtol=2e-5, atol=1e-7
    )
    assert routing.topk_idx.dtype == torch.int64
    assert routing.topk_weights.dtype == torch.float32


@st.composite
def routers(draw: st.DrawFn) -> RouterConfig:
    num_groups = draw(st.sampled_from([1, 2, 4, 8]))
    per_group = draw(st.integers(2, 9))
    topk_groups = draw(st.integers(1, num_groups))
    return RouterConfig(
        scoring=draw(st.sampled_from(["sigmoid", "softmax"])),
        num_experts=num_groups * per_group,
        num_topk=draw(st.integers(1, min(8, topk_groups * per_group))),
        normalize_weights=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        topk_groups=topk_groups,
    )


@settings(max_examples=100)
@given(
    config=routers(), tokens=st.integers(0, 40), seed=st.integers(0, 2**31), logit_scale=st.sampled_from([0.1, 1, 8])
)
def test_properties(config: RouterConfig, tokens: int, seed: int, logit_scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 32, generator=generator)
    gate = torch.randn(config.num_experts, 32, generator=generator) * logit_scale / 32**0.5
    bias = torch.randn(config.num_experts, generator=generator)
    routing = route(config, hidden, gate, bias)
    idx, weights = routing.topk_idx, routing.topk_weights
    assert idx.shape == weights.shape == (tokens, config.num_topk)

    # distinct experts of at most topk_groups groups
    assert ((idx >= 0) & (idx < config.num_experts)).all()
    assert all(len(set(row)) == config.num_topk for row in idx.tolist())
    groups_used = [len({e // config.experts_per_group for e in row}) for row in idx.tolist()]
    assert all(used <= config.topk_groups for used in groups_used)

    # the selection is by biased scores: nothing eligible that was left out beats what was taken
    scores = exact_scores(config, hidden, gate)
    selection = scores + bias.double()
    group_scores = selection.unflatten(1, (config.num_groups, -1)).topk(2, -1).values.sum(-1)
    best_groups = group_scores.topk(config.topk_groups, -1)
    taken_groups = idx // config.experts_per_group
    worst_taken_group = group_scores.gather(1, taken_groups).amin(-1)
    assert (worst_taken_group >= best_groups.values.amin(-1) - NEAR).all()
    eligible = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best_groups.indices, True)
    eligible = eligible.repeat_interleave(config.experts_per_group, 1)
    clear = decision_margin(config, selection) > NEAR
    left_out = selection.masked_fill(~eligible, -math.inf).scatter(1, idx, -math.inf).amax(-1)
    assert (selection.gather(1, idx).amin(-1)[clear] >= left_out[clear]).all()

    # the weights are by unbiased scores: the bias has only a say in the selection
    expected = scores.gather(1, idx)
    if config.normalize_weights:
        expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights.sum(-1), torch.full((tokens,), config.routed_scaling_factor))
    torch.testing.assert_close(weights.double(), expected * config.routed_scaling_factor, rtol=1e-4, atol=1e-9)

    # any cut of the tokens routes to the same bits
    cut = tokens // 3
    for part, rows in ((hidden[:cut], slice(0, cut)), (hidden[cut:], slice(cut, None))):
        piece = route(config, part, gate, bias)
        assert torch.equal(piece.topk_idx, idx[rows])
        assert torch.equal(piece.topk_weights, weights[rows])

    counts = count_routes(idx, config.num_experts)
    assert counts.sum() == idx.numel()
    assert counts.tolist() == [int((idx == e).sum()) for e in range(config.num_experts)]


def test_the_cut_does_not_matter_at_real_size() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(130, 7168, generator=generator).bfloat16()
    gate = (torch.randn(256, 7168, generator=generator) / 7168**0.5).bfloat16()
    bias = torch.randn(256, generator=generator) * 0.1
    config = RouterConfig("sigmoid", 256, 8, True, 2.5, 8, 4)
    whole = route(config, hidden, gate, bias)
    for rows in (slice(0, 1), slice(1, 8), slice(8, 71), slice(71, 130)):
        piece = route(config, hidden[rows], gate, bias)
        assert torch.equal(piece.topk_idx, whole.topk_idx[rows])
        assert torch.equal(piece.topk_weights, whole.topk_weights[rows])


def test_equal_scores_go_to_the_lower_expert() -> None:
    hidden = torch.zeros(3, 16)  # every logit 0
    config = RouterConfig("sigmoid", 16, 4, True, 1.0, 4, 2)
    routing = route(config, hidden, torch.ones(16, 16), torch.zeros(16))
    assert routing.topk_idx.tolist() == [[0, 1, 2, 3]] * 3
    assert torch.equal(routing.topk_weights, torch.full((3, 4), 0.25))


def test_many_equal_scores_keep_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    bias = torch.randint(0, 4, (256,), generator=generator).float()  # the sigmoids are all 1/2
    routing = route(RouterConfig("sigmoid", 256, 32, False), torch.zeros(2, 16), torch.zeros(256, 16), bias)
    best_first = sorted(range(256), key=lambda expert: (-float(bias[expert]), expert))
    assert routing.topk_idx.tolist() == [best_first[:32]] * 2


def test_a_nan_token_keeps_distinct_experts_and_has_nan_weights() -> None:
    hidden = random_hidden(3)
    hidden[1, 7] = math.nan
    for layer in (random_layer("deepseek_v3"), random_layer("qwen3_moe")):
        routing = route(router_of(layer), hidden, layer.gate, layer.bias)
        assert len(set(routing.topk_idx[1].tolist())) == TOPK
        assert routing.topk_weights[1].isnan().all()
        others = route(router_of(layer), hidden[[0, 2]], layer.gate, layer.bias)
        assert torch.equal(routing.topk_idx[[0, 2]], others.topk_idx)


def test_sigmoids_that_all_underflow_give_finite_weights() -> None:
    config = RouterConfig("sigmoid", 8, 2, True)
    routing = route(config, torch.ones(1, 4), torch.full((8, 4), -200.0))
    assert routing.topk_weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scoring": "tanh"}, "scoring is 'tanh'"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_groups": 3}, "num_groups is 3, expected a divisor of num_experts = 16"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups is 5, expected 1 to num_groups = 4"),
        ({"num_groups": 16, "topk_groups": 4}, "num_groups is 16"),
        ({"num_groups": 8, "topk_groups": 1, "num_topk": 3}, "num_topk is 3, expected 1 to 2"),
        ({"num_topk": 0}, "num_topk is 0"),
    ],
)
def test_a_router_that_cannot_route(arguments: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"scoring": "sigmoid", "num_experts": 16, "num_topk": 4, "normalize_weights": True}
    with pytest.raises(ValueError, match=words):
        RouterConfig(**{**good, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "gate", "bias", "words"),
    [
        ((8,), (16, 8), (16,), r"hidden_states has shape \[8\]"),
        ((2, 8), (16, 9), (16,), r"gate_weight has shape \[16, 9\], expected .*\[16, 8\]"),
        ((2, 8), (16, 8), (15,), r"correction_bias has shape \[15\], expected \[16\]"),
    ],
)
def test_shapes_that_do_not_fit(
    hidden: tuple[int, ...], gate: tuple[int, ...], bias: tuple[int, ...], words: str
) -> None:
    config = RouterConfig("sigmoid", 16, 4, True)
    with pytest.raises(ValueError, match=words):
        route(config, torch.zeros(hidden), torch.zeros(gate), torch.zeros(bias))


def test_ids_outside_do_not_count() -> None:
    assert count_routes(torch.tensor([[0, -1], [3, 4]]), 4).tolist() == [1, 0, 0, 1]
    assert count_routes(torch.empty(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]
