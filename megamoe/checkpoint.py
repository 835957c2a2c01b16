"""Reads one MoE layer of a Hugging Face checkpoint: DeepSeek-V3/R1 and Qwen3-MoE, experts in FP8 blocks or bf16.

A checkpoint is a folder with ``config.json`` and either ``model.safetensors`` or shards listed by
``model.safetensors.index.json``. Tensors are read through memory maps; only the shards that hold what is asked for are
opened, and only the experts asked for are touched. Every problem of the checkpoint is a :class:`CheckpointError` that
names the file or tensor, what is there and what was expected.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.config import SCALE_BLOCK
from megamoe.quant import is_fp32, quantize_weights
from megamoe.routing import RouterConfig
from megamoe.weights import L1Weights, L2Weights, transform_weights_for_mega_moe

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpertTensors",
    "MoELayer",
    "describe_layer",
    "load_experts",
    "quantize_expert",
    "read_expert",
    "read_router",
]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F32", "BF16")
_EXPERT_DTYPES = ("F8_E4M3", "BF16")


class CheckpointError(ValueError):
    """The checkpoint is not what the layer needs; the message names the file or tensor, and what was expected."""


class Checkpoint:
    """A checkpoint folder. Shards are mapped on first use; ``opened_shards`` lists their names in that order.

    Raises CheckpointError if the folder, ``config.json`` or the tensors' index is missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint {folder}: no such folder")
        self.config: Mapping[str, Any] = _read_json(folder / "config.json")
        self.opened_shards: list[str] = []
        self._handles: dict[str, Any] = {}
        self._shard_of = self._read_index()

    def _read_index(self) -> Mapping[str, str] | None:
        """Shard of each tensor, or None for a checkpoint of one file."""
        index = self.folder / _INDEX
        if index.exists():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index}: no 'weight_map' in it")
            for tensor, shard in weight_map.items():
                if not isinstance(shard, str):
                    raise CheckpointError(f"{index}: {tensor} is in {shard!r}, expected the name of a shard")
            return weight_map
        if (self.folder / _SINGLE).exists():
            return None
        raise CheckpointError(f"checkpoint {self.folder}: neither {_SINGLE} nor {_INDEX} is there")

    @property
    def num_shards(self) -> int:
        return 1 if self._shard_of is None else len(set(self._shard_of.values()))

    def _shard(self, tensor: str) -> str:
        if self._shard_of is None:
            return _SINGLE
        if tensor not in self._shard_of:
            raise CheckpointError(f"tensor {tensor} is missing: {self.folder / _INDEX} does not list it")
        return self._shard_of[tensor]

    def _open(self, shard: str) -> Any:
        if shard not in self._handles:
            path = self.folder / shard
            if not path.exists():
                raise CheckpointError(f"shard {path} is missing")
            try:
                self._handles[shard] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"shard {path} cannot be read as safetensors: {error}") from error
            if shard not in self.opened_shards:
                self.opened_shards.append(shard)
        return self._handles[shard]

    def tensor(self, name: str, shape: Sequence[int], dtypes: Collection[str]) -> Tensor:
        """The tensor as a view of the memory map, after its shape and dtype (safetensors names) are checked."""
        shard = self._shard(name)
        handle = self._open(shard)
        where = self.folder / shard
        try:
            header = handle.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} is missing: {where} does not hold it") from error
        if header.get_dtype() not in dtypes:
            raise CheckpointError(
                f"tensor {name} in {where} has dtype {header.get_dtype()}, expected {' or '.join(dtypes)}"
            )
        if header.get_shape() != list(shape):
            raise CheckpointError(f"tensor {name} in {where} has shape {header.get_shape()}, expected {list(shape)}")
        return handle.get_tensor(name)

    def release(self) -> None:
        """Drops the memory maps that no tensor refers to any more; they are mapped again when needed."""
        self._handles.clear()


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer as ``config.json`` describes it. ``hidden`` and ``intermediate_hidden`` in elements."""

    model_type: str
    layer: int
    hidden: int
    intermediate_hidden: int
    router: RouterConfig
    has_correction_bias: bool

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.layer}.mlp"


def describe_layer(config: Mapping[str, Any], layer: int) -> MoELayer:
    """Reads what ``config.json`` says about ``layer``.

    Raises CheckpointError for an unsupported model, a layer out of range or dense, a quantisation other than FP8 in
    128 x 128 blocks, an activation other than SiLU, sizes that are no multiples of 128.
    """
    model_type = config.get("model_type")
    describe = {"deepseek_v3": _describe_deepseek_v3, "qwen3_moe": _describe_qwen3_moe}.get(str(model_type))
    if describe is None:
        raise CheckpointError(f"config.json: model_type is {model_type!r}, expected 'deepseek_v3' or 'qwen3_moe'")
    num_layers = _integer(config, "num_hidden_layers")
    if not 0 <= layer < num_layers:
        raise CheckpointError(f"layer {layer} is out of range: the model has layers 0 to {num_layers - 1}")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act is {config['hidden_act']!r}, expected 'silu'")
    _check_quantization(config.get("quantization_config"))
    for key in ("hidden_size", "moe_intermediate_size"):
        if _integer(config, key) < 1 or _integer(config, key) % SCALE_BLOCK:
            raise CheckpointError(f"config.json: {key} is {config[key]}, expected a multiple of {SCALE_BLOCK}")
    return describe(config, layer)


def _describe_deepseek_v3(config: Mapping[str, Any], layer: int) -> MoELayer:
    first_moe = _integer(config, "first_k_dense_replace", 0)
    frequency = _step(config, "moe_layer_freq")
    if layer < first_moe:
        raise CheckpointError(f"layer {layer} is dense: first_k_dense_replace is {first_moe}")
    if layer % frequency:
        raise CheckpointError(f"layer {layer} is dense: moe_layer_freq is {frequency}")
    for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key, supported) != supported:
            raise CheckpointError(f"config.json: {key} is {config[key]!r}, expected {supported!r}")
    router = _router(
        scoring="sigmoid",
        num_experts=_integer(config, "n_routed_experts"),
        num_topk=_integer(config, "num_experts_per_tok"),
        normalize_weights=_flag(config, "norm_topk_prob", True),
        routed_scaling_factor=_number(config, "routed_scaling_factor", 1.0),
        num_groups=_integer(config, "n_group", 1),
        topk_groups=_integer(config, "topk_group", 1),
    )
    return _layer(config, layer, router, has_correction_bias=True)


def _describe_qwen3_moe(config: Mapping[str, Any], layer: int) -> MoELayer:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers is {dense!r}, expected a list")
    if layer in dense:
        raise CheckpointError(f"layer {layer} is dense: mlp_only_layers lists it")
    step = _step(config, "decoder_sparse_step")
    if (layer + 1) % step:
        raise CheckpointError(f"layer {layer} is dense: decoder_sparse_step is {step}")
    router = _router(
        scoring="softmax",
        # transformers 5 writes num_local_experts where the published checkpoints have num_experts
        num_experts=_integer(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        num_topk=_integer(config, "num_experts_per_tok"),
        normalize_weights=_flag(config, "norm_topk_prob", False),
    )
    return _layer(config, layer, router, has_correction_bias=False)


def _router(**arguments: Any) -> RouterConfig:
    try:
        return RouterConfig(**arguments)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _layer(config: Mapping[str, Any], layer: int, router: RouterConfig, *, has_correction_bias: bool) -> MoELayer:
    return MoELayer(
        model_type=config["model_type"],
        layer=layer,
        hidden=_integer(config, "hidden_size"),
        intermediate_hidden=_integer(config, "moe_intermediate_size"),
        router=router,
        has_correction_bias=has_correction_bias,
    )


def _check_quantization(quantization: Any) -> None:
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise CheckpointError(f"config.json: quantization_config is {quantization!r}, expected an object")
    method = quantization.get("quant_method")
    if method != "fp8":
        raise CheckpointError(f"config.json: quantization_config.quant_method is {method!r}, expected 'fp8'")
    block = quantization.get("weight_block_size")
    if block != [SCALE_BLOCK, SCALE_BLOCK]:
        raise CheckpointError(
            f"config.json: quantization_config.weight_block_size is {block}, expected [{SCALE_BLOCK}, {SCALE_BLOCK}]"
        )


def read_router(checkpoint: Checkpoint, layer: MoELayer) -> tuple[Tensor, Tensor | None]:
    """Gate weight fp32 [num_experts, hidden] and, for DeepSeek-V3, the correction bias fp32 [num_experts]."""
    num_experts = layer.router.num_experts
    gate = checkpoint.tensor(f"{layer.prefix}.gate.weight", (num_experts, layer.hidden), _FLOATS).float().clone()
    bias = None
    if layer.has_correction_bias:
        name = f"{layer.prefix}.gate.e_score_correction_bias"
        bias = checkpoint.tensor(name, (num_experts,), _FLOATS).float().clone()
    checkpoint.release()
    return gate, bias


@dataclass(frozen=True)
class ExpertTensors:
    """The projections of one expert; ``name`` is the prefix of its tensors.

    ``gate`` and ``up`` [intermediate, hidden], ``down`` [hidden, intermediate]: e4m3, each with its fp32 scales of
    128 x 128 blocks, or bf16 with None.
    """

    name: str
    gate: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


def read_expert(checkpoint: Checkpoint, layer: MoELayer, expert: int) -> ExpertTensors:
    """Copies one expert into memory; the shards it lies in are not kept mapped."""
    name = f"{layer.prefix}.experts.{expert}"
    hidden, intermediate = layer.hidden, layer.intermediate_hidden
    tensors = ExpertTensors(
        name,
        gate=_read_projection(checkpoint, f"{name}.gate_proj", (intermediate, hidden)),
        up=_read_projection(checkpoint, f"{name}.up_proj", (intermediate, hidden)),
        down=_read_projection(checkpoint, f"{name}.down_proj", (hidden, intermediate)),
    )
    checkpoint.release()
    return tensors


def _read_projection(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    weight = checkpoint.tensor(f"{name}.weight", shape, _EXPERT_DTYPES).clone()
    if weight.dtype == torch.bfloat16:
        return weight, None
    if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"tensor {name}.weight holds NaN")
    scale_name = f"{name}.weight_scale_inv"
    scale_shape = (shape[0] // SCALE_BLOCK, shape[1] // SCALE_BLOCK)
    scale = checkpoint.tensor(scale_name, scale_shape, _FLOATS).float().clone()
    if not bool(torch.isfinite(scale).all()):
        raise CheckpointError(f"tensor {scale_name} holds scales that are NaN or infinite")
    return weight, scale


def quantize_expert(expert: ExpertTensors) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The expert in natural order as ``transform_weights_for_mega_moe`` takes it, for one expert.

    Returns ((l1 e4m3 [1, 2 * intermediate, hidden], its scales), (l2 e4m3 [1, hidden, intermediate], its scales)).
    bf16 projections are quantised in 128 x 128 blocks, FP8 ones are kept. Raises CheckpointError for NaN or inf.
    """
    pairs = []
    for projection in ("gate", "up", "down"):
        weight, scale = getattr(expert, projection)
        if scale is None:
            try:
                weight, scale = quantize_weights(weight)
            except ValueError as error:
                raise CheckpointError(f"tensor {expert.name}.{projection}_proj.weight: {error}") from error
        pairs.append((weight, scale))
    gate, up, down = pairs
    l1 = (torch.cat((gate[0], up[0])).unsqueeze(0), torch.cat((gate[1], up[1])).unsqueeze(0))
    return l1, (down[0].unsqueeze(0), down[1].unsqueeze(0))


def load_experts(
    checkpoint: Checkpoint,
    layer: MoELayer,
    experts: range,
    routed: Collection[int],
    *,
    device: torch.device | str = "cpu",
    stage: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
) -> tuple[L1Weights, L2Weights]:
    """The transformed weights of a rank that owns ``experts`` (global ids), ready for ``fp8_mega_moe``.

    Only experts in ``routed`` are read; the others stay zero and, on the CPU, take no memory. ``stage("load")`` and
    ``stage("quantise")`` surround the two kinds of work, for timing.
    """
    hidden, intermediate = layer.hidden, layer.intermediate_hidden
    l1 = L1Weights(
        _zeros((len(experts), 2 * intermediate, hidden), torch.float8_e4m3fn, device),
        _zeros((len(experts), 2 * intermediate // SCALE_BLOCK, hidden // SCALE_BLOCK), torch.float32, device),
    )
    l2 = L2Weights(
        _zeros((len(experts), hidden, intermediate), torch.float8_e4m3fn, device),
        _zeros((len(experts), hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK), torch.float32, device),
    )
    for local, expert in enumerate(experts):
        if expert not in routed:
            continue
        with stage("load"):
            tensors = read_expert(checkpoint, layer, expert)
        with stage("quantise"):
            natural_l1, natural_l2 = quantize_expert(tensors)
        with stage("load"):
            one_l1, one_l2 = transform_weights_for_mega_moe(natural_l1, natural_l2)
            for target, source in zip((*l1, *l2), (*one_l1, *one_l2), strict=True):
                target[local].copy_(source[0])
    return l1, l2


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on the CPU from an anonymous map, whose pages exist only once written (torch.zeros writes them all)."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected an object")
    return content


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json has no {key!r}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}, expected an integer")
    return value


def _step(config: Mapping[str, Any], key: str) -> int:
    """Every how many layers an MoE layer comes."""
    value = _integer(config, key, 1)
    if value < 1:
        raise CheckpointError(f"config.json: {key} is {value}, expected at least 1")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}, expected true or false")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not is_fp32(value):
        raise CheckpointError(f"config.json: {key} is {value!r}, expected a finite number")
    return float(value)
