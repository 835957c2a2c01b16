"""The calls a user makes, under the names users of such kernels already know."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.buffer import SymmBuffer, VirtualSymmBuffer, default_timeout_s, open_buffers, withdraw
from megamoe.config import ACCUM_DEBUG_EDGE, SCALE_BLOCK, Accumulate, MegaMoEConfig, Stage, is_count
from megamoe.dynamo import untraced
from megamoe.groups import VirtualGroup, as_group
from megamoe.layout import buffer_layout
from megamoe.quant import FP32, check_memory, describe, is_fp32
from megamoe.schedule import DEFAULT_SCHEDULE, Schedule, override_schedule
from megamoe.targets.host import ROLE_NAMES
from megamoe.weights import L1Weights, L2Weights, check_transformed_weights

RECIPE = (1, SCALE_BLOCK, SCALE_BLOCK)
_LAST_STAGE = int(Stage.COMBINE)
# Unique over processes too: a buffer may be launched on from another process by mistake, and must notice.
_launch_numbers = itertools.count((os.getpid() & 0xFFFFF) << 40 | 1)


@dataclass(frozen=True)
class DebugWindow:
    """Which 128x128 window of the L1 product to write to ``l1_accum_debug``: rows of the pool, columns interleaved."""

    row_block: int = 0
    column_block: int = 0


def make_config(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    l2_sf_granularity: int = 128,
    pool_rows: int | None = None,
    schedule: Schedule | None = None,
    accumulate: Accumulate = "fp32",
) -> MegaMoEConfig:
    """The config of a layer, with the default schedule or the given one, after MEGAMOE_CONFIG.

    Raises:
        ValueError: see MegaMoEConfig.
    """
    tiles = override_schedule(schedule or DEFAULT_SCHEDULE)
    return MegaMoEConfig(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        l2_sf_granularity=l2_sf_granularity,
        pool_rows=pool_rows,
        block_m=tiles.block_m,
        l1_block_n=tiles.l1_block_n,
        l2_block_n=tiles.l2_block_n,
        accumulate=accumulate,
    )


def get_symm_buffer_for_mega_moe(
    group: VirtualGroup | dist.ProcessGroup,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    l2_sf_granularity: int = 128,
    pool_rows: int | None = None,
    timeout_s: float | None = None,
    max_ctas: int | None = None,
    check_every: int | None = None,
    schedule: Schedule | None = None,
    accumulate: Accumulate = "fp32",
) -> Any:
    """Allocate the symmetric buffers of a group. Collective; every rank passes the same numbers.

    Args:
        group: a torch process group (gloo: CPU; NCCL: one GPU a rank) or a VirtualGroup.
        num_experts: experts over all ranks.
        num_max_tokens_per_rank: token capacity of each rank.
        num_topk: routes of a token.
        hidden: model width, a multiple of 128.
        intermediate_hidden: expert width, a multiple of 128.
        l2_sf_granularity: columns of the intermediate that share a scale, 64 or 128.
        pool_rows: pool rows a rank has room for; None: the worst case, which no routing can exceed.
        timeout_s: seconds a wait on the device may take; None: MEGAMOE_TIMEOUT_S, else 300.
        max_ctas: CTAs (host target: worker threads) a launch may use; None: the group's own number.
        check_every: poll for faults, without waiting, at every so many launches.
        schedule: tile shapes; None: the default ones.
        accumulate: how the sums of L1 and L2 are made: ``fp32``, or ``fast`` inside the tensor core, with looser
            bounds; the host target's are exact whatever it says. Every rank passes the same.

    Returns:
        SymmBuffer of this rank, or VirtualSymmBuffer for a VirtualGroup.

    Raises:
        ValueError: a number breaks a rule, or the ranks disagree.
    """
    inner = as_group(group)
    try:
        if max_ctas is not None and not is_count(max_ctas):
            raise ValueError(f"max_ctas must be at least 1 or None, got {max_ctas!r}")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise ValueError(f"schedule: got {schedule!r}, expected a megamoe.Schedule or None")
        config = make_config(
            inner.num_ranks,
            num_experts,
            num_max_tokens_per_rank,
            num_topk,
            hidden,
            intermediate_hidden,
            l2_sf_granularity=l2_sf_granularity,
            pool_rows=pool_rows,
            schedule=schedule,
            accumulate=accumulate,
        )
        timeout = default_timeout_s() if timeout_s is None else timeout_s
    except ValueError as error:
        withdraw(inner, error)  # the others must not wait for this rank
        raise
    return open_buffers(group, config, timeout_s=timeout, check_every=check_every, max_workers=max_ctas)


def get_symm_buffer_size_for_sm90_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    l2_sf_granularity: int = 128,
    pool_rows: int | None = None,
) -> int:
    """Bytes of one rank's symmetric buffer."""
    config = make_config(
        num_ranks,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        l2_sf_granularity=l2_sf_granularity,
        pool_rows=pool_rows,
    )
    return buffer_layout(config).num_bytes


def get_token_alignment_for_sm90_mega_moe() -> int:
    """Rows to which every expert's routes are padded in the pool (block_m of the schedule)."""
    return override_schedule(DEFAULT_SCHEDULE).block_m


@untraced
def fp8_mega_moe(
    y: Tensor,
    l1_weights: L1Weights,
    l2_weights: L2Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    num_tokens: int | Tensor | None = None,
) -> None:
    """Run the layer on the tokens in the views of ``sym_buffer``. Asynchronous; its ``check()`` waits and raises.

    Args:
        y: bf16 [tokens, hidden], contiguous: the answer.
        l1_weights: of ``transform_weights_for_mega_moe``, for this rank's experts.
        l2_weights: likewise.
        sym_buffer: this rank's buffer, its inputs filled.
        cumulative_local_expert_recv_stats: int32 [experts_per_rank], to which the routes received are added.
        recipe: scale granularity of (activations, weight rows, weight columns); only (1, 128, 128).
        activation: only ``swiglu``.
        activation_clamp: c in ``g = min(g, c), u = clamp(u, -c, c)``; None: no clamp.
        fast_math: allow approximate exponential and reciprocal in SwiGLU (the host target has only exact ones).
        num_tokens: tokens to run; None: ``y.shape[0]``; an int32 tensor [1] on the buffer's device is read by the
            launch itself.

    Raises:
        ValueError: an argument does not fit; nothing was launched.
    """
    launch_mega_moe(
        y,
        l1_weights,
        l2_weights,
        sym_buffer,
        cumulative_local_expert_recv_stats,
        recipe,
        activation,
        activation_clamp,
        fast_math,
        num_tokens=num_tokens,
    )


@untraced
def launch_mega_moe(
    y: Tensor,
    l1_weights: L1Weights,
    l2_weights: L2Weights,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    num_tokens: int | Tensor | None = None,
    stage: Stage = Stage.COMBINE,
    debug: DebugWindow | None = None,
    role_times: Tensor | None = None,
    stream: Any = None,
) -> None:
    """``fp8_mega_moe`` with what bring-up needs beside it.

    Args:
        stage: where to stop.
        debug: the window of the L1 product to write to ``l1_accum_debug``; None: none.
        role_times: int64 [number of roles] (``targets.host.ROLE_NAMES``) to which workers add nanoseconds.
        stream: another stream of the target.
    """
    _check_buffer(sym_buffer)
    with sym_buffer.lock:
        sym_buffer._require_open()
        arguments = sym_buffer.arguments
        tokens = _check_y(y, num_tokens, sym_buffer)
        if not sym_buffer.known_weights.put_known(arguments, l1_weights, l2_weights):
            _check_weights(l1_weights, l2_weights, sym_buffer)
            sym_buffer.known_weights.put_new(arguments, l1_weights, l2_weights)
        _check_choices(recipe, activation, activation_clamp, fast_math)
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            _check_stats(stats, sym_buffer)
        word = num_tokens if isinstance(num_tokens, Tensor) else None
        # One struct a buffer, of which every launch sets every field that it reads: making one costs more.
        arguments.y = y.data_ptr() if tokens else 0
        arguments.recv_stats = 0 if stats is None else stats.data_ptr()
        arguments.num_tokens_word = 0 if word is None else word.data_ptr()
        arguments.timeout_ns = int(sym_buffer.timeout_s * 1e9)
        arguments.launch = next(_launch_numbers)
        arguments.num_tokens = tokens
        arguments.has_clamp = activation_clamp is not None
        arguments.activation_clamp = activation_clamp or 0.0
        arguments.fast_math = bool(fast_math)
        arguments.stage = _LAST_STAGE if stage is Stage.COMBINE else _number_of_stage(stage)
        arguments.role_times = 0 if role_times is None else _address_of_role_times(role_times, sym_buffer.device)
        arguments.debug = debug is not None
        if debug is not None:  # else nothing reads the blocks
            _check_debug(debug, sym_buffer.config)
            arguments.debug_row_block, arguments.debug_column_block = debug.row_block, debug.column_block
        sym_buffer.launch(arguments, (y, l1_weights, l2_weights, stats, word, role_times), stream=stream)


def _number_of_stage(stage: Stage) -> int:
    try:
        return int(Stage(stage))
    except ValueError as error:
        raise ValueError(f"stage: got {stage!r}, expected one of {', '.join(map(repr, Stage))}") from error


def _check_buffer(sym_buffer: object) -> None:
    if not isinstance(sym_buffer, SymmBuffer):
        raise ValueError(
            f"sym_buffer: got {type(sym_buffer).__name__}, expected one rank's SymmBuffer"
            + (" (take one of .ranks)" if isinstance(sym_buffer, VirtualSymmBuffer) else "")
        )


def _check_weights(l1_weights: L1Weights, l2_weights: L2Weights, sym_buffer: SymmBuffer) -> None:
    check_transformed_weights(sym_buffer.config, l1_weights, l2_weights)
    for name, tensor in (("l1_weights", l1_weights.weight), ("l2_weights", l2_weights.weight)):
        if tensor.device != sym_buffer.device:
            raise ValueError(f"{name}: got {describe(tensor)}, expected the buffer's device {sym_buffer.device}")
    for name, weights in (("l1_weights", l1_weights), ("l2_weights", l2_weights)):
        for part, tensor in weights._asdict().items():
            check_memory(f"{name}.{part}", tensor)


def dummy_run(l1_weights: L1Weights, l2_weights: L2Weights, sym_buffer: SymmBuffer) -> None:
    """Take part in a launch with no token of one's own, as an idle rank must."""
    _check_buffer(sym_buffer)
    y = torch.empty(0, sym_buffer.config.hidden, dtype=torch.bfloat16, device=sym_buffer.device)
    fp8_mega_moe(y, l1_weights, l2_weights, sym_buffer)


def warmup(sym_buffer: SymmBuffer | VirtualSymmBuffer) -> None:
    """Compile and load everything that launches on this buffer need, before traffic. Collective."""
    buffers = sym_buffer.ranks if isinstance(sym_buffer, VirtualSymmBuffer) else [sym_buffer]
    for buffer in buffers:
        _check_buffer(buffer)
        buffer.load()
    sym_buffer._group.barrier()


def _check_y(y: Tensor, num_tokens: int | Tensor | None, sym_buffer: SymmBuffer) -> int:
    hidden, device = sym_buffer.config.hidden, sym_buffer.device
    rows, columns = y.shape if isinstance(y, Tensor) and y.dim() == 2 else (-1, -1)
    if columns != hidden or y.dtype != torch.bfloat16:
        raise ValueError(f"y: got {describe(y)}, expected bf16 [tokens, {hidden}]")
    if not y.is_contiguous():
        raise ValueError(f"y: got strides {y.stride()} of shape {list(y.shape)}, expected a contiguous tensor")
    if y.device != device:
        raise ValueError(f"y: got {describe(y)}, expected the buffer's device {device}")
    check_memory("y", y)
    sym_buffer.check_num_tokens(rows)
    if num_tokens is None:
        return rows
    if isinstance(num_tokens, Tensor):
        if num_tokens.dtype != torch.int32 or num_tokens.numel() != 1 or num_tokens.device != device:
            raise ValueError(
                f"num_tokens: got {describe(num_tokens)}, expected one int32 on the buffer's device {device}"
            )
        check_memory("num_tokens", num_tokens)
        return rows
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 0 <= num_tokens <= rows:
        raise ValueError(f"num_tokens: got {num_tokens!r}, expected 0 to y.shape[0] = {rows}")
    return num_tokens


def _check_choices(
    recipe: tuple[int, int, int], activation: str, activation_clamp: float | None, fast_math: bool
) -> None:
    if recipe is not RECIPE and (not isinstance(recipe, (tuple, list)) or tuple(recipe) != RECIPE):
        raise ValueError(f"recipe: got {recipe!r}, expected {RECIPE}")
    if activation != "swiglu":
        raise ValueError(f"activation: got {activation!r}, expected 'swiglu'")
    if activation_clamp is not None and not (is_fp32(activation_clamp) and activation_clamp >= FP32.tiny):
        raise ValueError(
            f"activation_clamp: got {activation_clamp!r}, expected a positive finite number or None ({FP32.tiny:.3g} "
            f"to {FP32.max:.3g}, fp32)"
        )
    if not isinstance(fast_math, (bool, int)):
        raise ValueError(f"fast_math: got {fast_math!r}, expected a bool")


def _check_stats(stats: Tensor, sym_buffer: SymmBuffer) -> None:
    shape = (sym_buffer.config.experts_per_rank,)
    if (
        not isinstance(stats, Tensor)
        or stats.dtype != torch.int32
        or tuple(stats.shape) != shape
        or stats.device != sym_buffer.device
        or not stats.is_contiguous()
    ):
        raise ValueError(
            f"cumulative_local_expert_recv_stats: got {describe(stats)}, expected contiguous int32 {list(shape)} on "
            f"{sym_buffer.device}"
        )
    check_memory("cumulative_local_expert_recv_stats", stats)


def _address_of_role_times(role_times: Tensor, device: torch.device) -> int:
    roles = len(ROLE_NAMES)
    if (
        not isinstance(role_times, Tensor)
        or role_times.dtype != torch.int64
        or role_times.numel() < roles
        or not role_times.is_contiguous()
        or role_times.device != device
    ):
        raise ValueError(f"role_times: got {describe(role_times)}, expected contiguous int64 [{roles}] on {device}")
    check_memory("role_times", role_times)
    return role_times.data_ptr()


def _check_debug(debug: DebugWindow, config: MegaMoEConfig) -> None:
    if not isinstance(debug, DebugWindow):
        raise ValueError(f"debug: got {debug!r}, expected a megamoe.DebugWindow or None")
    for name, value, size in (
        ("row_block", debug.row_block, config.num_pool_rows),
        ("column_block", debug.column_block, config.l1_columns),
    ):
        if not isinstance(value, int) or not 0 <= value * ACCUM_DEBUG_EDGE < size:
            raise ValueError(f"debug.{name}: got {value!r}, expected a block of {ACCUM_DEBUG_EDGE} within {size}")
