"""A soak on real ranks, one process a GPU: launches with random counts and skews, one in so many fully compared.

    torchrun --nproc-per-node 2 tests/device/soak.py --launches 10000 --seconds 120 --seed 1 [--accumulate fast]

Ends after so many launches or seconds; the last line says how many, and what went wrong. y of every launch is looked at
for NaN, that of one in --compare-every is compared with the oracle, by the bounds over all ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist

import megamoe
from megamoe.config import ACCUMULATE_CHOICES, MegaMoEConfig
from megamoe.reference import RankInputs, Squares, compare, moe_layer, squares
from phases.support.inputs import Tokens, generator, make_weights

CAPACITY = 1024
SHAPE = (1024, 512)
EXPERTS, TOPK = 16, 4


def draw_tokens(config: MegaMoEConfig, seed: int, launch: int, device: torch.device) -> list[Tokens]:
    """Of every rank, drawn on this GPU; the same on every GPU of a kind."""
    draw = generator("soak", seed, launch)
    skew = torch.rand(config.num_experts, generator=draw) ** (1 + 8 * torch.rand(1, generator=draw))
    tokens = []
    for _ in range(config.num_ranks):
        scale = int(torch.randint(0, 4, (1,), generator=draw))
        most = (8, 64, 256, CAPACITY)[scale]
        count = int(torch.randint(0, most + 1, (1,), generator=draw))
        on_gpu = torch.Generator(device).manual_seed(int(torch.randint(1 << 40, (1,), generator=draw)))
        x = torch.randn(count, config.hidden, generator=on_gpu, device=device).bfloat16()
        scores = torch.rand(count, config.num_experts, generator=on_gpu, device=device) * skew.to(device)
        ids = scores.topk(config.num_topk, dim=1).indices
        ids[torch.rand(ids.shape, generator=on_gpu, device=device) < 0.05] = -1
        weights = torch.rand(count, config.num_topk, generator=on_gpu, device=device)
        tokens.append(Tokens(x, ids, weights))
    return tokens


def over_all_ranks(own: Squares, device: torch.device) -> Squares:
    """The sum over the ranks. Collective."""
    values = torch.tensor([own.difference, own.expected], dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return Squares(*values.tolist())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare-every", type=int, default=50)
    parser.add_argument("--backend", default="cpu:gloo,cuda:nccl", help="of the process group; nccl alone works too")
    parser.add_argument("--accumulate", choices=ACCUMULATE_CHOICES, default="fp32")
    options = parser.parse_args()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group(options.backend)
    world = dist.group.WORLD
    assert world is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffer = megamoe.get_symm_buffer_for_mega_moe(
        world, EXPERTS, CAPACITY, TOPK, *SHAPE, timeout_s=10, accumulate=options.accumulate
    )
    bound = "y_all_ranks" if options.accumulate == "fp32" else "y_fast_all_ranks"
    config, device = buffer.config, buffer.device
    weights = [make_weights(config, other, "normal", device) for other in range(ranks)]
    megamoe.warmup(buffer)
    deadline = time.monotonic() + options.seconds
    memory_begun, wrong, compared, launches, worst = 0, 0, 0, 0, 0.0
    stop = torch.zeros(1, dtype=torch.int64)
    nans = torch.zeros((), dtype=torch.int64, device=device)  # read at the comparisons: no launch waits for the host
    begun = time.monotonic()
    for launch in range(options.launches):
        tokens = draw_tokens(config, options.seed, launch, device)
        own = tokens[rank]
        buffer.fill(own.x, own.topk_idx, own.topk_weights)
        y = torch.full((own.num_tokens, config.hidden), torch.nan, dtype=torch.bfloat16, device=device)
        megamoe.fp8_mega_moe(y, *weights[rank], buffer)
        nans += y.isnan().any()
        launches = launch + 1
        if launch % options.compare_every:
            continue
        buffer.check()
        if with_nan := int(nans.item()):
            wrong += with_nan
            nans.zero_()
            since = f"after {launch - options.compare_every} up to {launch}"
            print(f"rank {rank}: launches {since} of seed {options.seed}: {with_nan} have NaN in y", flush=True)
        answer = moe_layer(config, [RankInputs(*_quantised(given)) for given in tokens], weights)[rank]
        everyone = over_all_ranks(squares(y, answer), device)
        outcome = compare(bound, y, answer, all_ranks=everyone)
        compared += 1
        worst = max(worst, outcome.max_error)
        if not outcome.ok:
            wrong += 1
            print(f"rank {rank}: launch {launch} of seed {options.seed}: {outcome.message}", flush=True)
        if launch == 4 * options.compare_every:
            memory_begun = torch.cuda.memory_reserved(device)
        if launch % (4 * options.compare_every) == 0:  # every rank stops at the same launch
            stop[0] = int(time.monotonic() > deadline)
            flag = stop if "gloo" in options.backend else stop.to(device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if int(flag.item()):
                break
    buffer.check()
    wrong += int(nans.item())
    growth = torch.cuda.memory_reserved(device) - memory_begun if memory_begun else 0
    print(
        f"rank {rank}: {launches} launches in {time.monotonic() - begun:.0f} s, {options.accumulate}, seed "
        f"{options.seed}, {compared} compared, {wrong} wrong, worst error {worst:.2e}, epoch {buffer.epoch}, torch's "
        f"memory grew by {growth} bytes",
        flush=True,
    )
    good = wrong == 0 and buffer.epoch == launches and growth <= 64 << 20
    buffer.reset()
    buffer.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


def _quantised(given: Tokens) -> tuple[torch.Tensor, ...]:
    inputs = given.quantised()
    return inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights


if __name__ == "__main__":
    sys.exit(main())
