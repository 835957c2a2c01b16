"""One MoE layer of a checkpoint from file to compared answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

import megamoe
from megamoe.buffer import SymmBuffer
from megamoe.checkpoint import Checkpoint, MoELayer, describe_layer, load_experts, read_router
from megamoe.cli.hidden import Distribution, HiddenStates, generate_hidden, open_hidden
from megamoe.cli.ranks import Ranks, split_tokens
from megamoe.cli.report import (
    StageClock,
    format_error,
    format_facts,
    format_routes,
    format_shards,
    format_times,
    slowest,
)
from megamoe.config import Accumulate, MegaMoEConfig
from megamoe.files import written_whole
from megamoe.reference import RankInputs, compare, moe_layer
from megamoe.routing import Routing, count_routes, route
from megamoe.targets import get_target
from megamoe.weights import L1Weights, L2Weights

DEFAULT_TOKENS = 64

Weights = tuple[L1Weights, L2Weights]


@dataclass(frozen=True)
class LayerRun:
    """What to run; the fields are the options of ``megamoe run``."""

    checkpoint: Path
    layer: int
    ranks: int | None = None
    hidden: Path | None = None
    output: Path | None = None
    tokens: int | None = None
    distribution: Distribution = "normal"
    seed: int = 0
    target: str = "host"
    accumulate: Accumulate = "fp32"
    timeout_s: float | None = None


@dataclass(frozen=True)
class _Loaded:
    """What a process knows before it routes. ``hidden``: rows of each rank that is here."""

    checkpoint: Checkpoint
    layer: MoELayer
    config: MegaMoEConfig
    hidden_from: str
    shares: list[int]
    hidden: Mapping[int, Tensor]
    gate: Tensor
    correction_bias: Tensor | None


def run_layer(ranks: Ranks, settings: LayerRun) -> tuple[list[str], bool]:
    """Runs the layer and returns the lines of the report, and whether y is within the bounds.

    Raises RunError, on every rank, for a call or checkpoint that cannot be run and for a fault of the launch.
    """
    clock = StageClock()
    with ranks.together(), clock("load"):
        ranks.check_requested(settings.ranks)
        loaded = _load(ranks, settings)
    config = loaded.config
    with ranks.together(), clock("route"):
        routings = {
            rank: route(loaded.layer.router, rows, loaded.gate, loaded.correction_bias)
            for rank, rows in loaded.hidden.items()
        }
    per_source = {rank: count_routes(r.topk_idx, config.num_experts).unsqueeze(0) for rank, r in routings.items()}
    histogram = torch.cat(ranks.gather_rows(per_source, [1] * ranks.num_ranks))
    routed = set(histogram.sum(0).nonzero().flatten().tolist())

    buffers: dict[int, SymmBuffer] = {}
    try:
        with ranks.together(), clock("set-up"):
            buffers |= _make_buffers(ranks, settings, config)
        with ranks.together():
            weights = {rank: _load_rank(loaded, rank, routed, buffer.device, clock) for rank, buffer in buffers.items()}
        with ranks.together():
            y, inputs, role_seconds = _launch(loaded, settings.target, buffers, routings, weights, clock)
    finally:
        for buffer in buffers.values():
            buffer.close()

    everyone = _gather_inputs(ranks, inputs, loaded.shares)
    with ranks.together(), clock("oracle"):
        partial = _oracle(config, everyone, weights)
    expected = ranks.sum(partial)
    all_y = torch.cat(ranks.gather_rows({rank: rows.cpu() for rank, rows in y.items()}, loaded.shares))
    comparison = compare("y" if config.accumulate == "fp32" else "y_fast", all_y, expected)
    if settings.output is not None:
        topk_idx = ranks.gather_rows({rank: r.topk_idx for rank, r in routings.items()}, loaded.shares)
        topk_weights = ranks.gather_rows({rank: r.topk_weights for rank, r in routings.items()}, loaded.shares)
        with ranks.together():
            if ranks.speaks:
                save_output(settings.output, all_y, Routing(torch.cat(topk_idx), torch.cat(topk_weights)))
    lines = [
        *format_facts(_facts(ranks, settings, loaded, len(routed))),
        *format_shards(ranks.gather_objects(sorted(loaded.checkpoint.opened_shards)), loaded.checkpoint.num_shards),
        *format_facts([("error", format_error(comparison))]),
        *format_routes(histogram),
        *format_times("time", slowest(ranks.gather_objects(clock.seconds))),
        *_format_roles(settings.target, slowest(ranks.gather_objects(role_seconds))),
    ]
    return lines, comparison.ok


def _load(ranks: Ranks, settings: LayerRun) -> _Loaded:
    if settings.output is not None and not settings.output.parent.is_dir():
        raise ValueError(f"--output {settings.output}: no folder {settings.output.parent}")
    if settings.output is not None and settings.output.exists() and not settings.output.is_file():
        raise ValueError(f"--output {settings.output}: is a folder or a device, expected a file to write")
    if settings.tokens is not None and settings.tokens < 0:
        raise ValueError(f"--tokens is {settings.tokens}, expected 0 or more")
    checkpoint = Checkpoint(settings.checkpoint)
    layer = describe_layer(checkpoint.config, settings.layer)
    source = _hidden_states(settings, layer.hidden)
    shares = split_tokens(source.num_tokens, ranks.num_ranks)
    config = megamoe.make_config(
        num_ranks=ranks.num_ranks,
        num_experts=layer.router.num_experts,
        num_max_tokens_per_rank=max(1, *shares),
        num_topk=layer.router.num_topk,
        hidden=layer.hidden,
        intermediate_hidden=layer.intermediate_hidden,
        accumulate=settings.accumulate,
    )
    gate, correction_bias = read_router(checkpoint, layer)
    starts = [0, *accumulate(shares)]
    hidden = {rank: source.read(starts[rank], starts[rank + 1]) for rank in ranks.here}
    return _Loaded(checkpoint, layer, config, source.description, shares, hidden, gate, correction_bias)


def _hidden_states(settings: LayerRun, hidden: int) -> HiddenStates:
    if settings.hidden is not None:
        return open_hidden(settings.hidden, hidden, settings.tokens)
    num_tokens = DEFAULT_TOKENS if settings.tokens is None else settings.tokens
    return generate_hidden(settings.distribution, settings.seed, hidden, num_tokens)


def _make_buffers(ranks: Ranks, settings: LayerRun, config: MegaMoEConfig) -> dict[int, SymmBuffer]:
    """The buffer of each rank that is here. Collective; compiles the target at its first use."""
    made = megamoe.get_symm_buffer_for_mega_moe(
        megamoe.VirtualGroup(ranks.num_ranks, target=settings.target) if ranks.group is None else ranks.group,
        config.num_experts,
        config.num_max_tokens_per_rank,
        config.num_topk,
        config.hidden,
        config.intermediate_hidden,
        timeout_s=settings.timeout_s,
        accumulate=config.accumulate,
    )
    return dict(enumerate(made.ranks)) if ranks.group is None else {made.rank: made}


def _load_rank(loaded: _Loaded, rank: int, routed: set[int], device: torch.device, clock: StageClock) -> Weights:
    first = rank * loaded.config.experts_per_rank
    experts = range(first, first + loaded.config.experts_per_rank)
    return load_experts(loaded.checkpoint, loaded.layer, experts, routed, device=device, stage=clock)


def _launch(
    loaded: _Loaded,
    target: str,
    buffers: Mapping[int, SymmBuffer],
    routings: Mapping[int, Routing],
    weights: Mapping[int, Weights],
    clock: StageClock,
) -> tuple[dict[int, Tensor], dict[int, RankInputs], dict[str, float]]:
    """By rank that is here: y bf16, and the inputs as its buffer holds them. And the seconds of each role
    whose time the target reports."""
    with clock("quantise"):
        for rank, buffer in buffers.items():
            routing = routings[rank]
            buffer.fill(*(t.to(buffer.device) for t in (loaded.hidden[rank], routing.topk_idx, routing.topk_weights)))
    inputs = {
        rank: RankInputs(*(view[: loaded.shares[rank]].clone() for view in (b.x, b.x_sf, b.topk_idx, b.topk_weights)))
        for rank, b in buffers.items()
    }
    y = {
        rank: torch.empty(loaded.shares[rank], loaded.config.hidden, dtype=torch.bfloat16, device=buffer.device)
        for rank, buffer in buffers.items()
    }
    role_names = get_target(target).ROLE_NAMES
    role_times = {rank: torch.zeros(len(role_names), dtype=torch.int64, device=b.device) for rank, b in buffers.items()}
    with clock("run"):
        for rank, buffer in buffers.items():
            megamoe.launch_mega_moe(
                y[rank], *weights[rank], buffer, role_times=role_times[rank] if role_names else None
            )
        for buffer in buffers.values():
            buffer.check()
    slowest_rank = torch.stack([times.cpu() for times in role_times.values()]).amax(0)
    role_seconds = {
        name: nanoseconds * 1e-9 for name, nanoseconds in zip(role_names, slowest_rank.tolist(), strict=True)
    }
    return y, inputs, role_seconds


def _gather_inputs(ranks: Ranks, inputs: Mapping[int, RankInputs], shares: list[int]) -> list[RankInputs]:
    """The inputs of every rank, on the CPU."""
    columns = [
        ranks.gather_rows({rank: getattr(given, name).cpu() for rank, given in inputs.items()}, shares)
        for name in ("x", "x_sf", "topk_idx", "topk_weights")
    ]
    return [RankInputs(*tensors) for tensors in zip(*columns, strict=True)]


def _oracle(config: MegaMoEConfig, everyone: Sequence[RankInputs], weights: Mapping[int, Weights]) -> Tensor:
    """What the experts of ``weights`` (by owner rank) add to the tokens of all ranks: float64 [tokens, hidden]."""
    owned = torch.zeros(config.num_experts, dtype=torch.bool)
    for rank in weights:
        owned[rank * config.experts_per_rank : (rank + 1) * config.experts_per_rank] = True
    # Routes to other owners are masked, so the weights that stand for theirs are never read.
    stand_in = next(iter(weights.values()))
    device = stand_in[0].weight.device
    masked = [
        RankInputs(
            given.x.to(device),
            given.x_sf.to(device),
            torch.where(owned[given.topk_idx], given.topk_idx, -1).to(device),
            given.topk_weights.to(device),
        )
        for given in everyone
    ]
    y = moe_layer(config, masked, [weights.get(rank, stand_in) for rank in range(config.num_ranks)])
    return torch.cat(y).cpu()


def save_output(given: Path, y: Tensor, routing: Routing) -> None:
    """Write y (bf16 [tokens, hidden]) and its routes ([tokens, num_topk] each) as a safetensors file, whole or not at
    all. Raises ValueError, also for a full disk.

    Not ``save_file``: it says nothing of what a full disk does not take. Not in place: the file of an earlier run may
    be mapped.
    """
    content = save({"y": y, "topk_idx": routing.topk_idx, "topk_weights": routing.topk_weights})
    try:
        with written_whole(given.resolve()) as temporary:  # through links
            temporary.write_bytes(content)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"--output {given}: {error}") from error


def _format_roles(target: str, seconds: Mapping[str, float]) -> list[str]:
    if not get_target(target).ROLE_NAMES:
        return format_facts([("roles", f"target {target} keeps no clock")])
    return format_times("roles", seconds)


def _facts(ranks: Ranks, settings: LayerRun, loaded: _Loaded, num_routed: int) -> list[tuple[str, str]]:
    layer, router = loaded.layer, loaded.layer.router
    shape = f"hidden {layer.hidden}, intermediate {layer.intermediate_hidden}"
    kind = "virtual ranks" if ranks.group is None else "processes"
    return [
        ("layer", f"{settings.checkpoint}, {layer.model_type}, layer {layer.layer}: {shape}"),
        ("experts", f"{router.num_experts}, top-{router.num_topk}, {num_routed} of them routed"),
        ("tokens", f"{' + '.join(map(str, loaded.shares))} ({loaded.hidden_from})"),
        ("ranks", f"{ranks.num_ranks} {kind}, target {settings.target}, accumulate {settings.accumulate}"),
    ]
