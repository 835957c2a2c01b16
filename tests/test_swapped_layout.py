"""Tiles of few rows, whose operands are swapped, against the same tiles in place, and tall tiles against their rows cut
into two short ones: the math role's sources on a CPU.

Seen is where data goes and who waits for whom. Not seen: whether short tiles in place are right, the order in which
tensor cores add, what ptxas makes of it, memory ordering, and races between lanes of one warp.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megamoe import jit
from megamoe.targets import sm90
from tests.sm90_emulation.prepare import UnknownAsm, prepare

EMULATION = Path(__file__).parent / "sm90_emulation"
# Members are private; longjmp goes from stack to stack, which a fortified one takes for an error.
OPTIONS = ("-O1", "-fno-access-control", "-U_FORTIFY_SOURCE")


def build(headers: Path, scratch: Path) -> Path:
    """The program that compares, of the SM90 headers in a folder."""
    generated = prepare(headers, sm90.generated_headers(), scratch)
    return jit.build_shared_library(
        "swapped_layout",
        [EMULATION / "main.cpp"],
        generated=generated,
        options=OPTIONS,
        include_dirs=[EMULATION, scratch, jit.csrc_dir() / "protocol", jit.cccl_include_dir()],
        executable=True,
    ).path


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, timeout=120)


def test_tiles_of_all_shapes_leave_the_same(tmp_path: Path) -> None:
    """Every byte of every rank, and every arrival at a barrier."""
    done = run(build(jit.csrc_dir() / "sm90", tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"\d+ tiles leave the same\n", done.stdout)


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(jit.csrc_dir() / "sm90", tmp_path / "sm90"))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_tokens_in_another_order_are_seen(headers: Path, tmp_path: Path) -> None:
    change(headers / "roles" / "products_swapped.hpp", "8 * group + 2 * (lane % 4) + q", "8 * group + lane % 4 + 4 * q")
    done = run(build(headers, tmp_path / "prepared"))
    assert done.returncode == 1
    assert re.match(r"\d+ rows, granularity 128, fp32 sums: rank \d, \w+ \+ \d+: 0x\w\w, in place", done.stdout)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("l1_epilogue.hpp", "store_if(valid, to", "store_if(true, to", "store rows that are none"),
        ("l2_epilogue.hpp", "valid ? target[0] : context.rank", "target[0]", "address that leads nowhere"),
        ("products_swapped.hpp", "uniform(place.warpgroup)", "uniform(place.lane / 16)", "differs between lanes"),
        (
            "products.hpp",
            "partner_empty + slot",
            "partner_empty + (slot + 1) % kStages",
            "arrive where they should not",
        ),
        ("products_fast.hpp", "place.first_row(tall)", "place.first_row(false)", "fast sums: rank 0, combine"),
        (
            "products.hpp",
            "if (kWork == TileWork::l2 || piece == 0) {",
            "if (piece == 0) {",
            "fp32 sums: rank 0, combine",
        ),
    ],
)
def test_a_mistake_is_seen(headers: Path, tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    """Rows that no tile has are not stored nor looked up, each stage is released at its own barriers, and the upper
    half of a tall tile's rows and the second piece of its columns have scales of their own.
    """
    change(headers / "roles" / file, old, new)
    done = run(build(headers, tmp_path / "prepared"))
    assert done.returncode == 1
    assert said in done.stdout


def test_preparation_refuses_an_instruction_it_does_not_know(headers: Path, tmp_path: Path) -> None:
    change(headers / "ptx" / "transpose.hpp", "movmatrix.sync", "stmatrix.sync")
    with pytest.raises(UnknownAsm, match=r"ptx/transpose\.hpp: teach .* 'stmatrix\.sync"):
        prepare(headers, sm90.generated_headers(), tmp_path / "prepared")


def test_preparation_refuses_to_go_without_an_instruction(headers: Path, tmp_path: Path) -> None:
    change(headers / "ptx" / "convert.hpp", "rcp.approx.ftz.f32", "rcp.approx.f32")
    with pytest.raises(UnknownAsm, match=r"has this asm any more.*'rcp\.approx\.ftz\.f32"):
        prepare(headers, sm90.generated_headers(), tmp_path / "prepared")
