"""First look at the fused kernel on a GPU: every stage of a few shapes against the oracle, in one process.

PYTHONPATH=. python3 tests/device/fused_check.py --ranks 1,2,8 --gpus 1 [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import megamoe
from megamoe import L1Weights, L2Weights, Stage, VirtualGroup, launch_mega_moe, reference
from megamoe.quant import quantize_weights
from megamoe.reference import RankInputs

Weights = tuple[L1Weights, L2Weights]


def make_weights(config: megamoe.MegaMoEConfig, generator: torch.Generator) -> list[Weights]:
    local, hidden, intermediate = config.experts_per_rank, config.hidden, config.intermediate_hidden
    weights = []
    for _ in range(config.num_ranks):
        l1 = torch.randn(local, 2 * intermediate, hidden, generator=generator) / hidden**0.5
        l2 = torch.randn(local, hidden, intermediate, generator=generator) / intermediate**0.5
        weights.append(megamoe.transform_weights_for_mega_moe(quantize_weights(l1), quantize_weights(l2)))
    return weights


def make_inputs(
    config: megamoe.MegaMoEConfig, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, config.hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, config.num_experts, generator=generator)
    idx = scores.topk(config.num_topk, dim=1).indices
    return x, idx, torch.rand(tokens, config.num_topk, generator=generator)


def on_device(weights: Weights, device: torch.device) -> Weights:
    l1, l2 = weights
    return L1Weights(*(t.to(device) for t in l1)), L2Weights(*(t.to(device) for t in l2))


def check(ranks: int, gpus: int, shape: tuple[int, int, int, int, int], counts: list[int], granularity: int) -> bool:
    experts, topk, hidden, intermediate, capacity = shape
    generator = torch.Generator().manual_seed(ranks * 1000 + hidden)
    group = VirtualGroup(ranks, target="sm90", num_gpus=gpus)
    buffers = megamoe.get_symm_buffer_for_mega_moe(
        group, experts, capacity, topk, hidden, intermediate, l2_sf_granularity=granularity, timeout_s=3
    )
    config = buffers.config
    weights = make_weights(config, generator)
    device_weights = [on_device(weights[r], b.device) for r, b in enumerate(buffers.ranks)]
    inputs, ys, kept = [], [], []
    for r, b in enumerate(buffers.ranks):
        x, idx, w = make_inputs(config, counts[r % len(counts)], generator)
        n = b.fill(x.to(b.device), idx.to(b.device), w.to(b.device))
        inputs.append(RankInputs(b.x[:n].cpu(), b.x_sf[:n].cpu(), idx, w))
        ys.append(torch.full((n, hidden), float("nan"), dtype=torch.bfloat16, device=b.device))
        kept.append((x, idx, w))
    for gpu in range(gpus):
        torch.cuda.synchronize(gpu)
    label = f"R={ranks} gpus={gpus} H={hidden} I={intermediate} g={granularity} tokens={counts}"
    good = True

    def launch(stage: Stage) -> bool:
        started = time.perf_counter()
        for r, b in enumerate(buffers.ranks):
            launch_mega_moe(ys[r], *device_weights[r], b, stage=stage)
        try:
            buffers.check()
        except megamoe.MegaMoEFault as fault:
            print(f"  FAULT {label} {stage.name}: {str(fault)[:600]}", flush=True)
            return False
        print(f"  {stage.name.lower():12s} {1e3 * (time.perf_counter() - started):8.2f} ms", flush=True)
        return True

    print(label, flush=True)
    for stage in (Stage.INTERFACE, Stage.DISPATCH, Stage.L1_EPILOGUE, Stage.L2_GEMM, Stage.COMBINE):
        if not launch(stage):
            return False
        if stage is Stage.INTERFACE:
            continue
        for r, b in enumerate(buffers.ranks[:2]):
            pool = reference.dispatch(config, inputs, r)
            rows = pool.rows
            if stage is Stage.DISPATCH:
                exact = torch.equal(b.l1_acts.cpu()[rows].view(torch.uint8), pool.x.view(torch.uint8))
                exact &= torch.equal(b.l1_acts_sf.cpu()[rows], pool.x_sf)
                meta = b.token_src_metadata.cpu().view(torch.int32)[rows].long()
                exact &= torch.equal(meta, torch.stack([pool.source, pool.token, pool.slot], dim=1))
                good &= exact
                print(
                    f"    rank {r}: {pool.num_routes} routes, {pool.num_blocks} blocks, pool exact: {exact}", flush=True
                )
            if stage is Stage.L1_EPILOGUE and pool.num_routes:
                acc, _ = reference.l1_gemm(config, pool, weights[r][0], magnitude=False)
                h = reference.l1_epilogue(config, acc, pool.topk_weights)
                q, sf = reference.quantize_h(config, h)
                mine, mine_sf = b.l2_acts.cpu()[rows], b.l2_acts_sf.cpu()[rows]
                sf_error = float(((mine_sf - sf).abs() / sf).max())
                wrong = float((mine.view(torch.uint8) != q.view(torch.uint8)).float().mean())
                good &= sf_error < 3e-3 and wrong < 0.02
                print(f"    rank {r}: l2_acts_sf {sf_error:.2e}, l2_acts differ {wrong:.2%}", flush=True)
    expected = reference.moe_layer(config, inputs, weights)
    pairs = [(y.cpu(), answer) for y, answer in zip(ys, expected, strict=True)]
    everyone = sum((reference.squares(*pair) for pair in pairs), reference.Squares(0.0, 0.0))
    for r, pair in enumerate(pairs):
        outcome = reference.compare("y_all_ranks", *pair, all_ranks=everyone)
        good &= outcome.ok
        print(f"    rank {r}: {outcome.message}", flush=True)
    first = [y.clone() for y in ys]
    for _ in range(20):
        for r, b in enumerate(buffers.ranks):
            ys[r].fill_(float("nan"))
            launch_mega_moe(ys[r], *device_weights[r], b)
        buffers.check()
        same = all(torch.equal(a.view(torch.int16), y.view(torch.int16)) for a, y in zip(first, ys, strict=True))
        if not same:
            print("    NOT the same on a rerun", flush=True)
            good = False
            break
    buffers.close()
    print(f"{'ok' if good else 'WRONG'}  {label}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="1,2,8")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    cases = [
        ((16, 4, 640, 384, 192), [192, 0, 48, 1], 128),
        ((16, 4, 640, 384, 192), [48, 191, 8], 64),
        ((8, 2, 1024, 512, 512), [512, 300], 128),
    ]
    results = [
        check(ranks, options.gpus, *case)
        for ranks in map(int, options.ranks.split(","))
        for case in (cases[:1] if options.quick else cases)
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
