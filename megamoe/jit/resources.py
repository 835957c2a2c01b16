"""What ptxas says about each kernel of a cubin: registers, spills, stack, shared memory, and its remarks."""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megamoe.jit.machine_code import cubin_sections, text_at


@dataclass(frozen=True)
class KernelResources:
    """One kernel, as `ptxas -v` reports it.

    registers: per thread. Where roles use setmaxnreg this is one figure for all of them.
    spill_stores_bytes, spill_loads_bytes, stack_bytes: per thread; functions that were not inlined are counted in.
    shared_bytes: static shared memory; dynamic shared memory is the launch's.
    remarks: the lines of ptxas that are no resource figures ("... are serialized ...", "'setmaxnreg' ignored ...").
    """

    registers: int
    spill_stores_bytes: int
    spill_loads_bytes: int
    stack_bytes: int
    shared_bytes: int
    remarks: tuple[str, ...]

    @property
    def spills(self) -> bool:
        return self.spill_stores_bytes > 0 or self.spill_loads_bytes > 0


_SAID = re.compile(r"^ptxas (?:info|warning|error)\s*: (.*)$")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_CUMULATIVE_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_FIGURES_ONLY = re.compile(r"Compile time = |\d+ bytes gmem|Overriding ")


def parse_ptxas_report(log: str, entry_names: frozenset[str]) -> Mapping[str, KernelResources]:
    """Kernel name (as in the cubin) -> its resources.

    A remark that names a kernel in quotes goes to that kernel, any other to all of them: ptxas prints remarks before
    it says what it compiles. What functions outside the kernels spill counts for every kernel too, for the same reason.
    Raises ValueError where the report and the cubin do not name the same kernels: a gate on spills must not pass
    because a report could not be read.
    """
    registers: dict[str, int] = {}
    shared: dict[str, int] = {}
    cumulative_stack: dict[str, int] = {}
    frames: dict[str, tuple[int, int, int]] = {}  # function -> stack, stores, loads
    remarks: dict[str, list[str]] = defaultdict(list)
    entry = function = ""
    for line in log.splitlines():
        frame = _FRAME.search(line)
        if frame and not line.startswith("ptxas warning"):
            frames[function] = (int(frame[1]), int(frame[2]), int(frame[3]))
            continue
        said = _SAID.match(line)
        if not said:
            continue
        text = said[1]
        if match := _ENTRY.match(text):
            entry = match[1]
        elif match := _PROPERTIES.match(text):
            function = match[1]
        elif match := _USED.match(text):
            registers[entry] = int(match[1])
            if match := _SHARED.search(text):
                shared[entry] = int(match[1])
            if match := _CUMULATIVE_STACK.search(text):
                cumulative_stack[entry] = int(match[1])
        elif not _FIGURES_ONLY.match(text):
            named = [name for name in entry_names if f"'{name}'" in text]
            for name in named or sorted(entry_names):
                remarks[name].append(text)
    if set(registers) != entry_names or not entry_names <= set(frames):
        raise ValueError(
            f"the cubin holds the kernels {sorted(entry_names)} and ptxas reported {sorted(registers)}; "
            f"its report was:\n{log}"
        )
    outside = [frame for name, frame in frames.items() if name not in entry_names]
    return {
        name: KernelResources(
            registers=registers[name],
            spill_stores_bytes=frames[name][1] + sum(frame[1] for frame in outside),
            spill_loads_bytes=frames[name][2] + sum(frame[2] for frame in outside),
            stack_bytes=max(frames[name][0] + sum(frame[0] for frame in outside), cumulative_stack.get(name, 0)),
            shared_bytes=shared.get(name, 0),
            remarks=tuple(remarks[name]),
        )
        for name in sorted(entry_names)
    }


def cubin_entry_names(cubin: bytes) -> frozenset[str]:
    """Names of the kernels in a cubin (ELF64): its function symbols that carry the mark of an entry.

    Raises ValueError where the bytes are no such file.
    """
    sections = cubin_sections(cubin)
    symbol_table, function_type, entry_mark = 2, 2, 0x10
    names = set()
    for table in sections:
        if table.kind != symbol_table:
            continue
        strings = sections[table.link].offset
        for at in range(table.offset, table.offset + table.num_bytes, 24):
            name, info, other, section = struct.unpack_from("<IBBH", cubin, at)
            if info & 0xF == function_type and other & entry_mark and section != 0:
                names.add(text_at(cubin, strings + name))
    return frozenset(names)
