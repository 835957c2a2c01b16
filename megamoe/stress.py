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
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megamoe import abi, jit
from megamoe.config import SCALE_BLOCK, MegaMoEConfig, Stage
from megamoe.faults import read_fault_records
from megamoe.layout import FAULT_RECORD, buffer_layout, cpp_header, problem_struct
from megamoe.reference import RankInputs, compare, moe_layer
from megamoe.targets import host
from megamoe.weights import L1Weights, L2Weights

OPTIONS_STRUCT = abi.declare(
    "StressOptions",
    (
        abi.Field("seed", "u64", comment="of the inputs"),
        abi.Field("first_perturb_seed", "u64"),
        abi.Field("timeout_ns", "u64"),
        abi.Field("buffer_bytes", "u64"),
        abi.Field("num_perturb_seeds", "u32", comment="runs, each from a fresh buffer"),
        abi.Field("num_epochs", "u32"),
        abi.Field("num_workers", "u32", comment="of a rank"),
        abi.Field("truncate_every", "u32", comment="every so many epochs a launch stops before combine; 0: none does"),
        abi.Field("barriers", "u32", comment="between epochs"),
        abi.Field("dump_inputs", "u32"),
        abi.Field("stop_at_first", "u32", comment="wrong run"),
        abi.Field("limit_s", "u32", comment="after which a run is given up"),
    ),
)
RECORD_STRUCT = abi.declare(
    "StressRecord",
    (
        abi.Field("view_digest", "u64", comment="of l2_acts and combine"),
        abi.Field("epoch", "u32"),
        abi.Field("rank", "u32"),
        abi.Field("stage", "u32"),
        abi.Field("num_y_rows", "u32", comment="bf16 rows that follow"),
        abi.Field("num_input_rows", "u32", comment="tokens whose x, x_sf, topk_idx and topk_weights follow"),
        abi.Field("has_weights", "u32", comment="l1, l1_sf, l2, l2_sf follow"),
    ),
)
RUN_STRUCT = abi.declare(
    "StressRun",
    (abi.Field("perturb_seed", "u64"), abi.Field("num_bytes", "u64", comment="of the records that follow")),
)

EXIT_WRONG, EXIT_REQUEST, EXIT_TSAN = 1, 2, 66
"""Exit statuses of the program; any other but 0 is its watchdog's or a crash, which the run under way caused."""

SMALL = MegaMoEConfig(4, 8, 4, 128, 128, 132, l2_sf_granularity=64, block_m=32, l1_block_n=128)
"""Two chunks of routes on a full rank, two L1 tiles a block."""
WIDE = MegaMoEConfig(8, 16, 4, 256, 128, 160, l2_sf_granularity=64, block_m=32, l1_block_n=128)
"""8 ranks; two L1 and two L2 tiles a block."""
TINY = MegaMoEConfig(2, 4, 2, 128, 128, 40, l2_sf_granularity=64, block_m=32, l1_block_n=128)
"""So quick that ranks are as often between launches as in one."""


@dataclass(frozen=True)
class Case:
    """What is computed: two runs of a case must give the same bits, whatever the threads do."""

    config: MegaMoEConfig
    seed: int = 1
    epochs: int = 50
    truncate_every: int = 6


@dataclass(frozen=True)
class Build:
    """How the program is compiled."""

    tsan: bool = False
    perturb: bool = False
    mutation: str = "none"

    @property
    def options(self) -> tuple[str, ...]:
        options = ["-O1" if self.tsan else "-O2", "-Wall", "-Wextra", f"-DMEGAMOE_MUTATION={self.mutation}"]
        if self.tsan:
            options += ["-g", "-fsanitize=thread"]
        if self.perturb:
            options += ["-DMEGAMOE_PERTURB"]
        return tuple(options)


@dataclass(frozen=True)
class Schedule:
    """How it is run."""

    workers: int = 3
    barriers: bool = False
    dump_inputs: bool = False
    timeout_s: float = 5.0
    limit_s: int = 60
    stop_at_first: bool = False


UNDISTURBED = Schedule(workers=1, barriers=True)


@dataclass(frozen=True)
class Record:
    """What one rank left after one epoch."""

    stage: Stage
    y: bytes
    view_digest: int
    inputs: RankInputs | None


@dataclass(frozen=True)
class Run:
    """All epochs of all ranks under one perturbation seed; ``message`` is ``right`` or what the program saw."""

    perturb_seed: int
    message: str
    records: Mapping[tuple[int, int], Record]
    """By (epoch, rank)."""
    weights: tuple[tuple[L1Weights, L2Weights], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a call of the program gave."""

    runs: tuple[Run, ...]
    hits: Mapping[str, int]
    faults: tuple[str, ...]
    reports: str
    """What ThreadSanitizer wrote."""
    seconds: float


def structs_header() -> str:
    """Text of ``stress_structs.hpp``."""
    return "\n".join(
        [
            "// Generated by megamoe/stress.py. Do not edit.",
            "#pragma once",
            '#include "buffer_layout.hpp"',
            "namespace megamoe {",
            *(struct.cpp for struct in (OPTIONS_STRUCT, RECORD_STRUCT, RUN_STRUCT)),
            "}  // namespace megamoe",
            "",
        ]
    )


@cache
def program(build: Build) -> Path:
    """The compiled program, from the cache if it is there."""
    return jit.build_shared_library(
        "megamoe_stress",
        [jit.csrc_dir() / "host" / "stress.cpp"],
        generated={"buffer_layout.hpp": cpp_header(), "stress_structs.hpp": structs_header()},
        options=build.options,
        include_dirs=host.include_dirs(),
        executable=True,
    ).path


def mutations() -> dict[str, str]:
    """The deliberate faults that the protocol knows, and what each does, from ``csrc/protocol/primitives.hpp``."""
    text = (jit.csrc_dir() / "protocol" / "primitives.hpp").read_text()
    body = text.split("enum class Mutation : uint32_t {")[1].split("};")[0]
    found = re.findall(r"^\s*(\w+),(?:\s*// (.*))?$", body, re.MULTILINE)
    return {name: comment for name, comment in found if name != "none"}


# --- running -----------------------------------------------------------------------------------------------------


def run(case: Case, build: Build, schedule: Schedule, perturb_seeds: range = range(1)) -> Outcome:
    """Run a case once for every perturbation seed; with ``stop_at_first`` up to the first that goes wrong.

    A run that ends the program (a crash, or its own watchdog) counts as one that went wrong; the seeds after it are
    run by another call of the program.

    Raises:
        RuntimeError: the program cannot read its request.
    """
    started = time.monotonic()
    runs: list[Run] = []
    hits: dict[str, int] = {}
    faults: list[str] = []
    reports = ""
    with tempfile.TemporaryDirectory(prefix="megamoe-stress-") as folder:
        request, results = Path(folder, "request"), Path(folder, "results")
        while perturb_seeds:
            request.write_bytes(_request(case, schedule, perturb_seeds))
            results.write_bytes(b"")
            process = _call([str(program(build)), str(request), str(results)], schedule, len(perturb_seeds))
            if process.returncode == EXIT_REQUEST:
                raise RuntimeError(f"{program(build)}: {process.stderr}")
            messages = dict(re.findall(r"^seed (\d+): (.*)$", process.stdout, re.MULTILINE))
            ended = list(_read_results(case.config, results.read_bytes(), messages))
            runs += ended
            for name, count in re.findall(r"^hits (\w+) (\d+)$", process.stdout, re.MULTILINE):
                hits[name] = hits.get(name, 0) + int(count)
            faults += _describe_faults(case.config, process.stdout)
            reports += process.stderr
            perturb_seeds = perturb_seeds[len(ended) :]
            if schedule.stop_at_first and process.returncode != 0 and any(done.message != "right" for done in ended):
                break
            if perturb_seeds:
                lost = perturb_seeds[0]
                runs.append(Run(lost, messages.get(str(lost), f"the program ended with {process.returncode}"), {}))
                perturb_seeds = range(0) if schedule.stop_at_first else perturb_seeds[1:]
    return Outcome(tuple(runs), hits, tuple(faults), reports, time.monotonic() - started)


def _call(command: Sequence[str], schedule: Schedule, num_runs: int) -> subprocess.CompletedProcess[str]:
    # Overrides what the caller's environment may hold: no suppression comes in from there.
    environment = os.environ | {"TSAN_OPTIONS": f"exitcode={EXIT_TSAN} halt_on_error={int(schedule.stop_at_first)}"}
    limit_s = schedule.limit_s * num_runs + 60

    def call(prefix: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, *command], capture_output=True, text=True, errors="replace", timeout=limit_s, env=environment
        )

    process = call([])
    # Kernels that place mappings with much randomness are too much for the ThreadSanitizer of gcc 12.
    if "unexpected memory mapping" in process.stderr and (setarch := shutil.which("setarch")):
        process = call([setarch, platform.machine(), "--addr-no-randomize"])
    return process


def _request(case: Case, schedule: Schedule, perturb_seeds: range) -> bytes:
    layout = buffer_layout(case.config)
    options = OPTIONS_STRUCT.ctype(
        seed=case.seed,
        first_perturb_seed=perturb_seeds[0],
        timeout_ns=int(schedule.timeout_s * 1e9),
        buffer_bytes=layout.num_bytes,
        num_perturb_seeds=len(perturb_seeds),
        num_epochs=case.epochs,
        num_workers=schedule.workers,
        truncate_every=case.truncate_every,
        barriers=schedule.barriers,
        dump_inputs=schedule.dump_inputs,
        stop_at_first=schedule.stop_at_first,
        limit_s=schedule.limit_s,
    )
    return bytes(problem_struct(case.config)) + bytes(layout.as_struct()) + bytes(options)


def _describe_faults(config: MegaMoEConfig, text: str) -> list[str]:
    rows = [[int(word) for word in line.split()] for line in re.findall(r"^fault ([\d ]+)$", text, re.MULTILINE)]
    if not rows:
        return []
    words = torch.tensor(rows, dtype=torch.int64).reshape(-1, FAULT_RECORD.num_words)
    return [fault.describe(config) for fault in read_fault_records(len(rows), words)]


# --- results -----------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def at_end(self) -> bool:
        return self.position >= len(self._data)

    def take(self, num_bytes: int) -> bytes:
        piece = self._data[self.position : self.position + num_bytes]
        if len(piece) != num_bytes:
            raise EOFError(f"results end at byte {len(self._data)}, expected {num_bytes} bytes at {self.position}")
        self.position += num_bytes
        return piece

    def struct(self, struct: abi.StructType) -> Any:
        return struct.ctype.from_buffer_copy(self.take(ctypes.sizeof(struct.ctype)))

    def tensor(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.take(count * dtype.itemsize)), dtype=dtype).reshape(shape)


def _read_results(config: MegaMoEConfig, data: bytes, messages: Mapping[str, str]) -> Iterator[Run]:
    reader = _Reader(data)
    while not reader.at_end():
        header = reader.struct(RUN_STRUCT)
        end = reader.position + header.num_bytes
        records: dict[tuple[int, int], Record] = {}
        weights: dict[int, tuple[L1Weights, L2Weights]] = {}
        while reader.position < end:
            record = reader.struct(RECORD_STRUCT)
            if record.has_weights:
                weights[record.rank] = _read_weights(config, reader)
                continue
            y = reader.take(record.num_y_rows * config.hidden * torch.bfloat16.itemsize)
            inputs = _read_inputs(config, reader, record.num_input_rows)
            records[record.epoch, record.rank] = Record(Stage(record.stage), y, record.view_digest, inputs)
        seed = int(header.perturb_seed)
        yield Run(seed, messages[str(seed)], records, tuple(weights[rank] for rank in sorted(weights)))


def _read_weights(config: MegaMoEConfig, reader: _Reader) -> tuple[L1Weights, L2Weights]:
    local, hidden, intermediate = config.experts_per_rank, config.hidden, config.intermediate_hidden
    e4m3, f32 = torch.float8_e4m3fn, torch.float32
    l1 = reader.tensor(e4m3, local, 2 * intermediate, hidden)
    l1_sf = reader.tensor(f32, local, 2 * intermediate // SCALE_BLOCK, hidden // SCALE_BLOCK)
    l2 = reader.tensor(e4m3, local, hidden, intermediate)
    l2_sf = reader.tensor(f32, local, hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK)
    return L1Weights(l1, l1_sf), L2Weights(l2, l2_sf)


def _read_inputs(config: MegaMoEConfig, reader: _Reader, tokens: int) -> RankInputs:
    return RankInputs(
        x=reader.tensor(torch.float8_e4m3fn, tokens, config.hidden),
        x_sf=reader.tensor(torch.float32, tokens, config.hidden_scales),
        topk_idx=reader.tensor(torch.int64, tokens, config.num_topk),
        topk_weights=reader.tensor(torch.float32, tokens, config.num_topk),
    )


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
            rows = sum(a != b for a, b in zip(_rows(got.y), _rows(record.y), strict=True))
            return f"{where}: y differs from the undisturbed run ({rows} 16-byte pieces)"
        if got.view_digest != record.view_digest:
            return f"{where}: l2_acts or combine differ from the undisturbed run at stage {record.stage.name}"
    return ""


def _rows(data: bytes) -> list[bytes]:
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
    (Case(replace(SMALL, num_ranks=2, num_topk=8, num_max_tokens_per_rank=70), seed=16, epochs=4, truncate_every=4), 2),
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


def _judge(cases: Sequence[tuple[Case, Build, Schedule, range]]) -> Verdict:
    wrong: dict[str, str] = {}
    hits: dict[str, int] = {}
    faults: list[str] = []
    reports, seconds, num_runs = "", 0.0, 0
    for number, (case, build, schedule, seeds) in enumerate(cases):
        expected = undisturbed(case)
        outcome = run(case, build, schedule, seeds)
        for result in outcome.runs:
            if found := difference(result, expected):
                wrong[f"{number}/{result.perturb_seed}"] = found
        for name, count in outcome.hits.items():
            hits[name] = hits.get(name, 0) + count
        num_runs += len(outcome.runs)
        reports += outcome.reports
        faults += outcome.faults
        seconds += outcome.seconds
        if schedule.stop_at_first and (wrong or reports):
            break
    return Verdict(wrong, num_runs, hits, reports, tuple(faults), seconds)


def plain(mutation: str = "none", *, stop_at_first: bool = False) -> Verdict:
    """Every plain case once, 3 workers a rank."""
    schedule = Schedule(stop_at_first=stop_at_first)
    return _judge([(case, Build(mutation=mutation), schedule, range(1)) for case in PLAIN_CASES])


def tsan(mutation: str = "none", *, stop_at_first: bool = False) -> Verdict:
    """8 ranks of 3 workers under ThreadSanitizer."""
    schedule = Schedule(timeout_s=60.0, limit_s=240, stop_at_first=stop_at_first)
    return _judge([(TSAN_CASE, Build(tsan=True, mutation=mutation), schedule, range(1))])


def perturb(mutation: str = "none", *, num_seeds: int = 300, stop_at_first: bool = False) -> Verdict:
    """``num_seeds`` perturbed runs, dealt out over the perturbation cases."""
    build = Build(perturb=True, mutation=mutation)
    share = -(-num_seeds // len(PERTURB_CASES))
    cases = []
    for number, (case, workers) in enumerate(PERTURB_CASES):
        seeds = range(number * share, min((number + 1) * share, num_seeds))
        cases.append((case, build, Schedule(workers, stop_at_first=stop_at_first), seeds))
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
