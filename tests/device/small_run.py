"""One rank, small, every stage once and the whole layer a few times, with many blocks, few, and none: what
compute-sanitizer watches.

    compute-sanitizer --tool memcheck --kernel-regex kns=megamoe python3 tests/device/small_run.py [fp32|fast]

What the kernels read is made on the CPU and copied, so that no other kernel has to be watched; the oracle stays there.
"""

from __future__ import annotations

import sys

import torch

import megamoe
from megamoe import DebugWindow, L1Weights, L2Weights, Stage, VirtualGroup, launch_mega_moe
from megamoe.config import ACCUMULATE_CHOICES, Accumulate, MegaMoEConfig
from megamoe.reference import compare, moe_layer
from phases.support.inputs import Workload, make_tokens, make_weights

TOKENS = 480
"""Three blocks an expert, which the two CTAs of a cluster take two by two; the last of each is short."""
FEWER_TOKENS = (0, 1, 20, 45, 80)
"""Then no block, and one an expert, with so many rows that there is a tile of each height: 8, 16, 32 and 64."""
LAYER = (3, TOKENS, 2, 640, 384)
"""Experts, tokens, top-k, hidden, intermediate."""


def workload(config: MegaMoEConfig) -> Workload:
    return Workload("sanitizer", config, (TOKENS,), masked=0.1)


def main(accumulate: Accumulate) -> int:
    group = VirtualGroup(1, target="sm90", num_gpus=1)
    opened = megamoe.get_symm_buffer_for_mega_moe(group, *LAYER, timeout_s=200, max_ctas=4, accumulate=accumulate)
    buffer = opened.ranks[0]
    on_cpu = make_weights(opened.config, 0)
    l1, l2 = ([part.to(buffer.device) for part in pair] for pair in on_cpu)
    weights = L1Weights(*l1), L2Weights(*l2)
    (given,) = make_tokens(workload(opened.config))
    tokens = [part.to(buffer.device) for part in (given.x, given.topk_idx, given.topk_weights)]
    y = torch.zeros(TOKENS, 640, dtype=torch.bfloat16, device=buffer.device)
    for stage in Stage:
        buffer.fill(*tokens)
        launch_mega_moe(y, *weights, buffer, stage=stage, debug=DebugWindow(0, 1))
        opened.check()
    for count in (TOKENS, *FEWER_TOKENS):
        buffer.fill(*(part[:count] for part in tokens))
        megamoe.fp8_mega_moe(y[:count], *weights, buffer)
        opened.check()
    buffer.fill(*tokens)
    megamoe.fp8_mega_moe(y, *weights, buffer)
    opened.check()
    (expected,) = moe_layer(opened.config, [given.quantised()], [on_cpu])
    outcome = compare("y" if accumulate == "fp32" else "y_fast", y, expected)
    print(outcome.message)
    opened.close()
    return 0 if outcome.ok else 1


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else "fp32"
    (chosen,) = (word for word in ACCUMULATE_CHOICES if word == given)
    sys.exit(main(chosen))
