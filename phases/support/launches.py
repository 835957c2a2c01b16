"""Buffers and launches of a step. Every launch starts from poisoned views: nothing old can pass for an answer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.hang import announce_fault
from harness.spec import DEVICE_WAIT_S
from megamoe import (
    DebugWindow,
    L1Weights,
    L2Weights,
    MegaMoEConfig,
    MegaMoEFault,
    Schedule,
    Stage,
    SymmBuffer,
    VirtualSymmBuffer,
    get_symm_buffer_for_mega_moe,
    launch_mega_moe,
)
from megamoe.inspect import describe_counters
from megamoe.inspect.dump import LaunchFacts
from megamoe.reference import RankInputs, as_bits
from phases.support.dumps import ViewDumps, answer_for, note_launch
from phases.support.inputs import Tokens, make_weights
from phases.support.ranks import Ranks

POISONED = (
    "l1_acts",
    "l1_acts_sf",
    "l1_topk_weights",
    "token_src_metadata",
    "l1_accum_debug",
    "l2_acts",
    "l2_acts_sf",
    "combine",
)
"""What a launch writes with data, not with counters: all bits set before it, which is NaN in every float there is."""


@dataclass(frozen=True)
class Options:
    """How to launch.

    Attributes:
        stage: where to stop.
        windows: of L1 accumulators to write, by rank; None: no debug output.
        weights_kind: see ``inputs.natural_weights``.
        activation_clamp: of SwiGLU; None: no clamp.
        count_on_device: give y the buffer's capacity, and the number of tokens as an int32 tensor.
        receive_stats: to which the routes received are added, by rank; None: none.
        in_step: wait for the other processes first. Ranks that are late because they still compare must not look like
            ranks that hang, and no rank may poison what another one still reads; without this nothing is compared
            between launches.
    """

    stage: Stage = Stage.COMBINE
    windows: Mapping[int, DebugWindow] | None = None
    weights_kind: str = "normal"
    activation_clamp: float | None = None
    count_on_device: bool = False
    receive_stats: Mapping[int, Tensor] | None = None
    in_step: bool = True


WHOLE_LAYER = Options()


@dataclass(frozen=True)
class Launch:
    """One launch of all ranks.

    Attributes:
        inputs: every rank's inputs, also of ranks in other processes.
        buffers, y, counts: by rank, of the ranks in this process; ``counts`` are int32 [1].
    """

    config: MegaMoEConfig
    options: Options
    inputs: Sequence[RankInputs]
    buffers: Mapping[int, SymmBuffer]
    y: Mapping[int, Tensor]
    counts: Mapping[int, Tensor]

    @property
    def stage(self) -> Stage:
        return self.options.stage

    def answer(self, rank: int) -> Tensor:
        """bf16 [n, H]: y of a rank here, as far as it has tokens."""
        return self.y[rank][: self.inputs[rank].num_tokens]

    @property
    def windows(self) -> Mapping[int, DebugWindow]:
        return self.options.windows or {}

    def facts(self, case: str, target: str, num_tokens: Sequence[int], bounds: Mapping[str, str]) -> LaunchFacts:
        """For a dump: what was asked of this launch. ``bounds`` by view, against the oracle."""
        return LaunchFacts(
            num_tokens=tuple(num_tokens),
            stage=int(self.stage),
            case=case,
            target=target,
            windows={rank: (window.row_block, window.column_block) for rank, window in self.windows.items()},
            activation_clamp=self.options.activation_clamp,
            weights_kind=self.options.weights_kind,
            bounds=bounds,
        )


@dataclass
class Launcher:
    """Opens each buffer once, keeps the weights of the ranks here, and launches on all of them."""

    ranks: Ranks
    max_ctas: int | None = None
    case: str = ""
    """The case variant that launches, for whoever finds it hanging."""
    dumps: ViewDumps = field(default_factory=ViewDumps)
    _buffers: dict[MegaMoEConfig, SymmBuffer | VirtualSymmBuffer] = field(default_factory=dict)
    _weights: dict[tuple[object, ...], tuple[L1Weights, L2Weights]] = field(default_factory=dict)

    def buffers(self, config: MegaMoEConfig) -> dict[int, SymmBuffer]:
        """By rank, of the ranks here. Collective at the first call for a config."""
        if config not in self._buffers:
            self._buffers[config] = open_buffer(self.ranks, config, self.max_ctas)
        opened = self._buffers[config]
        return {buffer.rank: buffer for buffer in (opened.ranks if isinstance(opened, VirtualSymmBuffer) else [opened])}

    def weights(self, config: MegaMoEConfig, rank: int, kind: str = "normal") -> tuple[L1Weights, L2Weights]:
        """Of a rank here, on its device."""
        shape = (config.num_experts, config.num_ranks, config.hidden, config.intermediate_hidden, rank, kind)
        if shape not in self._weights:
            self._weights[shape] = make_weights(config, rank, kind, self.buffers(config)[rank].device)
        return self._weights[shape]

    def launch(self, config: MegaMoEConfig, tokens: Sequence[Tokens], options: Options = WHOLE_LAYER) -> Launch:
        """Poison and fill the views of every rank here, launch every rank, wait for all.

        Args:
            tokens: of every rank of the group; those of the ranks here are used.

        Raises:
            MegaMoEFault: after the counters of every rank here were printed.
        """
        launch = self.prepare(config, tokens, options)
        self.queue(launch)
        wait(launch.buffers.values())
        return launch

    def prepare(self, config: MegaMoEConfig, tokens: Sequence[Tokens], options: Options = WHOLE_LAYER) -> Launch:
        """A launch whose inputs are in place and whose outputs are poisoned."""
        buffers = self.buffers(config)
        for rank in buffers:
            self.weights(config, rank, options.weights_kind)  # outside what the ranks wait for
        if options.in_step:
            self.ranks.barrier()
        y, counts = {}, {}
        for rank, buffer in buffers.items():
            rows = config.num_max_tokens_per_rank if options.count_on_device else tokens[rank].num_tokens
            y[rank] = torch.empty((rows, config.hidden), dtype=torch.bfloat16, device=buffer.device)
            counts[rank] = torch.zeros(1, dtype=torch.int32, device=buffer.device)
        launch = Launch(config, options, [given.quantised() for given in tokens], buffers, y, counts)
        self.fill(launch, tokens)
        return launch

    def fill(self, launch: Launch, tokens: Sequence[Tokens]) -> None:
        """Put other tokens and poison into the tensors of a launch. Not while it is under way."""
        note_launch(launch.config, launch.facts(self.case, self.ranks.target, [t.num_tokens for t in tokens], {}))
        for rank, buffer in launch.buffers.items():
            poison(buffer)
            given = tokens[rank]
            buffer.fill(*(part.to(buffer.device) for part in (given.x, given.topk_idx, given.topk_weights)))
            launch.y[rank].fill_(torch.nan)
            launch.counts[rank].fill_(given.num_tokens)

    def queue(self, launch: Launch) -> None:
        """Launch every rank here, without waiting."""
        options = launch.options
        for rank, buffer in launch.buffers.items():
            launch_mega_moe(
                launch.y[rank],
                *self.weights(launch.config, rank, options.weights_kind),
                buffer,
                None if options.receive_stats is None else options.receive_stats[rank],
                activation_clamp=options.activation_clamp,
                num_tokens=launch.counts[rank] if options.count_on_device else None,
                stage=options.stage,
                debug=None if options.windows is None else options.windows[rank],
            )

    def forget(self, config: MegaMoEConfig) -> None:
        """Give back a config's buffer, and all weights."""
        self.close(config)
        self._weights.clear()

    def close(self, config: MegaMoEConfig | None = None) -> None:
        """Close the buffer of a config, or all."""
        for closing in [config] if config is not None else list(self._buffers):
            self._buffers.pop(closing).close()


def open_buffer(ranks: Ranks, config: MegaMoEConfig, max_ctas: int | None = None) -> SymmBuffer | VirtualSymmBuffer:
    """The buffer of a group for a config. Collective."""
    opened: SymmBuffer | VirtualSymmBuffer = get_symm_buffer_for_mega_moe(
        ranks.group,
        config.num_experts,
        config.num_max_tokens_per_rank,
        config.num_topk,
        config.hidden,
        config.intermediate_hidden,
        l2_sf_granularity=config.l2_sf_granularity,
        pool_rows=config.pool_rows,
        timeout_s=float(os.environ.get("MEGAMOE_TIMEOUT_S", DEVICE_WAIT_S)),
        max_ctas=max_ctas,
        schedule=Schedule(config.block_m, config.l1_block_n, config.l2_block_n),
        accumulate=config.accumulate,
    )
    if opened.config != config:
        raise ValueError(f"the buffer's config is {opened.config}, expected {config}: unset MEGAMOE_CONFIG")
    answer_for(opened.ranks if isinstance(opened, VirtualSymmBuffer) else [opened])
    return opened


def poison(buffer: SymmBuffer) -> None:
    """Set all bits of what a launch writes. Not while a launch of any rank is under way."""
    buffer.topk_idx.zero_()  # a valid expert: rows beyond the launch's tokens must not be looked at
    for name in POISONED:
        as_bits(buffer.view(name)).fill_(0xFF if name in ("l1_acts", "l2_acts") else -1)


def wait(buffers: Iterable[SymmBuffer]) -> None:
    """Wait for every rank here; after a fault say what each of them had counted, and raise the first one."""
    first: MegaMoEFault | None = None
    opened = list(buffers)
    for buffer in opened:
        try:
            buffer.check()
        except MegaMoEFault as fault:
            first = first or fault
            print(f"rank {buffer.rank}: {fault}", flush=True)
    if first is None:
        return
    if first.aborted_epoch:
        announce_fault(str(first))
    for buffer in opened:
        print(describe_counters(buffer), flush=True)
    raise first
