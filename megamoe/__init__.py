"""megamoe: one fused FP8 Mixture-of-Experts layer over expert-parallel ranks, and the harness that gates it."""

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
