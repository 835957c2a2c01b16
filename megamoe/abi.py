"""Structs that Python and C++ share: each is declared once here, as a ctypes class and as C++ text."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_SCALARS: dict[str, tuple[Any, str]] = {
    "u32": (ctypes.c_uint32, "uint32_t"),
    "i32": (ctypes.c_int32, "int32_t"),
    "u64": (ctypes.c_uint64, "uint64_t"),
    "f32": (ctypes.c_float, "float"),
}


@dataclass(frozen=True)
class Field:
    """One member: ``kind`` is a scalar name (u32, i32, u64, f32) or the name of a struct declared before."""

    name: str
    kind: str
    count: int = 1
    comment: str = ""


@dataclass(frozen=True)
class StructType:
    """A struct known to both sides; ``ctype`` mirrors the C++ layout member by member."""

    name: str
    fields: tuple[Field, ...]
    ctype: type[ctypes.Structure]
    cpp: str


def declare(name: str, fields: tuple[Field, ...], known: tuple[StructType, ...] = ()) -> StructType:
    """Declare a struct for both languages. ``known`` are the structs its members may name.

    The C++ text asserts the size that ctypes computed, so a disagreement does not compile.
    """
    by_name: dict[str, Any] = {struct.name: struct.ctype for struct in known}
    c_fields: list[tuple[str, Any]] = []
    lines = [f"struct {name} {{"]
    for field in fields:
        c_type, cpp_type = _SCALARS.get(field.kind) or (by_name[field.kind], field.kind)
        c_fields.append((field.name, c_type * field.count if field.count > 1 else c_type))
        suffix = f"[{field.count}]" if field.count > 1 else ""
        comment = f"  // {field.comment}" if field.comment else ""
        lines.append(f"  {cpp_type} {field.name}{suffix};{comment}")
    ctype = type(name, (ctypes.Structure,), {"_fields_": c_fields})
    lines.append("};")
    lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(ctype)});")
    return StructType(name, fields, ctype, "\n".join(lines))
