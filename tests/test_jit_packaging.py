"""The wheel ships csrc/ and compiles from where it is installed; the set-up script says what a machine lacks."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import megamoe
from megamoe.jit import csrc_dir

ROOT = Path(__file__).resolve().parent.parent
SOURCE_SUFFIXES = {".hpp", ".cuh", ".cpp", ".cu"}


def test_every_public_name_is_there_and_imported_when_asked_for() -> None:
    """Three lists in megamoe/__init__.py have the same names: for type checkers, for ``import *``, for the import."""
    assert set(megamoe._HOMES) == set(megamoe.__all__)
    for name, home in megamoe._HOMES.items():
        assert getattr(megamoe, name).__module__ == home, name
    program = "import sys, megamoe.inspect.outside; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def source_files(folder: Path) -> dict[str, str]:
    """Every C++ and CUDA file below `folder`, with its digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.suffix in SOURCE_SUFFIXES
    }


def test_csrc_of_the_checkout() -> None:
    assert csrc_dir() == ROOT / "csrc"
    strangers = {p.name for p in (ROOT / "csrc").rglob("*") if p.is_file() and p.suffix not in SOURCE_SUFFIXES}
    assert strangers == set(), "files that pyproject.toml's package-data does not ship"


def test_packages_listed_are_the_packages_there_are() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "megamoe").rglob("__init__.py")}
    assert set(listed) == there | {"megamoe._csrc"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content as pip installs it."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"  # setuptools writes beside what it builds
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("megamoe", "csrc"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin"}  # no nvcc, no CUDA on PATH
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(checkout)], check=True, env=offline
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith((".so", ".o", ".cubin"))]
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-compile", "--target", str(folder / "site"), str(wheel)],
        check=True,
        env=offline,
    )
    return folder / "site"


def test_wheel_ships_the_sources(installed: Path) -> None:
    assert source_files(installed / "megamoe" / "_csrc") == source_files(ROOT / "csrc")
    assert (installed / "bin" / "megamoe").is_file()
    assert list(installed.glob("megamoe-*.dist-info/licenses/LICENSE"))


def test_installed_package_compiles_and_is_not_written_to(installed: Path, tmp_path: Path, private_cache: Path) -> None:
    (tmp_path / "empty.cpp").write_text('#include "empty.hpp"\nint main() { return EMPTY; }\n')
    before = {path: path.stat().st_mtime_ns for path in installed.rglob("*")}
    script = (
        "from pathlib import Path; from megamoe.jit import build_shared_library, csrc_dir\n"
        "print(csrc_dir())\n"
        "print(build_shared_library('empty', [Path('empty.cpp')], generated={'empty.hpp': '#define EMPTY 0'},"
        " include_dirs=[csrc_dir()], executable=True).path)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert printed[0] == str(installed / "megamoe" / "_csrc")
    assert Path(printed[1]).is_relative_to(private_cache)
    assert {path: path.stat().st_mtime_ns for path in installed.rglob("*")} == before


# --- scripts/ensure_env.py -------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout's set-up files, and bin/ as the whole PATH of a machine with this Python and g++."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "ensure_env.py", tmp_path / "scripts")
    for name in ("pyproject.toml", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    write_program(tmp_path, "python3", f'exec {sys.executable} "$@"')
    write_program(tmp_path, "g++", 'PATH=/usr/bin:/bin exec g++ "$@"')
    return tmp_path


def write_program(machine: Path, name: str, body: str) -> None:
    path = machine / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def ensure_env(machine: Path, level: str = "run", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the set-up with no registry in reach."""
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(machine / "bin"), "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run(
        [sys.executable, str(machine / "scripts" / "ensure_env.py"), level],
        env={"PATH": str(machine / "bin"), "HOME": str(machine), **nowhere, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_registry_a_python_that_has_everything_is_used_as_it_is(machine: Path) -> None:
    done = ensure_env(machine, "dev")
    assert (done.returncode, done.stdout.strip()) == (0, str(machine / "bin" / "python3")), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "no package registry answers; using" in done.stderr
    assert "torch 2." in done.stderr
    assert not (machine / ".venv").exists()


def test_named_python_is_used_as_it_is(machine: Path) -> None:
    done = ensure_env(machine, PYTHON=str(machine / "bin" / "python3"))
    assert (done.returncode, done.stdout.strip()) == (0, str(machine / "bin" / "python3")), done.stderr
    assert "since PYTHON names it" in done.stderr


def test_named_python_without_the_modules_is_refused(machine: Path) -> None:
    write_program(machine, "bare", f'exec {sys.executable} -S "$@"')
    done = ensure_env(machine, PYTHON=str(machine / "bin" / "bare"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "lacks torch, numpy, safetensors, yaml, rich, typer, psutil, jinja2." in done.stderr


def test_old_python_is_told(machine: Path) -> None:
    write_program(machine, "python3", "echo 3 9 2")
    done = ensure_env(machine)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Python 3.11 or newer is needed: {machine}/bin/python3 is 3.9.2. Install one" in done.stderr
    write_program(machine, "python3.12", f'exec {sys.executable} "$@"')
    assert ensure_env(machine).stdout.strip() == str(machine / "bin" / "python3.12")


def test_missing_compiler_is_told(machine: Path) -> None:
    (machine / "bin" / "g++").unlink()
    done = ensure_env(machine)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no g++ on PATH" in done.stderr
    assert "apt-get install g++" in done.stderr
    write_program(machine, "g++", "echo 'unrecognized -std=c++20'; exit 1")
    assert "unrecognized -std=c++20" in ensure_env(machine).stderr


def test_failed_installation_is_told_and_not_taken_for_done(machine: Path) -> None:
    # Its own modules are out of reach, so it must install, and cannot; `venv` still works.
    write_program(machine, "python3", f'[ "$2" = venv ] && exec {sys.executable} "$@"; exec {sys.executable} -S "$@"')
    for _ in range(2):
        done = ensure_env(machine)
        assert (done.returncode, done.stdout) == (2, "")
        assert "pip failed (above)" in done.stderr
        assert "torch==2.13.0" in done.stderr
    assert not list((machine / ".venv").glob(".megamoe-*"))


def test_requirements_satisfy_the_package() -> None:
    """What the Makefile pins lies within what the wheel asks for, so `pip install -e` changes nothing."""
    from packaging.requirements import Requirement

    pins: dict[str, str] = {}
    for name in ("requirements.txt", "requirements-dev.txt"):
        for line in (ROOT / name).read_text().splitlines():
            if "==" in line and not line.startswith("#"):
                package, version = line.split("==")
                pins[package.lower()] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    for requirement in map(Requirement, wanted):
        if requirement.name != "megamoe":
            assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
