"""Small random MoE layers, saved as published checkpoints are, and the transformers blocks with the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megamoe.quant import dequantize_weights, quantize_weights

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, LAYERS, LAYER = 256, 128, 16, 4, 4, 2

DEEPSEEK_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": TOPK,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
}
QWEN_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "hidden_act": "silu",
}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class SmallLayer:
    """One MoE layer with random weights, every value exact in bf16. ``experts[e][projection]`` is fp32 [out, in]."""

    config: Mapping[str, Any]
    gate: Tensor
    bias: Tensor | None
    experts: list[dict[str, Tensor]] = field(repr=False)

    @property
    def prefix(self) -> str:
        return f"model.layers.{LAYER}.mlp"


def random_layer(model_type: str, seed: int = 0, **changes: Any) -> SmallLayer:
    config = {**(DEEPSEEK_CONFIG if model_type == "deepseek_v3" else QWEN_CONFIG), **changes}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()

    experts = [
        {
            "gate_proj": normal(INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
            "up_proj": normal(INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
            "down_proj": normal(HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        }
        for _ in range(EXPERTS)
    ]
    bias = normal(EXPERTS, scale=0.2) if model_type == "deepseek_v3" else None
    return SmallLayer(config, normal(EXPERTS, HIDDEN, scale=HIDDEN**-0.5), bias, experts)


def random_hidden(tokens: int, seed: int = 1) -> Tensor:
    """bf16 [tokens, HIDDEN]."""
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer_tensors(layer: SmallLayer, *, fp8: bool, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The layer's tensors under their published names."""
    tensors = {f"{layer.prefix}.gate.weight": layer.gate.bfloat16()}
    if layer.bias is not None:
        tensors[f"{layer.prefix}.gate.e_score_correction_bias"] = layer.bias
    for number, expert in enumerate(layer.experts):
        for projection, weight in expert.items():
            name = f"{layer.prefix}.experts.{number}.{projection}.weight"
            if fp8:
                quantised, scale = quantize_weights(weight)
                tensors |= {name: quantised, f"{name}_scale_inv": scale.to(scale_dtype)}
            else:
                tensors[name] = weight.bfloat16()
    return tensors


def as_the_layer_has_it(layer: SmallLayer, scale_dtype: torch.dtype) -> SmallLayer:
    """The same layer with the weights that 128 x 128 blocks of e4m3 leave of it, in fp32."""
    experts = []
    for expert in layer.experts:
        quantised = {name: quantize_weights(weight) for name, weight in expert.items()}
        experts.append(
            {
                name: dequantize_weights(q, sf.to(scale_dtype).float(), torch.float32)
                for name, (q, sf) in quantised.items()
            }
        )
    return replace(layer, experts=experts)


def save_checkpoint(
    folder: Path,
    layer: SmallLayer,
    *,
    fp8: bool = False,
    num_shards: int = 1,
    scale_dtype: torch.dtype = torch.float32,
    without: str | None = None,
    replaced: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes config.json and the layer: one file, or ``num_shards`` shards with an index, tensors dealt out in order.

    ``without`` leaves one tensor out; ``replaced`` puts others in their place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**layer.config, "quantization_config": FP8_CONFIG} if fp8 else dict(layer.config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = layer_tensors(layer, fp8=fp8, scale_dtype=scale_dtype)
    tensors |= replaced or {}
    if without is not None:
        del tensors[without]
    # What a real checkpoint holds besides this layer; nothing may depend on it.
    tensors["model.embed_tokens.weight"] = torch.zeros(8, HIDDEN, dtype=torch.bfloat16)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    weight_map = {
        name: f"model-{1 + position * num_shards // len(names):05}-of-{num_shards:05}.safetensors"
        for position, name in enumerate(names)
    }
    for shard in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def transformers_block(layer: SmallLayer) -> Any:
    """``DeepseekV3MoE`` or ``Qwen3MoeSparseMoeBlock`` of the transformers library in fp32 with the layer's weights."""
    if layer.bias is not None:
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

        block = DeepseekV3MoE(DeepseekV3Config(**layer.config))
        block.gate.e_score_correction_bias.copy_(layer.bias)
    else:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**layer.config))
    gate_up = torch.stack([torch.cat((e["gate_proj"], e["up_proj"])) for e in layer.experts])
    with torch.no_grad():
        block.gate.weight.copy_(layer.gate)
        block.experts.gate_up_proj.copy_(gate_up)
        block.experts.down_proj.copy_(torch.stack([e["down_proj"] for e in layer.experts]))
        for parameter in getattr(block, "shared_experts", nn.Module()).parameters():
            parameter.normal_(std=0.05)
    return block.eval()


@torch.no_grad()
def transformers_routed(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y of the routed experts only, topk_idx, topk_weights) of the transformers block for bf16 [tokens, hidden]."""
    x = hidden_states.float()
    y = block(x.unsqueeze(0)).squeeze(0)
    if hasattr(block, "shared_experts"):
        y = y - block.shared_experts(x)
    _, topk_weights, topk_idx = block.gate(x)
    return y, topk_idx, topk_weights
