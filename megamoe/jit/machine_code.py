"""The machine code of the kernels of a cubin (ELF64), as far as a look at opcodes says something about it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

# Where an ELF64 header has its table of sections: offset, size and number of entries, and which one holds the names.
_E_SHOFF, _E_SHENTSIZE, _E_SHSTRNDX = 0x28, 0x3A, 0x3E


@dataclass(frozen=True)
class Section:
    """name_offset: in the section of names. link: ``sh_link``, the number of a section that belongs to this one."""

    name_offset: int
    kind: int
    offset: int
    num_bytes: int
    link: int


def cubin_sections(cubin: bytes) -> list[Section]:
    """In the order of their numbers. Raises ValueError where the bytes are no such file."""
    is_elf64 = cubin[:5] == b"\x7fELF\x02"
    if not is_elf64:
        raise ValueError(f"not a cubin: it begins with {cubin[:5]!r}, expected an ELF64 file")
    offset = struct.unpack_from("<Q", cubin, _E_SHOFF)[0]
    size, count = struct.unpack_from("<HH", cubin, _E_SHENTSIZE)
    return [Section(*struct.unpack_from("<II16xQQI", cubin, offset + index * size)) for index in range(count)]


def text_at(cubin: bytes, offset: int) -> str:
    """The text that ends with a zero."""
    return cubin[offset : cubin.index(b"\0", offset)].decode()


def kernel_code(cubin: bytes) -> Mapping[str, bytes]:
    """Kernel name -> its instructions, 16 bytes each. Raises ValueError as `cubin_sections`."""
    sections = cubin_sections(cubin)
    names = sections[struct.unpack_from("<H", cubin, _E_SHSTRNDX)[0]].offset
    named = ((text_at(cubin, names + section.name_offset), section) for section in sections)
    return {
        name.removeprefix(".text."): cubin[section.offset : section.offset + section.num_bytes]
        for name, section in named
        if name.startswith(".text.")
    }


_OPCODE = 0xFFF  # of the first word; read off cuobjdump -sass, CUDA 13.0, sm_90a (2026-11-30)
_PRODUCTS = (0x9F3, 0xDF3)  # QGMMA: rows from shared memory, from registers
_TO_UNIFORM = 0x2CA  # R2UR
_GROUP = 0x9C5  # WARPGROUP.ARRIVE before a group of products, WARPGROUP.DEPBAR behind it


def count_products(code: bytes) -> int:
    """Tensor-core products in a kernel's code for sm_90a."""
    return sum(word & _OPCODE in _PRODUCTS for word, _ in struct.iter_unpack("<QQ", code))


def moves_between_products(code: bytes) -> int:
    """Moves from a vector register to a uniform one between two products of one group.

    A product takes its descriptors from uniform registers. ptxas moves them there before each product, where it keeps
    them in vector registers; before the first of a group such a move may be of something else.
    """
    moves = since_product = 0
    in_group = False  # a product was seen
    for word, _ in struct.iter_unpack("<QQ", code):
        opcode = word & _OPCODE
        if opcode in _PRODUCTS:
            moves += since_product
            since_product, in_group = 0, True
        elif opcode == _GROUP:
            since_product, in_group = 0, False
        elif opcode == _TO_UNIFORM and in_group:
            since_product += 1
    return moves
