"""weights.py: the interleaved order written out by hand, the round trip, alignment, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.config import MegaMoEConfig
from megamoe.quant import E4M3
from megamoe.weights import (
    ALIGNMENT_BYTES,
    L1Weights,
    L2Weights,
    check_transformed_weights,
    interleaved_to_natural,
    transform_weights_for_mega_moe,
    untransform_weights_for_mega_moe,
)

Pair = tuple[torch.Tensor, torch.Tensor]


def random_weights(num_experts: int, hidden: int, intermediate: int, seed: int = 0) -> tuple[Pair, Pair]:
    """Natural weights of any bits, NaN included: the transform moves bytes."""
    generator = torch.Generator().manual_seed(seed)

    def e4m3(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.int32).to(torch.uint8).view(E4M3)

    l1 = (
        e4m3(num_experts, 2 * intermediate, hidden),
        torch.rand(num_experts, 2 * intermediate // 128, hidden // 128, generator=generator),
    )
    l2 = (
        e4m3(num_experts, hidden, intermediate),
        torch.rand(num_experts, hidden // 128, intermediate // 128, generator=generator),
    )
    return l1, l2


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor


def test_rows_alternate_by_eight() -> None:
    """Each row of the weight holds its own natural number; 256 rows fit a byte."""
    number = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    weight = number[None, :, None].expand(1, 256, 128).contiguous().view(E4M3)
    _, l2 = random_weights(1, 128, 128)
    l1, _ = transform_weights_for_mega_moe((weight, torch.ones(1, 2, 1)), l2)
    rows = l1.weight.view(torch.uint8)[0, :, 77].tolist()
    assert rows[:8] == list(range(8))  # gate 0..7
    assert rows[8:16] == list(range(128, 136))  # up 0..7
    assert rows[16:24] == list(range(8, 16))  # gate 8..15
    assert rows[24:32] == list(range(136, 144))  # up 8..15
    assert rows[240:248] == list(range(120, 128))  # the last gate
    assert rows[248:] == list(range(248, 256))  # the last up
    assert interleaved_to_natural(128).tolist() == rows


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1000))
def test_round_trip_and_row_order(num_experts: int, hidden_blocks: int, intermediate_blocks: int, seed: int) -> None:
    hidden, intermediate = 128 * hidden_blocks, 128 * intermediate_blocks
    natural = random_weights(num_experts, hidden, intermediate, seed)
    l1, l2 = transform_weights_for_mega_moe(*natural)
    for pair in range(intermediate // 8):
        for half in range(2):  # gate, up
            here = raw(l1.weight)[:, 16 * pair + 8 * half : 16 * pair + 8 * half + 8]
            there = raw(natural[0][0])[:, half * intermediate + 8 * pair : half * intermediate + 8 * pair + 8]
            assert torch.equal(here, there)
    assert torch.equal(l1.sf, natural[0][1])  # scales stay natural
    assert torch.equal(raw(l2.weight), raw(natural[1][0]))
    assert torch.equal(l2.sf, natural[1][1])
    back = untransform_weights_for_mega_moe(l1, l2)
    for got_pair, want_pair in zip(back, natural, strict=True):
        assert type(got_pair) is tuple  # not a marked one
        for got, want in zip(got_pair, want_pair, strict=True):
            assert torch.equal(raw(got), raw(want))
    config = MegaMoEConfig(1, num_experts, 1, hidden, intermediate, 8)
    check_transformed_weights(config, l1, l2)


def test_unaligned_and_strided_input_becomes_contiguous_and_aligned() -> None:
    natural = random_weights(2, 256, 128)

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        view = storage[1:].view(tensor.shape)
        view.copy_(tensor)
        assert view.data_ptr() % ALIGNMENT_BYTES
        return view

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)

    plain = transform_weights_for_mega_moe(*natural)
    for change in (shifted, strided):
        l1, l2 = (tuple(change(tensor) for tensor in pair) for pair in natural)
        changed = transform_weights_for_mega_moe(l1, l2)  # type: ignore[arg-type]
        for got, want in zip((*changed[0], *changed[1]), (*plain[0], *plain[1]), strict=True):
            assert torch.equal(raw(got), raw(want))
            assert got.is_contiguous()
            assert got.data_ptr() % ALIGNMENT_BYTES == 0


def test_what_fits_already_is_not_copied() -> None:
    natural = random_weights(1, 128, 128)
    l1, l2 = transform_weights_for_mega_moe(*natural)
    assert l1.sf.data_ptr() == natural[0][1].data_ptr()
    assert l2.weight.data_ptr() == natural[1][0].data_ptr()
    assert l1.weight.data_ptr() != natural[0][0].data_ptr()


def test_transform_refuses_what_does_not_fit() -> None:
    l1, l2 = random_weights(2, 256, 128)
    transformed = transform_weights_for_mega_moe(l1, l2)
    bf16 = l1[0].view(torch.uint8).to(torch.bfloat16)
    for bad_l1, bad_l2, words in [
        (transformed[0], l2, "l1_weights: got L1Weights, transformed already"),
        (l1, transformed[1], "l2_weights: got L2Weights, transformed already"),
        (l1[0], l2, r"l1_weights: got Tensor, expected a tuple \(weight, sf\)"),
        (l1, (*l2, l2[1]), "l2_weights: got a tuple of 3"),
        ((bf16, l1[1]), l2, r"l1_weights weight: got bfloat16 \[2, 256, 256\] on cpu, expected e4m3"),
        ((l1[0][0], l1[1]), l2, r"l1_weights weight: got float8_e4m3fn \[256, 256\]"),
        ((l1[0][:, :128], l1[1]), l2, r"l1_weights weight: got .*\[2, 128, 256\].*multiples of 128"),
        ((l1[0][:, :, :64], l1[1]), l2, "l1_weights weight: got .*multiples of 128"),
        ((l1[0], l1[1].to(torch.bfloat16)), l2, r"l1_weights sf: got bfloat16.*expected fp32 \[2, 2, 2\]"),
        (
            (l1[0], l1[1].transpose(1, 2)[:, :1]),
            l2,
            r"l1_weights sf: got float32 \[2, 1, 2\].*expected fp32 \[2, 2, 2\]",
        ),
        (l1, (l2[0][:1], l2[1]), r"l2_weights weight: got .*\[1, 256, 128\].*expected e4m3 \[2, 256, 128\]"),
        (l1, (l2[0].transpose(1, 2), l2[1]), r"l2_weights weight: got .*\[2, 128, 256\]"),
        (l1, (l2[0], l2[1][:, :1]), r"l2_weights sf: got float32 \[2, 1, 1\].*expected fp32 \[2, 2, 1\]"),
        (l1, (l2[0].to("meta"), l2[1]), "l2_weights weight: got .* on meta, expected it on cpu like the l1 weight"),
        (l1, (l2[0], None), "l2_weights sf: got NoneType None"),
    ]:
        with pytest.raises(ValueError, match=words):
            transform_weights_for_mega_moe(bad_l1, bad_l2)  # type: ignore[arg-type]


def test_untransform_and_check_refuse_what_is_not_transformed() -> None:
    natural = random_weights(2, 256, 128)
    l1, l2 = transform_weights_for_mega_moe(*natural)
    config = MegaMoEConfig(2, 4, 2, 256, 128, 8)
    check_transformed_weights(config, l1, l2)
    with pytest.raises(
        ValueError, match=r"l1_weights: got tuple, expected L1Weights from transform_weights_for_mega_moe"
    ):
        untransform_weights_for_mega_moe(natural[0], l2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="l2_weights: got tuple, expected L2Weights"):
        check_transformed_weights(config, l1, natural[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="l1_weights: got L2Weights, expected L1Weights"):
        check_transformed_weights(config, l2, l1)  # type: ignore[arg-type]
    three_experts = MegaMoEConfig(2, 6, 2, 256, 128, 8)
    with pytest.raises(ValueError, match=r"l1_weights.weight: got .*\[2, 256, 256\].*expected e4m3 \[3, 256, 256\]"):
        check_transformed_weights(three_experts, l1, l2)
    strided = L2Weights(l2.weight.transpose(1, 2).contiguous().transpose(1, 2), l2.sf)
    with pytest.raises(ValueError, match=r"l2_weights.weight: got strides .*expected a contiguous"):
        check_transformed_weights(config, l1, strided)
    storage = torch.empty(l1.weight.numel() + 1, dtype=torch.uint8).view(E4M3)
    unaligned = L1Weights(storage[1:].view(l1.weight.shape), l1.sf)
    with pytest.raises(ValueError, match=r"l1_weights.weight: got address 0x.*expected a multiple of 16 bytes"):
        check_transformed_weights(config, unaligned, l2)


@pytest.mark.parametrize("bad", [0, -8, 12])
def test_row_order_refuses(bad: int) -> None:
    with pytest.raises(ValueError, match=f"intermediate_hidden: got {bad}, expected a positive multiple of 8"):
        interleaved_to_natural(bad)
