"""``python -m bench moe``: the whole layer at several token counts, beside what else this machine can run.

Alone: virtual ranks (``--ranks``, ``--gpus``). Under torchrun: one rank a process and a GPU, over NCCL.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from bench.baseline import TorchBaseline, missing_baseline
from bench.builds import timed_build
from bench.floors import Floor, Load, Machine, floor, mean_load, measure_load
from bench.fused import OPTIONS_VARIABLE, FusedContender, FusedLayer
from bench.inputs import InputSet, NaturalWeights, draw_inputs, random_weights
from bench.peers import ERRORS, DeepGemm, find_deep_gemm, peer_name
from bench.report import HEADER, Row, compact_table, draw_roofline, figures, format_row, write_json
from bench.routes import ROUTINGS
from bench.shapes import SHAPES, Shape
from bench.timing import REGIMES, Contender, Timer, Timing
from bench.world import World, open_world
from megamoe.config import ACCUMULATE_CHOICES, Accumulate
from megamoe.weights import transform_weights_for_mega_moe

Word = TypeVar("Word", bound=str)

TOKENS = "1,8,32,128,512,1024,2048,4096,8192"


class Layer(Contender, Protocol):
    """A contender as this module drives it."""

    tolerance: float
    """Largest norm-wise difference of its y from the first contender's."""

    def use(self, sets: Sequence[InputSet]) -> None: ...

    def answer(self) -> dict[int, Tensor]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """What was asked for, checked."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    experts_per_rank: int
    routings: tuple[str, ...]
    accumulations: tuple[Accumulate, ...]
    regimes: tuple[str, ...]
    variants: tuple[str | None, ...]
    beside: tuple[str, ...]
    ranks: int | None
    gpus: int | None
    sets: int
    seconds: float
    sustained_seconds: float
    out: Path
    name: str
    picture: bool


def _choice(text: str, name: str, allowed: Sequence[Word]) -> tuple[Word, ...]:
    parts = [part for part in text.split(",") if part]
    for part in parts:
        if part not in allowed:
            raise ValueError(f"{name}: got {part!r}, expected a list of {', '.join(allowed)}")
    return tuple(word for part in parts for word in allowed if word == part)


def parse_variants(text: str) -> tuple[str | None, ...]:
    """``none;-DA=1 -DB=2`` as build options; ``none`` is the build without any. Nothing: the environment's own."""
    if not text:
        return (None,)
    return tuple("" if part.strip() in ("", "none") else part.strip() for part in text.split(";"))


BESIDE = ("baseline", "deep_gemm")


def parse(arguments: Sequence[str]) -> Options:
    """Raises ValueError for what does not fit; argparse ends the process for what it does not know."""
    parser = argparse.ArgumentParser(prog="python -m bench moe", description=__doc__)
    add = parser.add_argument
    add("--shape", default="deepseek-v3", help=f"list of {', '.join(SHAPES)}")
    add("--tokens", default=TOKENS, help="list of tokens a rank (default %(default)s)")
    add("--experts-per-rank", type=int, default=32)
    add("--routing", default="balanced", help=f"list of {', '.join(ROUTINGS)}")
    add("--accumulate", default="fp32,fast", help=f"list of {', '.join(ACCUMULATE_CHOICES)} (default %(default)s)")
    add("--regime", default="bursts,cold", help=f"list of {', '.join(REGIMES)} (default %(default)s)")
    add("--variants", default="", help="builds to compare: '--variants=none;-DMEGAMOE_GROUP_BLOCKS=8' (; between them)")
    add("--beside", default=",".join(BESIDE), help=f"list of {', '.join(BESIDE)}, or nothing (default %(default)s)")
    add("--ranks", type=int, help="virtual ranks (default 1); under torchrun it has them")
    add("--gpus", type=int, help="GPUs to spread virtual ranks over (default: one a rank, as far as there are)")
    add("--sets", type=int, default=4, help="input sets to rotate over (default %(default)s)")
    add("--seconds", type=float, default=0.4, help="time of a row in bursts and cold (default %(default)s)")
    add("--sustained-seconds", type=float, default=4.0, help="time of a sustained row (default %(default)s)")
    add("--out", type=Path, default=Path("runs/bench"), help="folder for NAME.json and NAME.png (default %(default)s)")
    add("--name", default="moe", help="of those files (default %(default)s)")
    add("--no-picture", action="store_true", help="no NAME.png")
    given = parser.parse_args(list(arguments))
    tokens = tuple(int(part) for part in given.tokens.split(",") if part)
    if not tokens or min(tokens) < 1 or given.sets < 1 or given.experts_per_rank < 1:
        raise ValueError("tokens, sets and experts-per-rank must be at least 1")
    return Options(
        shapes=_choice(given.shape, "shape", tuple(SHAPES)),
        tokens=tokens,
        experts_per_rank=given.experts_per_rank,
        routings=_choice(given.routing, "routing", ROUTINGS),
        accumulations=_choice(given.accumulate, "accumulate", ACCUMULATE_CHOICES),
        regimes=_choice(given.regime, "regime", REGIMES),
        variants=parse_variants(given.variants),
        beside=_choice(given.beside, "beside", BESIDE),
        ranks=given.ranks,
        gpus=given.gpus,
        sets=given.sets,
        seconds=given.seconds,
        sustained_seconds=given.sustained_seconds,
        out=given.out,
        name=given.name,
        picture=not given.no_picture,
    )


@dataclass(frozen=True)
class Absent:
    """A contender that cannot run here."""

    name: str
    accumulate: str
    combine: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """On a contender's y: its norm-wise difference from the first one's, and why the contender is left out, if so."""

    error: float
    reason: str | None


class Bench:
    """One run: contenders, timing, rows."""

    def __init__(self, options: Options, world: World) -> None:
        self.options = options
        self.world = world
        self.machine = Machine(name=torch.cuda.get_device_name(world.devices[0]))
        self.timer = Timer(world)
        self.rows: list[Row] = []
        self.wrong = 0
        self._told: set[tuple[str, str, str | None]] = set()
        self._environment = os.environ.get(OPTIONS_VARIABLE)
        self.started = time.monotonic()
        self.facts: dict[str, object] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "arguments": " ".join(sys.argv[1:]),
            "gpus_in_machine": torch.cuda.device_count(),
        }

    def say(self, text: str) -> None:
        if self.world.speaks:
            print(text, flush=True)

    def _file(self, ending: str) -> Path:
        return self.options.out / f"{self.options.name}.{ending}"

    def run(self) -> int:
        """Every shape, routing and token count. Returns the exit code: 1 when answers disagree."""
        if len(self.options.variants) > 1:
            ranks_here = self.world.gpu_of_rank.count(0)
            self.say(timed_build(self.options.variants, ranks_here, self.options.accumulations))
        for name in self.options.shapes:
            self._shape(SHAPES[name])
        self.say("")
        for line in compact_table(self.rows):
            self.say(line)
        if self.world.speaks:
            if self.options.picture:
                picture = self._file("png")
                self.say(draw_roofline(picture, self.machine, self.rows) or f"picture: {picture}")
            self.say(f"json: {self._file('json')}; {time.monotonic() - self.started:.0f} s")
        if self.wrong:
            self.say(f"{self.wrong} answers were WRONG; see the rows above")
        return 1 if self.wrong else 0

    def _shape(self, shape: Shape) -> None:
        began = time.monotonic()
        present, absent = self._contenders(shape)
        self.world.synchronize()
        self.say(
            f"{shape.name}: hidden {shape.hidden}, intermediate {shape.intermediate}, top-{shape.topk}, "
            f"{self.world.num_ranks} ranks ({self.world.kind}), {self.options.experts_per_rank} experts a rank, "
            f"{self.machine.name}; set up in {time.monotonic() - began:.1f} s"
        )
        try:
            for routing in self.options.routings:
                self.say(f"routing {routing}\n{HEADER}")
                for tokens in self.options.tokens:
                    self._point(shape, routing, tokens, present, absent)
        finally:
            for contender in present:
                contender.close()
            self._restore_options()
            torch.cuda.empty_cache()

    def _restore_options(self) -> None:
        """Variants set the variable; the next shape's buffers are opened with what it was."""
        if self._environment is None:
            os.environ.pop(OPTIONS_VARIABLE, None)
        else:
            os.environ[OPTIONS_VARIABLE] = self._environment

    def _contenders(self, shape: Shape) -> tuple[list[Layer], list[Absent]]:
        options, world = self.options, self.world
        capacity = max(options.tokens)
        weights = {
            rank: random_weights(shape, options.experts_per_rank, world.device_of(rank), seed=rank)
            for rank in world.local_ranks
        }
        transformed = {
            rank: transform_weights_for_mega_moe(natural.l1, natural.l2) for rank, natural in weights.items()
        }
        present: list[Layer] = []
        absent: list[Absent] = []
        for accumulate in options.accumulations:
            layer = FusedLayer(world, shape, options.experts_per_rank, capacity, transformed, accumulate)
            present += [FusedContender(layer, variant) for variant in options.variants]
        self._add_others(shape, weights, present, absent)
        return present, absent

    def _add_others(
        self, shape: Shape, weights: dict[int, NaturalWeights], present: list[Layer], absent: list[Absent]
    ) -> None:
        options, world = self.options, self.world
        if "baseline" in options.beside:
            reason = missing_baseline(world)
            if reason is None:
                present.append(TorchBaseline(world, shape, options.experts_per_rank, weights))
            else:
                absent.append(Absent("nccl+scaled_grouped_mm", TorchBaseline.accumulate, TorchBaseline.combine, reason))
        if "deep_gemm" in options.beside:
            module, reason = find_deep_gemm(world)
            peer: DeepGemm | None = None
            if module is not None:
                try:
                    peer = DeepGemm(module, world, shape, options.experts_per_rank, weights)
                except ERRORS as error:
                    reason = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
            if world.largest([float(peer is None)])[0]:
                reason = reason or "it cannot run on another rank"
                absent.append(Absent(peer_name(), DeepGemm.accumulate, DeepGemm.combine, reason))
            elif peer is not None:
                present.append(peer)

    def _point(
        self, shape: Shape, routing: str, tokens: int, present: Sequence[Layer], absent: Sequence[Absent]
    ) -> None:
        options, world = self.options, self.world
        sets = [
            draw_inputs(world, shape, options.experts_per_rank, tokens, routing, seed=1 + index)
            for index in range(options.sets)
        ]
        load = mean_load(
            [measure_load(shape, one.all_routes, options.experts_per_rank, world.gpu_of_rank) for one in sets]
        )
        least = floor(self.machine, shape, load)
        verdicts = self._answers(present, sets)
        right = [contender for contender in present if verdicts[id(contender)].reason is None]
        wrong = [Absent(one.name, one.accumulate, one.combine, verdicts[id(one)].reason or "") for one in present]
        missing = [*absent, *(one for one in wrong if one.reason)]
        self.wrong += len(present) - len(right)
        for regime in options.regimes:
            for contender, timing in self._time(regime, right):
                error = None if contender is right[0] else verdicts[id(contender)].error
                self._keep(shape, routing, tokens, regime, contender, load, least, timing, error)
            for one in missing:
                self._row(self._label(shape, routing, tokens, regime, one, skipped=one.reason))

    def _answers(self, present: Sequence[Layer], sets: Sequence[InputSet]) -> dict[int, Verdict]:
        """Run every contender once on the first set, and compare its y with the first contender's."""
        verdicts: dict[int, Verdict] = {}
        first: dict[int, Tensor] | None = None
        for contender in present:
            failure = None
            answer: dict[int, Tensor] = {}
            try:
                contender.use(sets)
                contender.load(0)
                contender.call()
                contender.check()
                answer = contender.answer()
                worst = max(_difference(y, None if first is None else first[rank]) for rank, y in answer.items())
            except ERRORS as error:  # a MegaMoEFault is a RuntimeError too: the others are timed all the same
                failure, worst = f"FAILED: {type(error).__name__}: {str(error)[:300]}", float("inf")
            worst = self.world.largest([worst])[0]
            if failure is None and worst == float("inf"):
                failure = "WRONG: y has NaN or inf, or it FAILED on another rank"
            if failure is None and not worst <= contender.tolerance:
                failure = (
                    f"WRONG: y differs by {worst:.2e} from the first one's, at most {contender.tolerance:g} expected"
                )
            verdicts[id(contender)] = Verdict(worst, failure)
            if first is None and failure is None:
                first = {rank: y.clone() for rank, y in answer.items()}
        return verdicts

    def _time(self, regime: str, present: Sequence[Layer]) -> list[tuple[Layer, Timing]]:
        options = self.options
        timed = {"bursts": self.timer.bursts, "cold": self.timer.cold, "sustained": self.timer.sustained}[regime]
        seconds = options.sustained_seconds if regime == "sustained" else options.seconds
        return list(zip(present, timed(present, options.sets, seconds), strict=True))

    def _label(
        self,
        shape: Shape,
        routing: str,
        tokens: int,
        regime: str,
        contender: Contender | Absent,
        **columns: object,
    ) -> Row:
        return Row(
            contender=contender.name,
            accumulate=contender.accumulate,
            combine=contender.combine,
            shape=shape.name,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            topk=shape.topk,
            ranks=self.world.num_ranks,
            gpus=max(self.world.gpu_of_rank) + 1,
            group=self.world.kind,
            experts_per_rank=self.options.experts_per_rank,
            routing=routing,
            tokens=tokens,
            regime=regime,
            **columns,  # type: ignore[arg-type]
        )

    def _keep(
        self,
        shape: Shape,
        routing: str,
        tokens: int,
        regime: str,
        contender: Contender,
        load: Load,
        least: Floor,
        timing: Timing,
        error: float | None,
    ) -> None:
        columns = figures(shape, tokens, load, least, timing)
        self._row(self._label(shape, routing, tokens, regime, contender, **columns, y_error=error))

    def _row(self, row: Row) -> None:
        self.rows.append(row)
        if self.world.speaks:
            key = (row.contender, row.accumulate, row.skipped)
            if (
                row.skipped is None or key not in self._told
            ):  # a reason is printed once, and is in every row of the JSON
                print(format_row(row), flush=True)
            self._told.add(key)
            write_json(self._file("json"), self.machine, self.facts, self.rows)


def _difference(y: Tensor, expected: Tensor | None) -> float:
    """Norm-wise; against nothing 0, or NaN where y has one."""
    if expected is None:
        return 0.0 if bool(y.isfinite().all()) else float("inf")
    norm = float(expected.float().norm())
    error = float((y.float() - expected.float()).norm()) / max(norm, 1e-30)
    return error if error == error else float("inf")  # a maximum over ranks would lose a NaN


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 done, 1 an answer was wrong, 2 a bad call. A fault of the device is an exception."""
    try:
        options = parse(arguments)
        world = open_world(options.ranks, options.gpus)
    except ValueError as error:
        print(f"bench moe: {error}", file=sys.stderr)
        return 2
    code = Bench(options, world).run()
    world.close()  # not after an exception: other ranks may be in a collective, and would keep this one waiting
    return code
