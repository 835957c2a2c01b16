"""One rank, small, every stage once and the whole layer a few times: what compute-sanitizer watches.

compute-sanitizer --tool memcheck -k kns=megamoe python3 tests/device/small_run.py
"""

from __future__ import annotations

import sys

import torch

import megamoe
from megamoe import DebugWindow, Stage, VirtualGroup, launch_mega_moe
from megamoe.reference import RankInputs, compare, moe_layer
from phases.support.inputs import Workload, make_tokens, make_weights


def main() -> int:
    opened = megamoe.get_symm_buffer_for_mega_moe(
        VirtualGroup(1, target="sm90", num_gpus=1), 4, 160, 2, 640, 384, timeout_s=200, max_ctas=4
    )
    buffer = opened.ranks[0]
    weights = make_weights(opened.config, 0, "normal", buffer.device)
    (given,) = make_tokens(Workload("sanitizer", opened.config, (160,), masked=0.1))
    tokens = [part.to(buffer.device) for part in (given.x, given.topk_idx, given.topk_weights)]
    y = torch.zeros(160, 640, dtype=torch.bfloat16, device=buffer.device)
    for stage in Stage:
        buffer.fill(*tokens)
        launch_mega_moe(y, *weights, buffer, stage=stage, debug=DebugWindow(0, 1))
        opened.check()
    for count in (160, 0, 1):
        buffer.fill(*(part[:count] for part in tokens))
        megamoe.fp8_mega_moe(y[:count], *weights, buffer)
        opened.check()
    buffer.fill(*tokens)
    megamoe.fp8_mega_moe(y, *weights, buffer)
    opened.check()
    quantised = given.quantised()
    inputs = RankInputs(
        *(part.to(buffer.device) for part in (quantised.x, quantised.x_sf, quantised.topk_idx, quantised.topk_weights))
    )
    outcome = compare("y", y, moe_layer(opened.config, [inputs], [weights])[0])
    print(outcome.message)
    opened.close()
    return 0 if outcome.ok else 1


if __name__ == "__main__":
    sys.exit(main())
