"""megamoe: one fused FP8 Mixture-of-Experts layer over expert-parallel ranks, and the harness that gates it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamoe.api import (
        DebugWindow,
        dummy_run,
        fp8_mega_moe,
        get_symm_buffer_for_mega_moe,
        get_symm_buffer_size_for_sm90_mega_moe,
        get_token_alignment_for_sm90_mega_moe,
        launch_mega_moe,
        make_config,
        warmup,
    )
    from megamoe.buffer import SymmBuffer, VirtualSymmBuffer
    from megamoe.config import MegaMoEConfig, Stage
    from megamoe.faults import Fault, MegaMoEFault
    from megamoe.groups import VirtualGroup
    from megamoe.module import MegaMoE
    from megamoe.schedule import Schedule
    from megamoe.weights import (
        L1Weights,
        L2Weights,
        transform_weights_for_mega_moe,
        untransform_weights_for_mega_moe,
    )

__all__ = [
    "DebugWindow",
    "Fault",
    "L1Weights",
    "L2Weights",
    "MegaMoE",
    "MegaMoEConfig",
    "MegaMoEFault",
    "Schedule",
    "Stage",
    "SymmBuffer",
    "VirtualGroup",
    "VirtualSymmBuffer",
    "dummy_run",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_size_for_sm90_mega_moe",
    "get_token_alignment_for_sm90_mega_moe",
    "launch_mega_moe",
    "make_config",
    "transform_weights_for_mega_moe",
    "untransform_weights_for_mega_moe",
    "warmup",
]

# Imported when first asked for: what explains a hang reads layout and counters and has no time to wait for torch.
_HOMES = {
    "DebugWindow": "megamoe.api",
    "dummy_run": "megamoe.api",
    "fp8_mega_moe": "megamoe.api",
    "get_symm_buffer_for_mega_moe": "megamoe.api",
    "get_symm_buffer_size_for_sm90_mega_moe": "megamoe.api",
    "get_token_alignment_for_sm90_mega_moe": "megamoe.api",
    "launch_mega_moe": "megamoe.api",
    "make_config": "megamoe.api",
    "warmup": "megamoe.api",
    "SymmBuffer": "megamoe.buffer",
    "VirtualSymmBuffer": "megamoe.buffer",
    "MegaMoEConfig": "megamoe.config",
    "Stage": "megamoe.config",
    "Fault": "megamoe.faults",
    "MegaMoEFault": "megamoe.faults",
    "VirtualGroup": "megamoe.groups",
    "MegaMoE": "megamoe.module",
    "Schedule": "megamoe.schedule",
    "L1Weights": "megamoe.weights",
    "L2Weights": "megamoe.weights",
    "transform_weights_for_mega_moe": "megamoe.weights",
    "untransform_weights_for_mega_moe": "megamoe.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
