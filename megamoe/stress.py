"""Stress runs of the protocol: the sources of the host target under threads that nothing else synchronises.

    python -m megamoe.stress plain                   y and the pool against an undisturbed run
    python -m megamoe.stress tsan                    the same under ThreadSanitizer, 50 epochs of 8 ranks
    python -m megamoe.stress perturb --seeds 300     the same while a seed makes threads yield and sleep
    python -m megamoe.stress reference               the undisturbed run against the oracle
    ... --mutation NAME                              with a deliberate fault compiled in: the command must fail

What is right comes from the same program with one worker a rank and a barrier between epochs; that run itself is
compared with ``megamoe.reference``. The order of the pool is checked in C++ from the inputs alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from megamoe import jit
from megamoe.config import MegaMoEConfig, Stage
from megamoe.reference import compare, moe_layer
from megamoe.stress_program import Build, Case, Run, RunOptions, run

SMALL = MegaMoEConfig(4, 8, 4, 128, 128, 260, l2_sf_granularity=64, block_m=32, l1_block_n=128)
"""Two chunks of routes on a full rank, two L1 tiles a block."""
WIDE = MegaMoEConfig(8, 16, 4, 256, 128, 260, l2_sf_granularity=64, block_m=32, l1_block_n=128)
"""8 ranks; two chunks, two L1 and two L2 tiles a block."""
TINY = MegaMoEConfig(2, 4, 2, 128, 128, 40, l2_sf_granularity=64, block_m=32, l1_block_n=128)
"""So quick that ranks are as often between launches as in one."""
TWO = replace(SMALL, num_ranks=2, num_topk=8, num_max_tokens_per_rank=130)
"""Two chunks of routes, which two workers of a rank share."""

UNDISTURBED = RunOptions(workers=1, barriers=True)


def mutations() -> dict[str, str]:
    """The deliberate faults that the protocol knows, and what each does, from ``csrc/protocol/primitives.hpp``."""
    text = (jit.csrc_dir() / "protocol" / "primitives.hpp").read_text()
    body = text.split("enum class Mutation : uint32_t {")[1].split("};")[0]
    found = re.findall(r"^\s*(\w+),(?:\s*// (.*))?$", body, re.MULTILINE)
    return {name: comment for name, comment in found if name != "none"}


@cache
def undisturbed(case: Case) -> Run:
    """The case with one worker a rank and barriers between epochs, in the plain build: what every run must equal.

    Raises:
        RuntimeError: even that went wrong.
    """
    outcome = run(case, Build(), UNDISTURBED)
    (result,) = outcome.runs
    if result.message != "right":
        raise RuntimeError(f"the undisturbed run went wrong: {result.message}; {'; '.join(outcome.faults)}")
    return result


def difference(actual: Run, expected: Run) -> str:
    """Empty, or the first thing in which a run is wrong or differs from the undisturbed one."""
    if actual.message != "right":
        return actual.message
    for place, record in expected.records.items():
        got = actual.records.get(place)
        where = f"rank {place[1]} epoch {place[0]}"
        if got is None:
            return f"{where}: no result"
        if got.y != record.y:
            pieces = sum(a != b for a, b in zip(_pieces(got.y), _pieces(record.y), strict=True))
            return f"{where}: y differs from the undisturbed run ({pieces} 16-byte pieces)"
        if got.view_digest != record.view_digest:
            return f"{where}: l2_acts or combine differ from the undisturbed run at stage {record.stage.name}"
    return ""


def _pieces(data: bytes) -> list[bytes]:
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def check_against_reference(case: Case) -> list[str]:
    """Compare the undisturbed run with the oracle; returns a line for each epoch.

    Raises:
        AssertionError: an epoch is out of bounds.
    """
    (result,) = run(case, Build(), replace(UNDISTURBED, dump_inputs=True)).runs
    assert result.message == "right", result.message
    assert {place: record.y for place, record in result.records.items()} == {
        place: record.y for place, record in undisturbed(case).records.items()
    }, "dumping the inputs changed y"
    lines = []
    for epoch in range(1, case.epochs + 1):
        records = [result.records[epoch, rank] for rank in range(case.config.num_ranks)]
        if records[0].stage is not Stage.COMBINE:
            continue
        inputs = [record.inputs for record in records if record.inputs is not None]
        expected = torch.cat(moe_layer(case.config, inputs, result.weights))
        y = torch.frombuffer(bytearray(b"".join(record.y for record in records)), dtype=torch.bfloat16)
        comparison = compare("y", y.reshape(-1, case.config.hidden), expected)
        lines.append(f"epoch {epoch}: {comparison.message}")
        assert comparison.ok, lines[-1]
    return lines


# --- the checks of the ordinary suite ------------------------------------------------------------------------------

PLAIN_CASES = (Case(SMALL, epochs=60), Case(WIDE, seed=2, epochs=60), Case(TINY, seed=3, epochs=200))
TSAN_CASE = Case(WIDE, seed=2, epochs=60)
"""60 epochs, of which every sixth stops early: 50 give y."""
PERTURB_CASES = (
    (Case(SMALL, seed=11, epochs=4, truncate_every=3), 3),
    (Case(TINY, seed=12, epochs=12, truncate_every=4), 2),
    (Case(replace(WIDE, hidden=128, num_max_tokens_per_rank=130), seed=13, epochs=3, truncate_every=3), 3),
    (Case(replace(TINY, num_ranks=4, num_topk=3), seed=14, epochs=8, truncate_every=4), 4),
    (Case(replace(TINY, num_ranks=1), seed=15, epochs=8, truncate_every=4), 4),
    (Case(TWO, seed=16, epochs=4, truncate_every=4), 2),
)
"""Cases and workers, among which the seeds are dealt out."""


@dataclass(frozen=True)
class Verdict:
    """What a check found: ``wrong`` by "case/seed", empty when all is as it must be."""

    wrong: Mapping[str, str]
    num_runs: int
    hits: Mapping[str, int]
    reports: str
    faults: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.reports

    @property
    def num_reports(self) -> int:
        """Warnings of ThreadSanitizer."""
        return self.reports.count("WARNING: ThreadSanitizer")


def _judge(cases: Sequence[tuple[Case, Build, RunOptions, range]]) -> Verdict:
    wrong: dict[str, str] = {}
    hits: dict[str, int] = {}
    faults: list[str] = []
    reports, seconds, num_runs = "", 0.0, 0
    for number, (case, build, options, seeds) in enumerate(cases):
        expected = undisturbed(case)
        outcome = run(case, build, options, seeds)
        for result in outcome.runs:
            if found := difference(result, expected):
                wrong[f"{number}/{result.perturb_seed}"] = found
        for name, count in outcome.hits.items():
            hits[name] = hits.get(name, 0) + count
        num_runs += len(outcome.runs)
        reports += outcome.reports
        faults += outcome.faults
        seconds += outcome.seconds
        if options.stop_at_first and (wrong or reports):
            break
    return Verdict(wrong, num_runs, hits, reports, tuple(faults), seconds)


def plain(mutation: str = "none", *, stop_at_first: bool = False) -> Verdict:
    """Every plain case once, 3 workers a rank."""
    options = RunOptions(stop_at_first=stop_at_first)
    return _judge([(case, Build(mutation=mutation), options, range(1)) for case in PLAIN_CASES])


def tsan(mutation: str = "none", *, stop_at_first: bool = False) -> Verdict:
    """8 ranks of 3 workers under ThreadSanitizer."""
    options = RunOptions(timeout_s=60.0, limit_s=240, stop_at_first=stop_at_first)
    return _judge([(TSAN_CASE, Build(tsan=True, mutation=mutation), options, range(1))])


def perturb(mutation: str = "none", *, num_seeds: int = 300, stop_at_first: bool = False) -> Verdict:
    """``num_seeds`` perturbed runs, dealt out over the perturbation cases."""
    build = Build(perturb=True, mutation=mutation)
    share = -(-num_seeds // len(PERTURB_CASES))
    cases = []
    for number, (case, workers) in enumerate(PERTURB_CASES):
        seeds = range(number * share, min((number + 1) * share, num_seeds))
        cases.append((case, build, RunOptions(workers, stop_at_first=stop_at_first), seeds))
    return _judge(cases)


def _print(verdict: Verdict) -> None:
    for name, count in verdict.hits.items():
        if count:
            print(f"point {name}: {count} hits")
    for place, found in list(verdict.wrong.items())[:10]:
        print(f"case/seed {place}: {found}")
    for fault in verdict.faults[:10]:
        print(fault)
    if verdict.reports:
        print(verdict.reports[:20_000])
    print(
        f"{len(verdict.wrong)} of {verdict.num_runs} runs wrong, {verdict.num_reports} reports of ThreadSanitizer, "
        f"{verdict.seconds:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megamoe.stress", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("check", choices=("plain", "tsan", "perturb", "reference"))
    parser.add_argument("--mutation", default="none", choices=("none", *mutations()), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=300, help="of perturb")
    parser.add_argument("--stop-at-first", action="store_true", help="wrong run")
    given = parser.parse_args()
    if given.check == "reference":
        print("\n".join(line for case in PLAIN_CASES[:2] for line in check_against_reference(replace(case, epochs=6))))
        return 0
    if given.check == "plain":
        verdict = plain(given.mutation, stop_at_first=given.stop_at_first)
    elif given.check == "tsan":
        verdict = tsan(given.mutation, stop_at_first=given.stop_at_first)
    else:
        verdict = perturb(given.mutation, num_seeds=given.seeds, stop_at_first=given.stop_at_first)
    _print(verdict)
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
