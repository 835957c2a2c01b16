"""compute-sanitizer's racecheck on the fused kernel, and on a program that hands slots over as the kernel does.

    PYTHONPATH=. python3 tests/device/racecheck.py minimal
    PYTHONPATH=. python3 tests/device/racecheck.py kernel

The tool knows mbarriers, but seems to count an arrival for the lane that arrives: that __syncwarp before it orders the
other lanes' accesses too, it may not see. `minimal` runs racecheck_minimal.cu, whose ways to hand a slot over are right
by PTX's memory model, except for one that the tool must report. `kernel` runs small_run.py, built with line numbers,
and passes when `minimal` has reports in its right ways on this machine too, and every report is of two accesses
- to fields of a TileSlot, one of them by the schedule role,
- to `partner_empty`, written by the schedule role before the first tile of a pair and read by the math warps as they
  begin a tile, or
- to the amax that the warpgroups exchange, whose place comes again four tiles later, when the first is told of.
Whatever else is reported is a race, also what has no source line: the tool leaves some out, and then nvdisasm is asked.
It may give one in either of the two builds of the kernel that run: both then have to be such accesses.
So of these words, and of them only, the tool says nothing: that they are handed over rightly is argued, not measured.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megamoe.jit import csrc_dir, find_nvcc
from megamoe.targets import sm90

HERE = Path(__file__).parent
# More than a CTA has (36): the tool takes their number from the compiler, which counts an array of them as one.
TOOL = ("compute-sanitizer", "--tool", "racecheck", "--num-cuda-barriers", "48", "--print-limit", "0")
RIGHT_WAYS = ("direct", "through", "each_lane")
HANDED_BY_WARP = ("direct", "through")  # as in the kernel: one arrival for a warp
ACCESS = re.compile(r"(Read|Write) access at (.+?)\+0x([0-9a-f]+)(?: in ([^\s:]+):(\d+))?(?: \[\d+ hazards?\])?\s*$")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
FIELD = r"\.(?:work|block|column|rows|expert|height|depth|end|pieces|turn|failed|stages|shared|scales)\b"
SLOT_FIELD = {
    "schedule.hpp": re.compile(rf"\bslot{FIELD}|\bshared_\.tiles\[.+\]{FIELD}"),
    **dict.fromkeys(
        ("load.hpp", "math.hpp", "products.hpp", "products_fast.hpp", "products_swapped.hpp", "swapped_epilogue.hpp"),
        re.compile(rf"\b(?:slot|tile){FIELD}"),
    ),
}
LINES = {"MEGAMOE_SM90_OPTIONS": "-lineinfo"}
LINE_MARKER = re.compile(r'//## File "(.+)", line (\d+)')
SHARED_ACCESS = re.compile(  # also by generic addresses
    r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?"
    r"(?:LDSM?|STSM?|ATOMS|SYNCS|LDGSTS|STAS|UBLKCP|UTMALDG|LD|ST|ATOM|RED)\b"
)
READS_PARTNER_EMPTY = ("products.hpp", "products_fast.hpp", "products_swapped.hpp")


@dataclass(frozen=True)
class Access:
    """`file` and `line` of the source, empty and 0 where the tool names none."""

    kind: str
    kernel: str
    offset: int
    file: str
    line: int

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else f"{self.kernel}+0x{self.offset:x}"
        return f"{self.kind.lower()} {where} {source_line(self)}"


@dataclass(frozen=True)
class Report:
    """One write or read, and another that the tool finds unordered with it."""

    first: Access
    second: Access


@dataclass(frozen=True)
class Outcome:
    rc: int
    output: str
    reports: tuple[Report, ...]
    complete: bool  # the tool's summary is there, and all it counts was read


def source_line(access: Access) -> str:
    """Its text, or nothing: the tool names files without their folder."""
    found = list(csrc_dir().rglob(access.file)) if access.file else []
    if len(found) != 1:
        return ""
    lines = found[0].read_text().splitlines()
    return lines[access.line - 1].strip() if 0 < access.line <= len(lines) else ""


def read_reports(output: str) -> Iterator[tuple[int, Report]]:
    """Each with the number of the tool's message that it is part of."""
    message, first = 0, None
    for line in output.splitlines():
        found = ACCESS.search(line) if line.startswith("=========") else None
        if found is None:
            continue
        kind, kernel, offset, file, number = found.groups()
        access = Access(kind, kernel, int(offset, 16), Path(file or "").name, int(number or 0))
        if "Race reported between" in line:
            message, first = message + 1, access
        elif first is not None:
            yield message, Report(first, access)


def find_nvdisasm() -> str | None:
    """On PATH, beside nvcc, or triton's."""
    nvcc, triton = find_nvcc(), importlib.util.find_spec("triton")
    beside = [Path(nvcc).parent] if nvcc else []
    if triton and triton.origin:
        beside.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return shutil.which("nvdisasm", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, beside)]))


def shared_accesses(listing: str) -> dict[int, tuple[str, int]]:
    """Offset -> (file, line) of the instructions that may access shared memory, as ``nvdisasm -g`` lists them."""
    lines, place = {}, ("", 0)
    for text in listing.splitlines():
        if marker := LINE_MARKER.search(text):
            place = (Path(marker[1]).name, int(marker[2]))
        elif instruction := SHARED_ACCESS.match(text):
            lines[int(instruction[1], 16)] = place
    return lines


def readings(report: Report, listings: Sequence[dict[int, tuple[str, int]]]) -> list[Report]:
    """What it may be about, where the tool left out a line: one of these kernels' accesses at that offset."""

    def of(access: Access) -> list[Access]:
        places = sorted({listing[access.offset] for listing in listings if access.offset in listing})
        return [access] if access.file else [replace(access, file=file, line=line) for file, line in places] or [access]

    return [Report(first, second) for first in of(report.first) for second in of(report.second)]


def listings_of_kernels() -> list[dict[int, tuple[str, int]]]:
    """Of the two builds that small_run.py launches; none where there is no nvdisasm."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        print("no nvdisasm on PATH, beside nvcc or in triton: what has no source line counts as a race")
        return []
    os.environ.update(LINES)
    cubins = [sm90.build_fused(1, 128, bring_up, False).path for bring_up in (False, True)]
    return [
        shared_accesses(subprocess.run([nvdisasm, "-g", cubin], capture_output=True, text=True, check=True).stdout)
        for cubin in cubins
    ]


def racecheck(*options: str, command: Sequence[str], environment: dict[str, str] | None = None) -> Outcome:
    done = subprocess.run(
        [*TOOL, *options, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
    )
    numbered = list(read_reports(done.stdout))
    summary = SUMMARY.search(done.stdout)
    counted = int(summary[2]) + int(summary[3]) if summary else -1
    complete = counted == len({message for message, _ in numbered})
    return Outcome(done.returncode, done.stdout, tuple(report for _, report in numbered), complete)


def build_minimal() -> Path:
    source = HERE / "racecheck_minimal.cu"
    nvcc = find_nvcc()
    if nvcc is None:
        raise FileNotFoundError("nvcc: not on PATH, nor under CUDA_HOME, CUDA_PATH or /usr/local/cuda")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    program = Path(tempfile.gettempdir()) / f"racecheck_minimal-{digest}"
    if not program.exists():
        built = program.with_suffix(f".{os.getpid()}")
        subprocess.run([nvcc, "-std=c++20", "-arch=sm_90a", "-lineinfo", "-o", built, source], check=True)
        built.replace(program)
    return program


def check_minimal() -> bool:
    program = build_minimal()
    good = True
    for way in (*RIGHT_WAYS, "broken"):
        seen = racecheck(command=(str(program), way))
        right = seen.rc == 0 and seen.complete and (way != "broken" or bool(seen.reports))
        good &= right
        said = f"{len(seen.reports)} reports" + (" (false: right by the memory model)" if way in RIGHT_WAYS else "")
        print(f"{'ok    ' if right else 'WRONG '} {way}: {said if seen.reports else 'no report'}", flush=True)
        for report, times in Counter(seen.reports).most_common(8):
            print(f"       {times} x {report.first} and {report.second}")
        if not right:
            print(seen.output)
    return good


def false_reports_seen() -> bool:
    """Whether the tool reports, on this machine, ways of handing over a slot that are right."""
    program = build_minimal()
    outcomes = [racecheck(command=(str(program), way)) for way in HANDED_BY_WARP]
    return all(outcome.rc == 0 for outcome in outcomes) and any(outcome.reports for outcome in outcomes)


def of_a_slot(report: Report) -> bool:
    """Whether both accesses are to fields of a TileSlot, and one of them is the schedule role's."""
    sides = (report.first, report.second)
    known = all(side.file in SLOT_FIELD and SLOT_FIELD[side.file].search(source_line(side)) for side in sides)
    return known and any(side.file == "schedule.hpp" for side in sides)


def of_second_arrivals(report: Report) -> bool:
    """Whether the schedule role writes the address at which math warps arrive in the partner, and one reads it."""
    sides = {side.kind: side for side in (report.first, report.second)}
    if set(sides) != {"Read", "Write"}:
        return False
    read, write = sides["Read"], sides["Write"]
    written = write.file == "schedule.hpp" and source_line(write).startswith("shared_.partner_empty =")
    return written and read.file in READS_PARTNER_EMPTY and "uniform(shared.partner_empty)" in source_line(read)


def of_the_amax(report: Report) -> bool:
    """Whether one warpgroup reads and one writes in exchange_amax(); in a tile the tool knows the barrier between."""
    sides = (report.first, report.second)
    kinds = {side.kind for side in sides}
    return kinds == {"Read", "Write"} and all(
        side.file == "l1_epilogue.hpp" and re.search(r"\ball\[.+\]\[row( \+ 8)?\]", source_line(side)) for side in sides
    )


def handed_over(report: Report) -> bool:
    return of_a_slot(report) or of_second_arrivals(report) or of_the_amax(report)


def check_kernel() -> bool:
    small = racecheck(
        "--kernel-regex",
        "kns=megamoe",
        command=(sys.executable, str(HERE / "small_run.py"), "fp32"),
        environment={
            **LINES,
            "CUDA_MODULE_LOADING": "LAZY",
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        },
    )
    may_be_false = bool(small.reports) and false_reports_seen()
    if small.reports and not may_be_false:
        print("racecheck_minimal shows no false report: none here is taken for one")
    without_line = any(not side.file for report in small.reports for side in (report.first, report.second))
    listings = listings_of_kernels() if without_line else []
    races = 0
    for report, times in sorted(Counter(small.reports).items(), key=lambda item: str(item[0])):
        meant = readings(report, listings)
        excused = may_be_false and all(handed_over(reading) for reading in meant)
        races += not excused
        print(f"{'false ' if excused else 'RACE  '} {times} x", " or ".join(f"{r.first} and {r.second}" for r in meant))
    good = small.rc == 0 and small.complete and races == 0
    if small.rc != 0 or not small.complete:
        print(small.output)
    print(f"{'ok    ' if good else 'WRONG '} {len(small.reports)} reports, {races} kinds not explained, rc {small.rc}")
    return good


def main(words: Sequence[str]) -> int:
    checks = {"minimal": check_minimal, "kernel": check_kernel}
    if len(words) != 1 or words[0] not in checks:
        print(__doc__, file=sys.stderr)
        return 2
    return 0 if checks[words[0]]() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
