"""What the scripts in tests/device share: claims that are printed, and R virtual ranks with their weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import megamoe
from megamoe import L1Weights, L2Weights, MegaMoEConfig, MegaMoEFault, VirtualGroup
from megamoe.config import Accumulate
from megamoe.reference import RankInputs, Squares, compare, moe_layer, squares
from phases.support.inputs import Tokens, Workload, make_tokens, make_weights

_wrong: list[str] = []


def claim(holds: bool, words: str) -> None:
    """Print that something holds, or that it does not."""
    print(f"{'ok   ' if holds else 'WRONG'}  {words}", flush=True)
    if not holds:
        _wrong.append(words)


def nothing_wrong() -> bool:
    """Whether every claim so far held."""
    return not _wrong


def run_checks(about: str | None, checks: Mapping[str, Callable[[], None]]) -> int:
    """A script's whole life: the checks that its command line names. Exit code 1: a claim did not hold."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", choices=list(checks))
    for name in parser.parse_args().checks:
        begun = time.monotonic()
        print(f"== {name}", flush=True)
        checks[name]()
        print(f"== {name}: {time.monotonic() - begun:.1f} s", flush=True)
    return 0 if nothing_wrong() else 1


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where strides differ."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Layer:
    """R ranks of this process over so many GPUs, with their weights and what they answer."""

    def __init__(self, ranks: int, gpus: int = 1, *, shape: tuple[int, int] = (1024, 512), experts: int = 16,
                 topk: int = 4, capacity: int = 256, timeout_s: float = 5.0, pool_rows: int | None = None,
                 max_ctas: int | None = None, granularity: int = 128, accumulate: Accumulate = "fp32",
                 target: str = "sm90") -> None:  # fmt: skip
        group = VirtualGroup(ranks, target=target, num_gpus=gpus if target == "sm90" else None)
        self.opened = megamoe.get_symm_buffer_for_mega_moe(
            group, experts, capacity, topk, *shape, timeout_s=timeout_s, pool_rows=pool_rows, max_ctas=max_ctas,
            l2_sf_granularity=granularity, accumulate=accumulate,
        )  # fmt: skip
        self.config: MegaMoEConfig = self.opened.config
        self.ranks = self.opened.ranks
        self.weights = [make_weights(self.config, b.rank, "normal", b.device) for b in self.ranks]
        self.y: list[Tensor] = []
        self.settle()

    def settle(self) -> None:
        """Wait for all that is queued on the GPUs of these ranks."""
        for device in {b.device for b in self.ranks if b.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def tokens(self, name: object, counts: Sequence[int], **options: Any) -> list[Tokens]:
        """Of each rank, ``counts`` by rank, drawn by ``name``; options are those of `Workload`."""
        return make_tokens(Workload(str(name), self.config, tuple(counts), **options))

    def fill(self, tokens: Sequence[Tokens]) -> None:
        """Queue the fills of every rank."""
        for buffer, given in zip(self.ranks, tokens, strict=True):
            buffer.fill(*(part.to(buffer.device) for part in (given.x, given.topk_idx, given.topk_weights)))

    def outputs(self, rows: Sequence[int]) -> list[Tensor]:
        """y of every rank, bf16 [rows, H], all NaN."""
        return [
            torch.full((n, self.config.hidden), torch.nan, dtype=torch.bfloat16, device=b.device)
            for b, n in zip(self.ranks, rows, strict=True)
        ]

    def launch(self, y: Sequence[Tensor], only: Sequence[int] | None = None, **options: Any) -> None:
        """Queue a launch on some ranks (None: all); options are those of `fp8_mega_moe`."""
        for rank in range(len(self.ranks)) if only is None else only:
            megamoe.fp8_mega_moe(y[rank], *self.weights[rank], self.ranks[rank], **options)

    def run(self, tokens: Sequence[Tokens]) -> list[Tensor]:
        """Fill, launch and wait: y of every rank. Raises MegaMoEFault."""
        self.fill(tokens)
        y = self.outputs([given.num_tokens for given in tokens])
        self.launch(y)
        self.opened.check()
        return y

    def expected(self, tokens: Sequence[Tokens]) -> list[Tensor]:
        """y of every rank by the oracle, float64."""
        inputs = [
            RankInputs(*(part.to(b.device) for part in (q.x, q.x_sf, q.topk_idx, q.topk_weights)))
            for b, q in zip(self.ranks, (given.quantised() for given in tokens), strict=True)
        ]
        return moe_layer(self.config, inputs, self.weights)

    def right(self, tokens: Sequence[Tokens], y: Sequence[Tensor]) -> str:
        """Nothing, or what is wrong by the bound of y over all ranks."""
        pairs = list(zip(y, self.expected(tokens), strict=True))
        everyone = sum((squares(*pair) for pair in pairs), Squares(0.0, 0.0))
        bound = "y_all_ranks" if self.config.accumulate == "fp32" else "y_fast_all_ranks"
        outcomes = [compare(bound, *pair, all_ranks=everyone) for pair in pairs]
        return "; ".join(outcome.message for outcome in outcomes if not outcome.ok)

    def claim_right(self, tokens: Sequence[Tokens], y: Sequence[Tensor], words: str) -> None:
        """Claim that y is right, with what is wrong in words."""
        wrong = self.right(tokens, y)
        claim(not wrong, f"{words}: {wrong}" if wrong else words)

    def fault_of(self, rank: int | None = None) -> MegaMoEFault | None:
        """Wait for a rank (None: all), and return what `check` raises."""
        try:
            (self.opened if rank is None else self.ranks[rank]).check()
        except MegaMoEFault as fault:
            return fault
        return None

    def close(self) -> None:
        """Free the buffers."""
        self.opened.close()


def copies(weights: tuple[L1Weights, L2Weights]) -> tuple[L1Weights, L2Weights]:
    """The same weights at other addresses."""
    l1, l2 = weights
    return L1Weights(*(part.clone() for part in l1)), L2Weights(*(part.clone() for part in l2))


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """`same_bits` of every pair."""
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
