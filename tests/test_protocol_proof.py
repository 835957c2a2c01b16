"""The comparisons of the GPU proof, fed by the host target: they accept what it leaves, and see every change to it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe import protocol_proof as proof
from megamoe.config import MegaMoEConfig, Stage
from megamoe.layout import HOST_STATUS_STRUCT, LAUNCH_STRUCT, buffer_layout, problem_struct
from megamoe.proof_ranks import ProofRanks
from megamoe.quant import E4M3
from megamoe.reference import RankInputs, combine
from megamoe.targets import host

NUM_RANKS = 4


class HostRanks(ProofRanks):
    """The same buffers in CPU memory, launched on the host target."""

    def __init__(self, config: MegaMoEConfig) -> None:
        self.config = config
        self.layout = buffer_layout(config)
        self.memory = [torch.zeros(self.layout.num_bytes, dtype=torch.uint8) for _ in range(config.num_ranks)]
        self.status: list[Any] = [SimpleNamespace(words=HOST_STATUS_STRUCT.ctype()) for _ in self.memory]
        self.next_launch = 1
        self._structs = (problem_struct(config), self.layout.as_struct())
        bases = (ctypes.c_void_p * config.num_ranks)(*(memory.data_ptr() for memory in self.memory))
        library = host.library()
        problem, layout = (ctypes.addressof(struct) for struct in self._structs)
        self._ranks = [
            library.megamoe_rank_create(problem, layout, rank, bases, ctypes.addressof(self.status[rank].words))
            for rank in range(config.num_ranks)
        ]
        self._streams = [library.megamoe_stream_create(2) for _ in self.memory]

    def fill(self, inputs: list[RankInputs]) -> None:  # type: ignore[override]
        for rank, given in enumerate(inputs):
            for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                self.view(rank, name)[: given.num_tokens].copy_(getattr(given, name))

    def run(self, stage: Stage, inputs: list[RankInputs]) -> None:
        self.fill(inputs)
        library, tickets = host.library(), []
        for rank, given in enumerate(inputs):
            arguments: Any = LAUNCH_STRUCT.ctype()
            arguments.num_tokens, arguments.stage = given.num_tokens, int(stage)
            arguments.timeout_ns, arguments.launch = 10 * 10**9, self.next_launch
            tickets.append(library.megamoe_launch(self._streams[rank], self._ranks[rank], ctypes.addressof(arguments)))
        self.next_launch += 1
        for stream, ticket in zip(self._streams, tickets, strict=True):
            assert library.megamoe_wait(stream, ticket, 20 * 10**9)

    def close(self) -> None:
        for stream in self._streams:
            host.library().megamoe_stream_destroy(stream)
        for rank in self._ranks:
            host.library().megamoe_rank_destroy(rank)


def inputs_of(config: MegaMoEConfig, num_tokens: int, routing: str = "uniform", seed: int = 1) -> list[RankInputs]:
    generator = torch.Generator().manual_seed(seed)
    return [proof.random_inputs(config, num_tokens, routing, generator) for _ in range(config.num_ranks)]


def test_accepts_what_the_host_target_leaves() -> None:
    config = proof.small_config(NUM_RANKS, 512)
    ranks = HostRanks(config)
    checker = proof.Checker(ranks)
    routings = ("uniform", "masked", "one", "empty", "uniform", "masked")
    for index, (routing, num_tokens) in enumerate(zip(routings, (48, 192, 100, 8, 0, 1), strict=True)):
        inputs = inputs_of(config, num_tokens, routing, index)
        ranks.run(Stage.DISPATCH, inputs)
        checker.check(inputs, Stage.DISPATCH, index + 1)
    ranks.run(Stage.INTERFACE, inputs)
    checker.check(inputs, Stage.INTERFACE, len(routings) + 1)
    assert checker.compared > 1_000_000
    ranks.close()


@pytest.mark.parametrize(
    ("region", "index"),
    [
        ("l1_acts", (0, 511)),
        ("l1_acts_sf", (0, 3)),
        ("l1_topk_weights", (0,)),
        ("token_src_metadata", (0, 1)),
        ("pool_blocks", (0, 1)),
        ("expert_recv_count_sum", (3,)),
        ("l1_arrival_count", (1, 0)),
        ("l1_arrival_count", (0, 0)),
        ("l2_arrival_mask", (1, 0, 0)),
        ("expert_progress", (1, 2)),
        ("claims", (0, 3, 0)),
        ("expert_done", (5,)),
        ("epoch", (0,)),
        ("in_use", (0,)),
        ("abort", (0,)),
        ("fault_count", (0,)),
        ("launch_decisions", (1, 0)),
    ],
)
def test_sees_one_changed_value(region: str, index: tuple[int, ...]) -> None:
    config = proof.small_config(NUM_RANKS, 512)
    ranks = HostRanks(config)
    checker = proof.Checker(ranks)
    inputs = inputs_of(config, 48)
    ranks.run(Stage.DISPATCH, inputs)
    view = ranks.view(NUM_RANKS - 1, region)
    if view.dtype == E4M3:
        view = view.view(torch.uint8)
    view[index] += 1
    with pytest.raises(proof.Mismatch, match=region):
        checker.check(inputs, Stage.DISPATCH, 1)
    ranks.close()


def test_sees_a_host_status_that_was_not_written() -> None:
    config = proof.small_config(NUM_RANKS, 512)
    ranks = HostRanks(config)
    checker = proof.Checker(ranks)
    inputs = inputs_of(config, 8)
    ranks.run(Stage.DISPATCH, inputs)
    ranks.status[1].words.completed_epoch = 0
    with pytest.raises(proof.Mismatch, match="host status"):
        checker.check(inputs, Stage.DISPATCH, 1)
    ranks.close()


def test_y_is_compared_bitwise_and_nan_rows_must_be_nan() -> None:
    config = proof.small_config(2, 512)
    inputs = inputs_of(config, 16, "masked")[0]
    inputs.topk_idx[3, 1] = config.num_experts
    y = combine(config, inputs, proof.expected_partials(config, inputs))
    proof.check_y(config, "y", y, inputs)
    changed = y.clone()
    changed.view(torch.int16)[5, 500] ^= 1
    with pytest.raises(proof.Mismatch, match="1 of"):
        proof.check_y(config, "y", changed, inputs)
    finite = y.clone()
    finite[3] = 0
    with pytest.raises(proof.Mismatch, match="must be NaN"):
        proof.check_y(config, "y", finite, inputs)


def test_inputs_hold_no_nan_and_every_other_value() -> None:
    config = proof.small_config(2, 7168)
    inputs = inputs_of(config, 8)[0]
    assert len(inputs.x.view(torch.uint8).unique()) == 254
    assert not bool(inputs.x.float().isnan().any())
