"""Proof of the protocol on GPUs: ``python3 -m megamoe.protocol_proof --ranks 2,8 --gpus 1``.

Runs csrc/sm90/protocol_proof.cu between virtual ranks on one GPU or over several, and compares on the CPU every byte
that the protocol leaves behind: pool, counts, table, arrivals, masks, banks, epochs, results and fault records. Exits 1
where something differs, 3 where a launch did not end within its deadline, 2 where there is no such machine.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megamoe import reference
from megamoe.config import SCALE_BLOCK, MegaMoEConfig, Stage
from megamoe.faults import Fault, FaultKind, WaitFor
from megamoe.proof_ranks import Call, ProofRanks, grid_identity_is_usable, identity_numbers, load_module
from megamoe.quant import E4M3
from megamoe.reference import RankInputs

TOKEN_COUNTS = (0, 0, 1, 7, 8, 33, 48, 100, 192)
FEW_TOKENS = (0, 1, 1, 7, 8, 8, 16, 33)
LONG_ROW = 4096
"""From this hidden on most launches have few tokens, so that the comparison does not take minutes."""
STAGES = (
    Stage.COMBINE,
    Stage.DISPATCH,
    Stage.L2_GEMM,
    Stage.L1_EPILOGUE,
    Stage.COMBINE,
    Stage.L1_GEMM,
    Stage.INTERFACE,
)
COLUMN_FACTORS = 7
"""csrc/sm90/protocol_proof.cu multiplies the tile of columns ``n`` by ``1 + n % 7``."""


class Mismatch(Exception):
    """The GPU left something else behind than it had to."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Mismatch(message)


def require_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Bitwise, whatever the dtype; the message counts and names what differs."""
    require(actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.is_floating_point():
        actual, expected = _bits(actual), _bits(expected)
    if torch.equal(actual, expected):
        return
    wrong = (actual != expected).nonzero()
    first = tuple(wrong[0].tolist())
    raise Mismatch(
        f"{name}: {len(wrong)} of {actual.numel()} wrong, first at {first}: got {actual[first].item():#x}, "
        f"expected {expected[first].item():#x}"
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


# --- inputs and what must come of them ---------------------------------------------------------------------------


def random_inputs(config: MegaMoEConfig, num_tokens: int, routing: str, generator: torch.Generator) -> RankInputs:
    """Any e4m3 value but NaN; ``routing`` is uniform, one (all to one expert), masked (a third), remote or empty."""
    codes = torch.randint(0, 254, (num_tokens, config.hidden), generator=generator, dtype=torch.uint8)
    codes += (codes >= 0x7F).to(torch.uint8)  # leaves out 0x7f; 0xff is never drawn
    shape = (num_tokens, config.num_topk)
    topk_idx = torch.randint(0, config.num_experts, shape, generator=generator)
    if routing == "one":
        topk_idx.fill_(int(torch.randint(0, config.num_experts, (1,), generator=generator)))
    elif routing == "masked":
        topk_idx[torch.rand(shape, generator=generator) < 0.33] = -1
    elif routing == "empty":
        topk_idx.fill_(-7)
    return RankInputs(
        codes.view(E4M3),
        torch.rand((num_tokens, config.hidden_scales), generator=generator) + 0.5,
        topk_idx,
        torch.rand(shape, generator=generator),
    )


def first_tokens(inputs: RankInputs, num_tokens: int) -> RankInputs:
    return RankInputs(
        inputs.x[:num_tokens], inputs.x_sf[:num_tokens], inputs.topk_idx[:num_tokens], inputs.topk_weights[:num_tokens]
    )


def expected_partials(config: MegaMoEConfig, inputs: RankInputs) -> Tensor:
    """bf16 [K, n, H]: what the stand-in tiles scatter for each slot and token, in their order of operations."""
    x = inputs.x.float()
    total = torch.zeros((inputs.num_tokens, config.num_topk, SCALE_BLOCK))
    for group in range(config.intermediate_scales):
        source = group % config.hidden_scales
        scale = inputs.x_sf[:, source, None] * inputs.topk_weights
        product = x[:, None, source * SCALE_BLOCK : (source + 1) * SCALE_BLOCK] * scale[:, :, None]
        total = total + product
    factors = (1 + torch.arange(config.num_l2_tiles) % COLUMN_FACTORS).float()
    partial = (total[:, :, None, :] * factors[:, None]).bfloat16()
    return partial.reshape(inputs.num_tokens, config.num_topk, config.hidden).transpose(0, 1)


def check_y(config: MegaMoEConfig, name: str, y: Tensor, inputs: RankInputs) -> None:
    expected = reference.combine(config, inputs, expected_partials(config, inputs))
    nan_rows = expected.isnan().all(dim=1)
    require(bool(y[nan_rows].isnan().all()), f"{name}: a row that must be NaN is not")
    require_equal(name, y[~nan_rows], expected[~nan_rows])


@dataclass
class Checker:
    """Compares what a launch of all ranks left in the buffers. Counts what it compared."""

    ranks: ProofRanks
    compared: int = 0
    done: dict[tuple[int, int], int] = field(default_factory=dict)
    """(source rank, global expert) -> the last epoch in which it was told done."""

    def __post_init__(self) -> None:
        for rank in range(self.ranks.config.num_ranks):
            for expert, word in enumerate(self.ranks.fetch(rank, "expert_done").tolist()):
                self.done[rank, expert] = word >> 32

    def equal(self, name: str, actual: Tensor, expected: Tensor) -> None:
        require_equal(name, actual, expected)
        self.compared += actual.numel()

    def note_done(self, inputs: Sequence[RankInputs], epoch: int) -> None:
        """The routes of a launch say whom its owners tell that they are done."""
        experts = self.ranks.config.num_experts
        for source, given in enumerate(inputs):
            for expert in given.topk_idx[(given.topk_idx >= 0) & (given.topk_idx < experts)].unique().tolist():
                self.done[source, expert] = epoch

    def check(
        self, inputs: Sequence[RankInputs], stage: Stage, epoch: int, *, faults: Sequence[int] | None = None
    ) -> None:
        for rank in range(self.ranks.config.num_ranks):
            self.check_control(rank, epoch, faults[rank] if faults else 0)
        if stage >= Stage.DISPATCH:
            self.note_done(inputs, epoch)
        for rank in range(self.ranks.config.num_ranks):
            if stage >= Stage.DISPATCH:
                self._owner(rank, inputs, stage, epoch)
                self._source(rank, epoch)
                if stage >= Stage.L2_GEMM:
                    self._partials(rank, inputs[rank])

    def check_control(self, rank: int, epoch: int, faults: int) -> None:
        ranks, name = self.ranks, f"epoch {epoch} rank {rank}"
        for region, value in (("epoch", epoch), ("in_use", 0), ("abort", 0), ("fault_count", faults)):
            seen = int(ranks.fetch(rank, region)[0])
            if region == "fault_count" and seen != value:
                raise Mismatch(f"{name} {region}: got {seen}, expected {value}; {ranks.fault_text(rank)}")
            require(seen == value, f"{name} {region}: got {seen}, expected {value}")
        words = ranks.status[rank].words
        seen_words = (words.completed_epoch, words.aborted_epoch, words.fault_count)
        require(
            seen_words == (epoch, 0, faults), f"{name} host status: got {seen_words}, expected {(epoch, 0, faults)}"
        )
        require(not bool(ranks.fetch(rank, "launch_decisions").any()), f"{name} launch_decisions: one was left behind")
        for region in ("claims", "l1_arrival_count", "l2_arrival_mask", "expert_progress"):
            cleared = ranks.fetch(rank, region)[(epoch + 1) % 2]
            self.equal(f"{name} {region}, next bank", cleared, torch.zeros_like(cleared))

    def _owner(self, rank: int, inputs: Sequence[RankInputs], stage: Stage, epoch: int) -> None:
        ranks, config, name = self.ranks, self.ranks.config, f"epoch {epoch} {stage.name} rank {rank}"
        pool = reference.dispatch(config, inputs, rank)
        blocks = pool.num_blocks
        self.equal(
            f"{name} expert_recv_count_sum",
            ranks.fetch(rank, "expert_recv_count_sum"),
            pool.expert_counts + (epoch << 32),
        )
        block_table = torch.stack([pool.block_expert, pool.block_rows], dim=1).int()
        self.equal(f"{name} pool_blocks", ranks.fetch(rank, "pool_blocks", blocks), block_table)
        arrived = ranks.fetch(rank, "l1_arrival_count")[epoch % 2]
        self.equal(f"{name} l1_arrival_count", arrived, _padded(pool.block_rows.int(), len(arrived)))
        masks = ranks.fetch(rank, "l2_arrival_mask")[epoch % 2]
        self.equal(
            f"{name} l2_arrival_mask", masks, self._expected_masks(masks, blocks if stage >= Stage.L1_EPILOGUE else 0)
        )
        of_expert = torch.bincount(pool.block_expert, minlength=config.experts_per_rank)
        steps = of_expert * config.num_l2_tiles if stage >= Stage.L2_GEMM else pool.expert_counts
        self.equal(f"{name} expert_progress", ranks.fetch(rank, "expert_progress")[epoch % 2], steps.int())
        used, rows = blocks * config.block_m, pool.rows
        for region, expected in (
            ("l1_acts", pool.x),
            ("l1_acts_sf", pool.x_sf),
            ("l1_topk_weights", pool.topk_weights),
            ("token_src_metadata", torch.stack([pool.source, pool.token, pool.slot], dim=1).int()),
        ):
            self.equal(f"{name} {region}", _rows(ranks.fetch(rank, region, used), rows), expected)
        if stage >= Stage.L1_EPILOGUE:
            groups = torch.arange(config.intermediate_scales) % config.hidden_scales
            columns = torch.arange(config.intermediate_hidden) % config.hidden
            expected_sf = pool.x_sf[:, groups] * pool.topk_weights[:, None]
            self.equal(f"{name} l2_acts_sf", ranks.fetch(rank, "l2_acts_sf", used)[rows], expected_sf)
            self.equal(
                f"{name} l2_acts",
                _rows(ranks.fetch(rank, "l2_acts", used), rows).view(torch.uint8),
                pool.x.view(torch.uint8)[:, columns],
            )

    def _expected_masks(self, like: Tensor, blocks: int) -> Tensor:
        masks = torch.zeros_like(like)
        for word in range(like.shape[1]):
            bits = min(64, self.ranks.config.num_l1_tiles - 64 * word)
            masks[:blocks, word] = (1 << bits) - 1 if bits < 64 else -1
        return masks

    def _source(self, rank: int, epoch: int) -> None:
        seen = self.ranks.fetch(rank, "expert_done").tolist()
        for expert, word in enumerate(seen):
            last = self.done.get((rank, expert), 0)
            expected = last << 32 | 1 if last else 0
            require(
                word == expected,
                f"epoch {epoch} rank {rank} expert_done[{expert}]: got {word:#x}, expected {expected:#x}",
            )
        self.compared += len(seen)

    def _partials(self, rank: int, inputs: RankInputs) -> None:
        config = self.ranks.config
        valid = (inputs.topk_idx >= 0) & (inputs.topk_idx < config.num_experts)
        seen = self.ranks.fetch(rank, "combine", config.num_topk, inputs.num_tokens)
        expected = expected_partials(config, inputs)
        self.equal(f"rank {rank} combine", seen[valid.T], expected[valid.T])


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.view(torch.uint8)[rows].view(E4M3) if tensor.dtype == E4M3 else tensor[rows]


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values.new_zeros(length - len(values))])


# --- cases -------------------------------------------------------------------------------------------------------


def small_config(num_ranks: int, hidden: int, **other: int) -> MegaMoEConfig:
    """Four experts a rank. The stand-in tiles need 256-column L1 and 128-column L2 tiles, the defaults."""
    values: dict[str, Any] = {"intermediate_hidden": 384, "num_max_tokens_per_rank": 192, "block_m": 64, **other}
    experts = 4 * num_ranks
    return MegaMoEConfig(num_ranks, experts, min(8, experts), hidden, **values)


@dataclass(frozen=True)
class Setting:
    num_ranks: int
    devices: tuple[int, ...]
    epochs: int
    seed: int

    def ranks(self, config: MegaMoEConfig, *, ctas: int = 16) -> ProofRanks:
        return ProofRanks(config, self.devices, ctas_per_rank=ctas)


def run_epochs(ranks: ProofRanks, checker: Checker, generator: torch.Generator, epochs: int) -> None:
    """One launch after the other, each with new inputs, each compared."""
    config = ranks.config
    for index in range(epochs):
        routing = ("uniform", "uniform", "masked", "one", "uniform", "empty")[index % 6]
        choices = FEW_TOKENS if config.hidden >= LONG_ROW and index % 20 else TOKEN_COUNTS
        counts = _token_counts(config.num_ranks, generator, choices)
        inputs = [random_inputs(config, count, routing, generator) for count in counts]
        stage = STAGES[index % len(STAGES)]
        ranks.fill(inputs)
        ranks.poison_pool()
        call = ranks.prepare(stage, counts)
        started = ranks.epoch
        call.launch()
        ranks.wait()
        checker.check(inputs, stage, started + 1)
        if stage == Stage.COMBINE:
            for rank in range(config.num_ranks):
                check_y(config, f"epoch {started + 1} rank {rank} y", call.y[rank].cpu(), inputs[rank])


def _token_counts(num_ranks: int, generator: torch.Generator, choices: Sequence[int] = TOKEN_COUNTS) -> list[int]:
    return [choices[int(torch.randint(len(choices), (1,), generator=generator))] for _ in range(num_ranks)]


def case_epochs(hidden: int, ctas: int, epochs_share: float = 1.0, **other: int) -> Callable[[Setting], str]:
    def run(setting: Setting) -> str:
        ranks = setting.ranks(small_config(setting.num_ranks, hidden, **other), ctas=ctas)
        checker = Checker(ranks)
        epochs = max(8, int(setting.epochs * epochs_share))
        run_epochs(ranks, checker, torch.Generator().manual_seed(setting.seed), epochs)
        return f"{epochs} epochs, {checker.compared / 1e6:.0f} M values compared"

    return run


def case_burst(setting: Setting) -> str:
    """Launches back to back with different token counts and stages: ranks of two GPUs are then in different epochs."""
    config = small_config(setting.num_ranks, 512)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 1)
    checker, launches = Checker(ranks), 0
    for _ in range(8):
        inputs = [random_inputs(config, 192, "uniform", generator) for _ in range(config.num_ranks)]
        ranks.fill(inputs)
        plans = [_token_counts(config.num_ranks, generator) for _ in range(12)]
        calls = [ranks.prepare(STAGES[i % 5], counts) for i, counts in enumerate(plans)]
        first = ranks.epoch + 1
        for call in calls:
            call.launch()
        ranks.wait()
        for i, (call, counts) in enumerate(zip(calls, plans, strict=True)):
            used = [first_tokens(given, count) for given, count in zip(inputs, counts, strict=True)]
            if i == len(calls) - 1:
                checker.check(used, STAGES[i % 5], first + i)
            else:
                checker.note_done(used, first + i)
            if STAGES[i % 5] == Stage.COMBINE:
                for rank, given in enumerate(used):
                    check_y(config, f"epoch {first + i} rank {rank} y", call.y[rank].cpu(), given)
        launches += len(calls)
    return f"{launches} launches back to back, every y and every last buffer compared"


def case_identity(setting: Setting) -> str:
    """%gridid: the same in all CTAs of a launch, different in every other launch, replays of a graph included."""
    texts = []
    for device in setting.devices:
        eager, replayed, uniform = identity_numbers(device)
        require(uniform, f"GPU {device}: CTAs of one launch saw different %gridid")
        usable = grid_identity_is_usable(device)
        text = f"GPU {device}: {len(set(eager))} of {len(eager)} launches and {len(set(replayed))} of {len(replayed)} "
        text += "replays differ"
        texts.append(text if usable else f"{text}: NOT usable as identity, the host's numbers are used")
        texts.append(f"first {eager[:3]}, replays {replayed[:3]}")
    return "; ".join(texts)


def case_graph(setting: Setting) -> str:
    """A captured launch, replayed with other inputs and with token counts that it reads from device memory."""
    config = small_config(setting.num_ranks, 512)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 2)
    checker, replays = Checker(ranks), 24
    call = ranks.prepare(Stage.COMBINE, [192] * config.num_ranks, counts_in_memory=True, timeout_s=10)
    graphs = call.capture()
    for _ in range(replays):
        counts = _token_counts(config.num_ranks, generator)
        inputs = [random_inputs(config, count, "uniform", generator) for count in counts]
        ranks.fill(inputs)
        call.set_counts(counts)
        epoch = ranks.epoch + 1
        graphs.replay()
        ranks.wait()
        checker.check(inputs, Stage.COMBINE, epoch)
        for rank, given in enumerate(inputs):
            check_y(config, f"epoch {epoch} rank {rank} y", call.y[rank][: counts[rank]].cpu(), given)
    return f"{replays} replays with changing counts"


def _aborted_everywhere(ranks: ProofRanks) -> None:
    for rank in range(ranks.config.num_ranks):
        require(int(ranks.fetch(rank, "abort")[0]) != 0, f"rank {rank} was not told to drain")


def _all_nan(call: Call, which: Sequence[int]) -> None:
    for rank in which:
        require(bool(call.y[rank].isnan().all()), f"y of rank {rank} is not all NaN after a launch that drained")


def _first_fault(ranks: ProofRanks, rank: int) -> Fault:
    faults = ranks.faults(rank)
    counted = int(ranks.fetch(rank, "fault_count")[0])
    require(bool(faults), f"rank {rank} has no fault record ({counted} counted)")
    on_host = ranks.status[rank].words.fault_count
    require(on_host == counted, f"rank {rank}: {on_host} faults in host memory, {counted} in the buffer")
    return faults[0]


def _works_again(ranks: ProofRanks, setting: Setting) -> None:
    """After an abort launches end at once, and after a reset they work."""
    call = ranks.prepare(Stage.COMBINE, [8] * setting.num_ranks, timeout_s=5)
    started = time.monotonic()
    call.launch()
    ranks.wait()
    require(time.monotonic() - started < 0.5, "a launch after an abort did not end at once")
    _all_nan(call, range(setting.num_ranks))
    ranks.reset()
    run_epochs(ranks, Checker(ranks), torch.Generator().manual_seed(setting.seed + 3), 7)


def case_absent(setting: Setting) -> str:
    """One rank does not launch: the others say so in time, drain and end; after a reset all is well."""
    config = small_config(setting.num_ranks, 512)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 4)
    run_epochs(ranks, Checker(ranks), generator, 3)
    absent, timeout_s = setting.num_ranks - 1, 0.5
    present = range(absent)
    ranks.fill([random_inputs(config, 48, "uniform", generator) for _ in range(setting.num_ranks)])
    call = ranks.prepare(Stage.COMBINE, [48] * setting.num_ranks, present=present, timeout_s=timeout_s)
    epoch = ranks.epoch + 1
    started = time.monotonic()
    call.launch()
    ranks.wait()
    seconds = time.monotonic() - started
    require(timeout_s <= seconds < timeout_s + 1, f"the launch ended after {seconds:.2f} s, deadline {timeout_s} s")
    _aborted_everywhere(ranks)
    _all_nan(call, present)
    recorded = [rank for rank in present if int(ranks.fetch(rank, "fault_count")[0])]
    require(bool(recorded), "no rank recorded the absence")
    for rank in recorded:
        fault = _first_fault(ranks, rank)
        seen = (fault.kind, fault.wait, fault.rank, fault.peer, fault.epoch, fault.expected, fault.seen >> 32)
        wanted = (FaultKind.TIMEOUT, WaitFor.ROUTES, rank, absent, epoch, epoch, epoch - 1)
        require(seen == wanted, f"rank {rank} recorded {fault}, expected {wanted}")
        require(fault.index < config.experts_per_rank, f"rank {rank} recorded {fault}")
        require(timeout_s <= fault.waited_s < timeout_s + 0.1, f"rank {rank} recorded {fault}")
    text = _first_fault(ranks, recorded[0]).describe(config)
    _works_again(ranks, setting)
    return f"{len(recorded)} of {len(present)} ranks: {text}"


def case_bad_id(setting: Setting) -> str:
    """Ids that name no expert: masked, recorded on that rank, NaN rows, and nobody else notices."""
    config = small_config(setting.num_ranks, 512)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 5)
    inputs = [random_inputs(config, 192, "uniform", generator) for _ in range(setting.num_ranks)]
    bad = list(range(3, 192, 5))
    inputs[0].topk_idx[bad, 1] = config.num_experts + 3
    ranks.fill(inputs)
    call = ranks.prepare(Stage.COMBINE, [192] * setting.num_ranks)
    call.launch()
    ranks.wait()
    checker = Checker(ranks)
    checker.check(inputs, Stage.COMBINE, 1, faults=[len(bad)] + [0] * (setting.num_ranks - 1))
    for rank, given in enumerate(inputs):
        check_y(config, f"rank {rank} y", call.y[rank].cpu(), given)
    faults = ranks.faults(0)
    routes = {token * config.num_topk + 1 for token in bad}
    for fault in faults:
        seen = (fault.kind, fault.rank, fault.expected, fault.seen)
        wanted = (FaultKind.INPUT, 0, config.num_experts, config.num_experts + 3)
        require(seen == wanted and fault.index in routes, f"recorded {fault}")
    require(len({fault.index for fault in faults}) == min(32, len(bad)), "a route was recorded twice")
    return f"{len(bad)} ids: {faults[0].describe(config)}"


def case_overflow(setting: Setting) -> str:
    """More routes than the pool has rows for."""
    config = small_config(setting.num_ranks, 512, pool_rows=256)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 6)
    inputs = [random_inputs(config, 192, "uniform", generator) for _ in range(setting.num_ranks)]
    owner = setting.num_ranks // 2
    for given in inputs:
        given.topk_idx.fill_(owner * config.experts_per_rank + 1)
    ranks.fill(inputs)
    call = ranks.prepare(Stage.COMBINE, [192] * setting.num_ranks, timeout_s=2)
    started = time.monotonic()
    call.launch()
    ranks.wait()
    require(time.monotonic() - started < 1, "the launch did not drain at once")
    _aborted_everywhere(ranks)
    _all_nan(call, range(setting.num_ranks))
    fault = _first_fault(ranks, owner)
    rows = -(-setting.num_ranks * 192 * config.num_topk // config.block_m) * config.block_m
    seen = (fault.kind, fault.rank, fault.expected, fault.seen)
    require(seen == (FaultKind.OVERFLOW, owner, 256, rows), f"recorded {fault}, expected {rows} rows of 256")
    text = fault.describe(config)
    ranks.reset()
    few = [random_inputs(config, 1, "one", generator) for _ in range(setting.num_ranks)]
    ranks.fill(few)
    ranks.prepare(Stage.DISPATCH, [1] * setting.num_ranks).launch()
    ranks.wait()
    Checker(ranks).check(few, Stage.DISPATCH, ranks.epoch)
    return text


def case_in_use(setting: Setting) -> str:
    """A second launch on buffers that are in use is refused; the first waits for a late rank, and is right."""
    config = small_config(setting.num_ranks, 512)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 7)
    late = setting.num_ranks - 1
    others = range(late)
    inputs = [random_inputs(config, 48, "uniform", generator) for _ in range(setting.num_ranks)]
    ranks.fill(inputs)
    counts = [48] * setting.num_ranks
    first = ranks.prepare(Stage.COMBINE, counts, present=others, timeout_s=10)
    second = ranks.prepare(Stage.COMBINE, counts, present=others, timeout_s=10, side_stream=True)
    last = ranks.prepare(Stage.COMBINE, counts, present=[late], timeout_s=10, side_stream=True)
    first.launch()
    time.sleep(0.2)
    second.launch()
    ranks.wait(side_stream=True)
    require(not ranks.idle(), "the first launch did not wait for the rank that is late")
    last.launch()
    ranks.wait()
    ranks.wait(side_stream=True)
    _all_nan(second, others)
    Checker(ranks).check(inputs, Stage.COMBINE, 1, faults=[1] * late + [0])
    for rank, given in enumerate(inputs):
        y = (last if rank == late else first).y[rank].cpu()
        check_y(config, f"rank {rank} y", y, given)
    for rank in others:
        fault = _first_fault(ranks, rank)
        require((fault.kind, fault.rank, fault.seen) == (FaultKind.IN_USE, rank, 1), f"rank {rank} recorded {fault}")
    return _first_fault(ranks, 0).describe(config)


# --- figures -----------------------------------------------------------------------------------------------------


def figure_small(setting: Setting) -> str:
    """Launch to end, back to back, with few tokens."""
    config = small_config(setting.num_ranks, 7168)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 8)
    texts = []
    for tokens in (0, 1, 8, 64):
        ranks.fill([random_inputs(config, tokens, "uniform", generator) for _ in range(setting.num_ranks)])
        for stage in (Stage.INTERFACE, Stage.DISPATCH):
            call = ranks.prepare(stage, [tokens] * setting.num_ranks, timed=True)
            microseconds = ranks.time_us(call, 50)
            roles = " ".join(f"{role} {us:.0f}" for role, us in call.role_us().items() if us >= 0.5)
            texts.append(f"\n    {tokens:3d} tokens {stage.name.lower():9s} {microseconds:7.1f} us  {roles}")
    return "microseconds a launch, and of them in each role (mean of the CTAs)" + "".join(texts)


def figure_bandwidth(setting: Setting) -> str:
    """Pull of many rows; where there are several GPUs every route leaves its own."""
    config = small_config(setting.num_ranks, 7168, num_max_tokens_per_rank=2048, block_m=128)
    ranks, generator = setting.ranks(config), torch.Generator().manual_seed(setting.seed + 9)
    local = config.experts_per_rank * setting.num_ranks // len(setting.devices)
    inputs = []
    for rank in range(setting.num_ranks):
        given = random_inputs(config, 2048, "uniform", generator)
        if len(setting.devices) > 1:
            device = setting.devices.index(ranks.device_of[rank])
            given.topk_idx.remainder_(local).add_((device + 1) % len(setting.devices) * local)
        inputs.append(given)
    ranks.fill(inputs)
    call = ranks.prepare(Stage.DISPATCH, [2048] * setting.num_ranks, timed=True)
    microseconds = ranks.time_us(call, 10)
    Checker(ranks).check_control(0, ranks.epoch, 0)
    role_us = call.role_us()
    routes = 2048 * config.num_topk * setting.num_ranks // len(setting.devices)
    gigabytes = routes * (config.hidden + 4 * config.hidden_scales) * 1e-9
    pulled, whole = gigabytes / role_us["pull"] * 1e6, gigabytes / microseconds * 1e6
    where = "over NVLink, both ways at once" if len(setting.devices) > 1 else "within the GPU"
    roles = " ".join(f"{role} {us:.0f}" for role, us in role_us.items())
    return f"{pulled:.0f} GB/s into each GPU {where} ({whole:.0f} of the whole launch, {microseconds:.0f} us: {roles})"


CASES: dict[str, Callable[[Setting], str]] = {
    "identity": case_identity,
    "epochs-512": case_epochs(512, 16),
    "epochs-7168": case_epochs(7168, 16, block_m=128),
    "one-cta": case_epochs(512, 1, 0.2),
    "many-ctas": case_epochs(512, 64, 0.2, block_m=32),
    "two-mask-words": case_epochs(640, 16, 0.1, intermediate_hidden=8448),
    "long-rows": case_epochs(9216, 16, 0.1),
    "burst": case_burst,
    "graph": case_graph,
    "absent-rank": case_absent,
    "bad-id": case_bad_id,
    "overflow": case_overflow,
    "in-use-and-late": case_in_use,
    "small-us": figure_small,
    "bandwidth": figure_bandwidth,
}


def run_case(name: str, setting: Setting) -> bool:
    started = time.monotonic()
    try:
        text, ok = CASES[name](setting), True
    except Mismatch as mismatch:
        text, ok = str(mismatch), False
    seconds = time.monotonic() - started
    mark = "ok  " if ok else "FAIL"
    where = f"{setting.num_ranks} ranks on {len(setting.devices)} GPU{'s' if len(setting.devices) > 1 else ''}"
    print(f"{mark} {where:18s} {name:16s} {seconds:5.1f} s  {text}", flush=True)
    torch.cuda.empty_cache()
    return ok


@cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m megamoe.protocol_proof", description=__doc__)
    parser.add_argument("--ranks", default="2,8", help="numbers of virtual ranks, by commas")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs over which the ranks are dealt")
    parser.add_argument("--epochs", type=int, default=200, help="launches of the long cases")
    parser.add_argument("--cases", default=",".join(CASES), help="cases, by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--watchdog-s", type=float, default=300, help="the process ends itself after this time")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    faulthandler.dump_traceback_later(options.watchdog_s, exit=True)
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cases = options.cases.split(",")
    unknown = sorted(set(cases) - set(CASES))
    if unknown:
        print(f"--cases: {unknown[0]!r} is none of {', '.join(CASES)}", file=sys.stderr)
        return 2
    if found < options.gpus:
        print(f"--gpus {options.gpus}: this machine has {found}", file=sys.stderr)
        return 2
    devices = tuple(range(options.gpus))
    module = load_module(devices)
    for kernel, used in module.artifact.kernels.items():
        print(f"     {kernel}: {used.registers} registers, spills {used.spills}, stack {used.stack_bytes} bytes")
    results = [
        run_case(name, Setting(int(ranks), devices, options.epochs, options.seed))
        for ranks in options.ranks.split(",")
        for name in cases
    ]
    print(f"{sum(results)} of {len(results)} cases passed", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
