"""A soak on real ranks, one process a GPU: launches with random counts and skews, one in so many fully compared.

    torchrun --nproc-per-node 2 tests/device/soak.py --launches 10000 --seconds 120 --seed 1 [--accumulate fast]

Ends after so many launches or seconds; the last line says how many, and what went wrong. y of every launch is looked at
for NaN, that of one in --compare-every is compared with the oracle, by the bounds over all ranks. Memory must be flat
from the warm-up, which includes a comparison at the largest counts, to the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import dataclass, replace

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from megamoe import L1Weights, L2Weights, SymmBuffer
from megamoe.config import ACCUMULATE_CHOICES, MegaMoEConfig
from megamoe.reference import RankInputs, Squares, compare, moe_layer, squares, undecided_rounding
from phases.support.inputs import Tokens, generator, make_weights

CAPACITY = 1024
SHAPE = (1024, 512)
EXPERTS, TOPK = 16, 4
MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes in use: by tensors on this rank's GPU, on that GPU by anyone, and by this process on the host."""

    allocated: int
    used: int
    resident: int

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        """Once the GPU has ended its work and torch has given back what it only keeps."""
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(torch.cuda.memory_allocated(device), total - free, psutil.Process().memory_info().rss)

    def since(self, begun: Memory) -> Memory:
        return Memory(self.allocated - begun.allocated, self.used - begun.used, self.resident - begun.resident)

    @property
    def flat(self) -> bool:
        """Of a growth: less than what one tensor, one block of the driver, and the host's allocator come to."""
        return self.allocated <= MIB and self.used <= 32 * MIB and self.resident <= 64 * MIB

    def __str__(self) -> str:
        return (
            f"tensors {self.allocated / MIB:+.2f} MiB, GPU {self.used / MIB:+.1f} MiB, "
            f"host {self.resident / MIB:+.1f} MiB"
        )


def draw_tokens(config: MegaMoEConfig, seed: int, launch: int, device: torch.device) -> list[Tokens]:
    """Of every rank, drawn on this GPU; the same on every GPU of a kind."""
    draw = generator("soak", seed, launch)
    skew = torch.rand(config.num_experts, generator=draw) ** (1 + 8 * torch.rand(1, generator=draw))
    tokens = []
    for _ in range(config.num_ranks):
        scale = int(torch.randint(0, 4, (1,), generator=draw))
        most = (8, 64, 256, CAPACITY)[scale]
        count = int(torch.randint(0, most + 1, (1,), generator=draw))
        number = int(torch.randint(1 << 40, (1,), generator=draw))
        tokens.append(tokens_of(config, count, skew, number, device))
    return tokens


def tokens_of(config: MegaMoEConfig, count: int, skew: Tensor, seed: int, device: torch.device) -> Tokens:
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, config.hidden, generator=draw, device=device).bfloat16()
    scores = torch.rand(count, config.num_experts, generator=draw, device=device) * skew.to(device)
    ids = scores.topk(config.num_topk, dim=1).indices
    ids[torch.rand(ids.shape, generator=draw, device=device) < 0.05] = -1
    weights = torch.rand(count, config.num_topk, generator=draw, device=device)
    return Tokens(x, ids, weights)


def over_all_ranks(own: Squares, device: torch.device) -> Squares:
    """The sum over the ranks. Collective."""
    values = torch.tensor([own.difference, own.expected], dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return Squares(*values.tolist())


class Soak:
    """This rank's launches and what was seen of them."""

    def __init__(self, buffer: SymmBuffer, weights: list[tuple[L1Weights, L2Weights]], rank: int) -> None:
        self.buffer = buffer
        self.weights = weights
        self.rank = rank
        self.bound = "y_all_ranks" if buffer.config.accumulate == "fp32" else "y_fast_all_ranks"
        self.nans = torch.zeros((), dtype=torch.int64, device=buffer.device)  # read at the comparisons only
        self.launches = self.compared = self.roundings = self.wrong = 0
        self.worst = 0.0

    @property
    def most_roundings(self) -> int:
        """Comparisons that may need one: beyond that they hide what is wrong with launches of few rows."""
        return max(3, self.compared // 20)

    def launch(self, tokens: list[Tokens]) -> Tensor:
        own = tokens[self.rank]
        self.buffer.fill(own.x, own.topk_idx, own.topk_weights)
        shape = (own.num_tokens, self.buffer.config.hidden)
        y = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.buffer.device)
        megamoe.fp8_mega_moe(y, *self.weights[self.rank], self.buffer)
        self.nans += y.isnan().any()
        self.launches += 1
        return y

    def compare(self, y: Tensor, tokens: list[Tokens], which: str) -> None:
        """With the oracle; before that, whether any launch since the last comparison had NaN. Collective."""
        self.buffer.check()
        self.count_nans(which)
        inputs = [RankInputs(*_quantised(given)) for given in tokens]
        answer = moe_layer(self.buffer.config, inputs, self.weights)[self.rank]
        everyone = over_all_ranks(squares(y, answer), self.buffer.device)
        outcome = compare(self.bound, y, answer, all_ranks=everyone)
        if not outcome.ok:  # so many rows are drawn that in some a rounding of the largest h goes the other way
            undecided = undecided_rounding(self.buffer.config, inputs, self.weights)
            everyone = replace(everyone, undecided_square=float(torch.cat(undecided).max()) ** 2)
            outcome = compare(self.bound, y, answer, all_ranks=everyone, undecided=undecided[self.rank])
            self.roundings += outcome.ok
        self.compared += 1
        self.worst = max(self.worst, outcome.max_error)
        if not outcome.ok:
            self.wrong += 1
            print(f"rank {self.rank}: {which}: {outcome.message}", flush=True)

    def count_nans(self, which: str) -> None:
        if with_nan := int(self.nans.item()):
            self.wrong += with_nan
            self.nans.zero_()
            print(f"rank {self.rank}: {with_nan} launches up to {which} have NaN in y", flush=True)

    def warm_up(self) -> None:
        """Comparisons with as many tokens as fit on every rank, and with one."""
        config, device = self.buffer.config, self.buffer.device
        even = torch.ones(config.num_experts)
        for count in (CAPACITY, 1):
            tokens = [tokens_of(config, count, even, other, device) for other in range(config.num_ranks)]
            self.compare(self.launch(tokens), tokens, f"warm-up, {count} tokens a rank")

    def run(self, options: argparse.Namespace) -> None:
        """Every rank stops at the same launch."""
        deadline = time.monotonic() + options.seconds
        for number in range(options.launches):
            tokens = draw_tokens(self.buffer.config, options.seed, number, self.buffer.device)
            y = self.launch(tokens)
            if number % options.compare_every == 0:
                self.compare(y, tokens, f"launch {number} of seed {options.seed}")
            if number % (4 * options.compare_every) == 0 and self.any_rank_past(deadline, options.backend):
                break
        self.buffer.check()
        self.count_nans(f"the last of seed {options.seed}")

    def any_rank_past(self, deadline: float, backend: str) -> bool:
        place = torch.device("cpu") if "gloo" in backend else self.buffer.device
        flag = torch.tensor([int(time.monotonic() > deadline)], device=place)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare-every", type=int, default=50)
    parser.add_argument("--backend", default="cpu:gloo,cuda:nccl", help="of the process group; nccl alone works too")
    parser.add_argument("--accumulate", choices=ACCUMULATE_CHOICES, default="fp32")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(options.backend)
    world = dist.group.WORLD
    assert world is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    buffer = megamoe.get_symm_buffer_for_mega_moe(
        world, EXPERTS, CAPACITY, TOPK, *SHAPE, timeout_s=10, accumulate=options.accumulate
    )
    weights = [make_weights(buffer.config, other, "normal", buffer.device) for other in range(ranks)]
    megamoe.warmup(buffer)
    soak = Soak(buffer, weights, rank)
    soak.warm_up()
    soak.any_rank_past(float("inf"), options.backend)
    memory = Memory.now(buffer.device)
    begun = time.monotonic()
    soak.run(options)
    seconds = time.monotonic() - begun
    growth = Memory.now(buffer.device).since(memory)
    print(
        f"rank {rank}: {soak.launches} launches in {seconds:.0f} s, {options.accumulate}, seed {options.seed}, "
        f"{soak.compared} compared ({soak.roundings} off by one rounding of h, {soak.most_roundings} may be), "
        f"{soak.wrong} wrong, worst error {soak.worst:.2e}, epoch {buffer.epoch}, memory "
        f"{'flat' if growth.flat else 'NOT FLAT'}: {growth}",
        flush=True,
    )
    few_roundings = soak.roundings <= soak.most_roundings
    good = soak.wrong == 0 and few_roundings and buffer.epoch == soak.launches and growth.flat
    buffer.reset()
    buffer.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


def _quantised(given: Tokens) -> tuple[Tensor, ...]:
    inputs = given.quantised()
    return inputs.x, inputs.x_sf, inputs.topk_idx, inputs.topk_weights


if __name__ == "__main__":
    sys.exit(main())
