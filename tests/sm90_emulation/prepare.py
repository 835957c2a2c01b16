"""Copies of the SM90 headers in which calls of emulation.hpp stand in place of asm statements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

EMULATED_FILES = (
    "roles/math.hpp",
    "roles/products*.hpp",
    "roles/*_epilogue.hpp",
    "ptx/store.hpp",
    "ptx/transpose.hpp",
)
"""Of these every instruction is to be known. Elsewhere an unknown one ends the program where a thread comes to it."""

INSTRUCTIONS = {
    "": ";",
    "mov.u32 %0, %%tid.x;": "$0 = threadIdx.x;",
    "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;": "$0 = emulation::movmatrix($1);",
    "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;": "$0 = emulation::to_e4m3x2($1, $2);",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "$0 = emulation::to_bf16x2($1, $2);",
    "rcp.approx.ftz.f32 %0, %1;": "$0 = emulation::approximate_reciprocal($1);",
    "{ .reg .pred needed; setp.ne.u32 needed, %5, 0; "
    "@needed ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4]; }": (
        "emulation::ldmatrix($5, $4, $0, $1, $2, $3);"
    ),
    "wgmma.fence.sync.aligned;": ";",
    "wgmma.commit_group.sync.aligned;": "emulation::commit_products();",
    "wgmma.wait_group.sync.aligned 0;": "emulation::wait_products();",
    "cp.async.ca.shared.global [%0], [%1], 4;": "emulation::copy_later($0, $1);",
    "cp.async.commit_group;": ";",
    "cp.async.wait_group 0;": "emulation::wait_copies();",
    "barrier.cta.sync %0, %1;": "emulation::named_barrier($0, $1);",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": "emulation::arrive($0);",
    # release_stage()
    "{ .reg .pred chosen, both; elect.sync _|chosen, 0xffffffff; setp.ne.and.u32 both, %1, 0, chosen; "
    "@chosen mbarrier.arrive.shared::cta.b64 _, [%0]; @both mbarrier.arrive.shared::cluster.b64 _, [%2]; }": (
        "emulation::release($0, $1, $2);"
    ),
    # store_if()
    "{ .reg .pred needed; setp.ne.u32 needed, %5, 0; @needed st.global.v4.u32 [%0], {%1, %2, %3, %4}; }": (
        "emulation::store($5, $0, {$1, $2, $3, $4});"
    ),
    "{ .reg .pred needed; setp.ne.u32 needed, %3, 0; @needed st.global.v2.u32 [%0], {%1, %2}; }": (
        "emulation::store($3, $0, {$1, $2});"
    ),
    "{ .reg .pred needed; setp.ne.u32 needed, %2, 0; @needed st.global.u32 [%0], %1; }": (
        "emulation::store($2, $0, {$1});"
    ),
    # wait_barrier_if() and test_barrier_if()
    "{ .reg .pred reached, skipped; setp.eq.u32 skipped, %2, 0; @skipped bra done; again: "
    "mbarrier.try_wait.parity.shared::cta.b64 reached, [%0], %1; @reached bra done; bra again; done: }": (
        "emulation::wait($2, $0, $1);"
    ),
    "{ .reg .pred reached, needed; setp.ne.u32 needed, %3, 0; setp.eq.u32 reached, %3, 0; "
    "@needed mbarrier.test_wait.parity.shared::cta.b64 reached, [%1], %2; selp.u32 %0, 1, 0, reached; }": (
        "$0 = emulation::test($3, $1, $2);"
    ),
}
"""Text of an asm statement -> statement in its place; $0 is the expression of operand %0."""

_PRODUCT = re.compile(
    r"\{\.reg \.pred keep; setp\.ne\.b32 keep, %(?P<keep>\d+), 0; "
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k32\.f32\.e4m3\.e4m3 \{(?P<sums>[^}]*)\}, "
    r"(?P<rows>%\d+|\{[^}]*\}), %(?P<descriptor>\d+), keep, 1, 1;\}"
)
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|.', re.DOTALL)


class UnknownAsm(ValueError):
    """An asm statement that the emulation has no words for, or none where it expects one."""


def prepare(sm90: Path, generated: Mapping[str, str], to: Path) -> dict[str, str]:
    """Writes the headers below `sm90`, which is csrc/sm90, to `to`; returns the generated ones, by name as they came.

    Raises UnknownAsm.
    """
    used: set[str] = set()
    for path in sorted(sm90.rglob("*.hpp")):
        name = path.relative_to(sm90)
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        strict = any(name.match(pattern) for pattern in EMULATED_FILES)
        target.write_text(_replace_asm(str(name), path.read_text(), strict, used))
    emulated = {name: _replace_asm(name, text, True, used) for name, text in generated.items()}
    gone = sorted(set(INSTRUCTIONS) - used)
    if gone:
        raise UnknownAsm(f"no header of {sm90} has this asm any more; take it out of INSTRUCTIONS: {gone[0]!r}")
    return emulated


def _replace_asm(name: str, text: str, strict: bool, used: set[str]) -> str:
    parts, at = [], 0
    for match in _ASM.finditer(text):
        end = _end_of_parenthesis(text, match.end())
        instruction, operands = _read_asm(text[match.end() : end - 1])
        if text[end] != ";":
            raise UnknownAsm(f"{name}: asm that is no statement: {instruction!r}")
        statement = _statement(instruction, operands)
        if statement is None:
            if strict:
                raise UnknownAsm(f"{name}: teach tests/sm90_emulation/prepare.py this asm: {instruction!r}")
            statement = f'emulation::fail("{name}: not emulated: {instruction}");'
        used.add(instruction)
        parts += [text[at : match.start()], statement]
        at = end + 1
    return "".join(parts) + text[at:]


def _statement(instruction: str, operands: list[str]) -> str | None:
    product = _PRODUCT.fullmatch(instruction)
    if product:
        columns = int(product["columns"])
        sums = [f"%{i}" for i in range(columns // 2)]
        if product["sums"].split(", ") != sums or operands[: len(sums)] != [f"sum[{i}]" for i in range(len(sums))]:
            raise UnknownAsm(f"accumulators of a product that are not sum[0], sum[1] and so on: {instruction!r}")
        rows = [operands[int(number)] for number in re.findall(r"%(\d+)", product["rows"])]
        given = f"{{{', '.join(rows)}}}" if product["rows"].startswith("{") else rows[0]
        name = "multiply" if product["rows"].startswith("{") else "multiply_shared"
        last = f"{operands[int(product['descriptor'])]}, {operands[int(product['keep'])]}"
        return f"emulation::{name}<{columns}>(sum, {given}, {last});"
    statement = INSTRUCTIONS.get(instruction)
    return statement and re.sub(r"\$(\d)", lambda number: f"({operands[int(number[1])]})", statement)


def _end_of_parenthesis(text: str, start: int) -> int:
    """Behind the parenthesis that closes the one before `start`."""
    depth = 1
    for token in _TOKEN.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    raise UnknownAsm(f"a parenthesis that nothing closes: {text[start : start + 80]!r}")


def _read_asm(inside: str) -> tuple[str, list[str]]:
    """The instructions, with one space where a line ends, and the operands' expressions."""
    head = re.match(r'\s*(?:"(?:[^"\\]|\\.)*"\s*)*', inside)
    assert head is not None
    literals = re.findall(r'"((?:[^"\\]|\\.)*)"', head[0])
    operands = []
    at = head.end()
    while match := re.compile(r'"[=+]?\w+"\s*\(').search(inside, at):
        at = _end_of_parenthesis(inside, match.end())
        operands.append(inside[match.end() : at - 1])
    return " ".join("".join(literals).replace(r"\n\t", " ").split()), operands
