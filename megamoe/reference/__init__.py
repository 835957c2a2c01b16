"""The oracle: the MoE layer in torch, float64, expert by expert; slow, obvious, never optimised.

One function a stage, as the kernel has them: `dispatch`, `l1_gemm`, `l1_epilogue`, `quantize_h`, `l2_gemm`, `combine`;
`moe_layer` is all of them. It takes the same fp8 inputs and weights as the kernel and shares no code with its targets.

What is exact float64 and what follows the kernel's roundings:

=============  ====================================================================================================
dispatch       copies; exact
l1_gemm        exact products, float64 sums
l1_epilogue    float64
quantize_h     rounds h to fp32, then the fp32 rule of `megamoe.quant`, as the kernel does
l2_gemm        float64, not rounded to bf16: bounds `combine`, `y` and `y_unquantised` include the kernel's rounding
combine        float64 partials: float64 sum. bf16 partials: fp32 sum in slot order, then bf16, bit for bit the kernel's
               last stage, so that y is `exact` given the kernel's own partials
=============  ====================================================================================================

float64 has no overflow where fp32 has one: the oracle is meant for tokens whose accumulators stay below 3e38.
"""

from megamoe.reference.bounds import (
    BOUNDS,
    Bound,
    Comparison,
    Measure,
    Squares,
    as_bits,
    compare,
    norm_error,
    row_errors,
    squares,
)
from megamoe.reference.combine import combine
from megamoe.reference.dispatch import Pool, RankInputs, dispatch
from megamoe.reference.l1 import l1_epilogue, l1_gemm, quantize_h
from megamoe.reference.l2 import l2_gemm, l2_gemm_unquantised
from megamoe.reference.layer import moe_layer, undecided_rounding

__all__ = [
    "BOUNDS",
    "Bound",
    "Comparison",
    "Measure",
    "Pool",
    "RankInputs",
    "Squares",
    "as_bits",
    "combine",
    "compare",
    "dispatch",
    "l1_epilogue",
    "l1_gemm",
    "l2_gemm",
    "l2_gemm_unquantised",
    "moe_layer",
    "norm_error",
    "quantize_h",
    "row_errors",
    "squares",
    "undecided_rounding",
]
