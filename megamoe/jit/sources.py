"""Where sources and headers lie, and which of them a build depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(?:\"([^\"\n]+)\"|<([^>\n]+)>|([^\s\"<].*))", re.MULTILINE)
# A folder with one of these is a toolchain's: its headers are known by the version that the file states.
_TOOLCHAIN_MARKERS = ("cuda/std/__cccl/version.h", "cuda.h")


def csrc_dir() -> Path:
    """The folder of the C++ and CUDA sources: csrc/ of the checkout, or megamoe/_csrc of an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_csrc", package.parent / "csrc"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"neither {package / '_csrc'} (an installed wheel) nor {package.parent / 'csrc'} (a checkout) is a folder: "
        "this installation of megamoe is incomplete; install it again"
    )


def cccl_include_dir() -> Path:
    """The include folder of libcu++: `cccl` of the nvidia-cuda-cccl wheel, or of a CUDA 13 toolkit.

    Only this folder, never the CUDA folder beside it, belongs on the include path of a CPU build.
    """
    tried = []
    try:
        wheel = importlib.metadata.distribution("nvidia-cuda-cccl")
        tried.append(Path(str(wheel.locate_file("nvidia/cu13/include/cccl"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    tried += [toolkit / "include" / "cccl" for toolkit in _toolkits()]
    for folder in tried:
        if (folder / "cuda" / "atomic").is_file():
            return folder.resolve()
    raise FileNotFoundError(
        "libcu++ (cuda/atomic) was not found: pip install 'nvidia-cuda-cccl==13.0.*', or set CUDA_HOME to a CUDA 13 "
        f"toolkit. Looked in: {', '.join(map(str, tried)) or 'no place, since there is neither wheel nor toolkit'}"
    )


def toolkit_include_dir() -> Path | None:
    """The include folder with cuda_fp8.h and its like (a toolkit's, or a wheel's), or None where there is none.

    Kernels that need nothing but libcu++ and the compiler's own names compile without it.
    """
    tried = [toolkit / "include" for toolkit in _toolkits()]
    try:
        wheel = importlib.metadata.distribution("nvidia-cuda-runtime")
        tried.append(Path(str(wheel.locate_file("nvidia/cu13/include"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    return next((folder.resolve() for folder in tried if (folder / "cuda.h").is_file()), None)


def find_nvcc() -> Path | None:
    """nvcc of PATH, else of a toolkit."""
    on_path = shutil.which("nvcc")
    tried = ([Path(on_path)] if on_path else []) + [toolkit / "bin" / "nvcc" for toolkit in _toolkits()]
    return next((path for path in tried if path.is_file()), None)


def _toolkits() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")


def dependency_digests(
    sources: Sequence[Path], generated: Mapping[str, str], include_dirs: Sequence[Path]
) -> list[list[str]]:
    """Name and SHA-256 of each source, of each generated header, and of every header that they reach.

    Follows #include through all branches of #if, so it finds more than one compilation reads and never less. Headers
    of toolchain folders (cccl, CUDA) count by their version; a name that is found nowhere is the compiler's own.
    Paths are left out: the same text in two checkouts is the same build.
    Raises ValueError for an #include whose name is a macro (it cannot be followed).
    """
    own = [folder for folder in include_dirs if not _toolchain_marker(folder)]
    found: set[tuple[str, str]] = set()
    for folder in include_dirs:
        marker = _toolchain_marker(folder)
        if marker:
            found.add((f"toolchain {marker.name}", _digest(marker.read_text())))
    seen: set[Path | str] = set()
    waiting: list[tuple[str, Path | None, str]] = []  # spelling, folder of the file, text

    def add(spelling: str, identity: Path | str, folder: Path | None, text: str) -> None:
        found.add((spelling, _digest(text)))
        if identity not in seen:
            seen.add(identity)
            waiting.append((spelling, folder, text))

    for source in sources:
        add(source.name, source.resolve(), source.resolve().parent, source.read_text())
    for name, text in generated.items():
        add(name, name, None, text)
    while waiting:
        name, beside, text = waiting.pop()
        for quoted, angled, other in _INCLUDE.findall(text):
            if other:
                raise ValueError(f"{name}: '#include {other.strip()}' cannot be followed; write the header's name")
            spelling = quoted or angled
            searched = [beside, *own] if quoted and beside else own
            path = next((d / spelling for d in searched if (d / spelling).is_file()), None)
            if path is not None:  # a generated header of that name was added above
                add(spelling, path.resolve(), path.resolve().parent, path.read_text())
    return sorted([spelling, digest] for spelling, digest in found)


@cache
def _toolchain_marker(folder: Path) -> Path | None:
    return next((folder / name for name in _TOOLCHAIN_MARKERS if (folder / name).is_file()), None)


def is_toolchain_dir(folder: Path) -> bool:
    """Whether a folder holds a toolchain's headers (cccl, CUDA), which are -isystem and known by their version."""
    return _toolchain_marker(folder) is not None


def write_generated(generated: Mapping[str, str], folder: Path) -> Path:
    """Writes the generated headers into folder/generated and returns that folder, for the include path."""
    target = folder / "generated"
    target.mkdir()
    for name, text in generated.items():
        if Path(name).name != name:
            raise ValueError(f"generated header {name!r}: expected a plain file name")
        (target / name).write_text(text)
    return target


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
