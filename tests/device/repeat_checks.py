"""Many launches of target sm90 on real GPUs: reruns, other ranks, and a litmus for the fences; one check a name.

    PYTHONPATH=. python3 tests/device/repeat_checks.py rerun rerun_fast worlds litmus no_fence relaxed_tile_counter

Prints ``ok`` or ``WRONG`` with what was seen for every claim; the exit code is 1 if any was wrong. The deliberate
faults (no_fence, relaxed_tile_counter, relaxed_arrival) print ``seen`` or ``NOT SEEN``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megamoe import MegaMoEConfig, MegaMoEFault
from megamoe.config import ACCUMULATE_CHOICES, Accumulate
from megamoe.jit import csrc_dir
from megamoe.targets import sm90
from phases.support.device_checks import Layer, claim, equal, run_checks, same_bits
from phases.support.inputs import Workload, make_tokens
from phases.support.workloads import TILES


def check_rerun(accumulate: Accumulate = "fp32", launches: int = 200) -> None:
    """Launches with changing routing and counts, each equal to its rerun."""
    gpus = min(2, torch.cuda.device_count())
    for ranks, over in ((1, 1), (2, gpus), (8, gpus)):
        layer = Layer(ranks, over, capacity=512, accumulate=accumulate)
        draw = torch.Generator().manual_seed(ranks)
        different = 0
        routings = ("random", "one_expert", "duplicate")
        for launch in range(launches):
            counts = torch.randint(0, 513 if launch % 10 == 0 else 65, (ranks,), generator=draw).tolist()
            masked = (0.0, 0.3)[launch % 2]
            tokens = layer.tokens(f"rerun {launch}", counts, routing=routings[launch % 3], masked=masked)
            first = layer.run(tokens)
            different += not equal(first, layer.run(tokens))
            if launch % 40 == 0 and (message := layer.right(tokens, first)):
                claim(False, f"{ranks} ranks, launch {launch}: {message}")
        words = f"{ranks} ranks on {over} GPUs, {accumulate}: {launches} launches, {different} differ from their rerun"
        claim(different == 0, words)
        layer.close()


def check_worlds() -> None:
    """7168/2048 over 1, 2 and 8 ranks on one GPU and on two, with both accumulations: the same bits, and right."""
    gpus = min(2, torch.cuda.device_count())
    for accumulate in ACCUMULATE_CHOICES:
        answers: dict[tuple[int, int], Tensor] = {}
        for ranks, over in dict.fromkeys(((1, 1), (2, 1), (2, gpus), (8, 1), (8, gpus))):
            layer = Layer(ranks, over, shape=(7168, 2048), experts=8, topk=4, capacity=512, accumulate=accumulate)
            whole = make_tokens(Workload("worlds", _one_rank(layer.config), (512,)))[0]
            tokens = [whole.rows(slice(r * 512 // ranks, (r + 1) * 512 // ranks)) for r in range(ranks)]
            of_ranks = layer.run(tokens)
            answers[ranks, over] = torch.cat([part.cpu() for part in of_ranks])
            if ranks == 1:
                layer.claim_right(tokens, of_ranks, f"7168/2048, {accumulate}: one rank is right")
            layer.close()
        base = answers[1, 1]
        for (ranks, over), y in answers.items():
            words = f"7168/2048, {accumulate}: {ranks} ranks on {over} GPUs answer as one rank, bit for bit"
            claim(same_bits(y, base), words)


def _one_rank(config: MegaMoEConfig) -> MegaMoEConfig:
    block_m, l1_block_n, l2_block_n = TILES["sm90"][0]
    return MegaMoEConfig(
        1, config.num_experts, config.num_topk, config.hidden, config.intermediate_hidden, 512,
        block_m=block_m, l1_block_n=l1_block_n, l2_block_n=l2_block_n,
    )  # fmt: skip


def check_litmus(launches: int = 10_000) -> None:
    """Small launches at full speed over NVLink, every row of every one compared, with the kernel as it is."""
    _litmus(launches, "as it is", must_be_right=True)


@contextmanager
def in_sm90(name: str, stand_in: object) -> Iterator[None]:
    """Another value for a name of the target's module, and kernels built anew."""
    before = getattr(sm90, name)
    setattr(sm90, name, stand_in)
    sm90._fused_module.cache_clear()
    try:
        yield
    finally:
        setattr(sm90, name, before)


def check_no_fence(launches: int = 5_000) -> None:
    """The same without ``fence.proxy.async.global``: does it show?"""
    folder = Path(tempfile.mkdtemp()) / "csrc"
    shutil.copytree(csrc_dir(), folder)
    primitives = folder / "protocol" / "primitives.hpp"
    text = primitives.read_text()
    fence = 'asm volatile("fence.proxy.async.global;" ::: "memory");'
    if text.count(fence) != 1:
        raise ValueError(f"{primitives}: expected one {fence}, found {text.count(fence)}")
    primitives.write_text(text.replace(fence, ""))
    with in_sm90("csrc_dir", lambda: folder):
        _broken_litmus(launches, "without fence.proxy.async.global")
    shutil.rmtree(folder.parent)


def check_mutation(mutation: str, launches: int = 5_000) -> None:
    """The same with a release or acquire taken out: does it show?"""
    options = (f"-DMEGAMOE_MUTATION={mutation}",)
    with in_sm90("extra_options", partial(tuple, options)):
        _broken_litmus(launches, f"mutation {mutation}")


def _broken_litmus(launches: int, what: str) -> None:
    try:
        _litmus(launches, what, must_be_right=False)
    except RuntimeError as error:  # a MegaMoEFault, or what CUDA says of a kernel that went astray
        print(f"seen   litmus {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def _litmus(launches: int, what: str, *, must_be_right: bool) -> None:
    gpus = min(2, torch.cuda.device_count())
    layer = Layer(2, gpus, shape=(1024, 256), experts=8, topk=4, capacity=64, timeout_s=2.0)
    sets = [layer.tokens(f"litmus {i}", [(11 * i) % 40 + 8, (17 * i) % 40 + 8]) for i in range(8)]
    expected = [layer.run(tokens) for tokens in sets]
    if must_be_right:
        for number, (tokens, answer) in enumerate(zip(sets, expected, strict=True)):
            layer.claim_right(tokens, answer, f"litmus {what}: set {number} is right first")
    placed = [
        [[part.to(b.device) for part in vars(given).values()] for b, given in zip(layer.ranks, tokens, strict=True)]
        for tokens in sets
    ]
    y = [layer.outputs([given.num_tokens for given in tokens]) for tokens in sets]
    wrong = [torch.zeros(1, dtype=torch.int64, device=b.device) for b in layer.ranks]
    layer.settle()
    begun = time.monotonic()
    fault: MegaMoEFault | None = None
    done = 0
    for launch in range(launches):
        index = launch * 5 % len(sets) if launch % 3 else launch % len(sets)
        for rank, buffer in enumerate(layer.ranks):
            with torch.cuda.device(buffer.device):
                buffer.fill(*placed[index][rank])
        layer.launch(y[index])
        for rank in range(2):
            with torch.cuda.device(layer.ranks[rank].device):
                differs = y[index][rank].view(torch.int32) != expected[index][rank].view(torch.int32)
                wrong[rank] += differs.any(dim=1).sum()
        done += 1
        if launch % 500 == 499 and (fault := layer.fault_of()):
            break
    fault = fault or layer.fault_of()
    rows = sum(int(count.item()) for count in wrong)
    seconds = time.monotonic() - begun
    words = f"litmus {what}: {done} launches in {seconds:.1f} s, {rows} wrong rows, fault: {str(fault)[:90]}"
    if must_be_right:
        claim(rows == 0 and fault is None, words)
    else:
        print(f"{'seen ' if rows or fault else 'NOT SEEN'}  {words}", flush=True)
    layer.close()


CHECKS: dict[str, Callable[[], None]] = {
    "rerun": check_rerun,
    "rerun_fast": partial(check_rerun, "fast", 60),
    "worlds": check_worlds,
    "litmus": check_litmus,
    "no_fence": check_no_fence,
    "relaxed_tile_counter": partial(check_mutation, "relaxed_tile_counter"),
    "relaxed_arrival": partial(check_mutation, "relaxed_arrival"),
}


if __name__ == "__main__":
    sys.exit(run_checks(__doc__, CHECKS))
