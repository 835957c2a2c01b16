"""Prints the Python interpreter that the Makefile runs things with, after setting up .venv where that is needed.

Everything a person should read goes to stderr; stdout holds the interpreter's path and nothing else.

    python3 scripts/ensure_env.py run     # what phases and the CLI need (requirements.txt)
    python3 scripts/ensure_env.py dev     # and what the tests and the linters need (requirements-dev.txt)

Environment: PYTHON names an interpreter to use as it is (nothing is installed); CXX a C++ compiler other than g++.

This file must parse on an old python3, since it is what tells that python3 is too old.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)
MODULES = {
    "run": ["torch", "numpy", "safetensors", "yaml", "rich", "typer", "psutil", "jinja2"],
    "dev": ["pytest", "pytest_timeout", "xdist", "hypothesis", "transformers"],
}
REQUIREMENTS = {"run": "requirements.txt", "dev": "requirements-dev.txt"}
REGISTRY_PROBE_TIMEOUT_S = 25


def say(text: str) -> None:
    print("set-up: " + text, file=sys.stderr, flush=True)


def fail(text: str) -> None:
    say(text)
    sys.exit(2)


def python_version(python: str) -> "tuple[int, ...] | None":
    """(major, minor, micro) of an interpreter, or None where it does not run."""
    try:
        printed = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:3])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if printed.returncode != 0:
        return None
    return tuple(int(part) for part in printed.stdout.split())


def find_python() -> str:
    """The first of python3, python3.14 ... python3.11 that is new enough; ends the program where none is."""
    seen = []
    for name in ["python3", "python3.13", "python3.12", "python3.11", "python3.14"]:
        path = shutil.which(name)
        version = python_version(path) if path else None
        if path and version:
            if version >= MINIMUM_PYTHON:
                return path
            seen.append("{} is {}".format(path, ".".join(map(str, version))))
    found = "; ".join(seen) if seen else "none was found on PATH"
    fail(f"Python 3.11 or newer is needed: {found}. Install one, or name it with PYTHON=/path/to/python3.")
    raise AssertionError


def check_compiler() -> None:
    """Ends the program with what to do where no C++20 compiler answers."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        fail(
            f"no {compiler} on PATH: the host target is compiled at first use. Install g++ 11 or newer "
            "(Debian: apt-get install g++), or name a compiler with CXX=."
        )
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(
            [compiler, "-std=c++20", "-x", "c++", "-", "-o", os.path.join(folder, "probe")],
            input=b"#include <atomic>\n#include <concepts>\nint main() { return std::integral<int> ? 0 : 1; }\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if tried.returncode != 0:
        fail(
            "{} does not build a C++20 program; g++ 11 or newer is needed. It said:\n{}".format(
                compiler, tried.stdout.decode(errors="replace")
            )
        )


def missing_modules(python: str, level: str) -> "list[str]":
    """What `level` needs and `python` cannot import; an old torch counts as missing."""
    names = MODULES["run"] + (MODULES["dev"] if level == "dev" else [])
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        module = importlib.import_module(name)\n"
        "    except ImportError:\n"
        "        print(name)\n"
        "        continue\n"
        "    if name == 'torch' and tuple(int(p) for p in module.__version__.split('+')[0].split('.')[:2]) < "
        + repr(MINIMUM_TORCH)
        + ":\n"
        "        print('torch>=2.11')\n"
    )
    printed = subprocess.run([python, "-c", script, *names], capture_output=True)
    if printed.returncode != 0:
        return ["(its modules could not be looked at: {})".format(printed.stderr.decode(errors="replace").strip())]
    return printed.stdout.decode().split()


def describe(python: str) -> str:
    printed = subprocess.run(
        [
            python,
            "-c",
            "import platform, torch; print('Python ' + platform.python_version() + ', torch ' + torch.__version__)",
        ],
        stdout=subprocess.PIPE,
    )
    return f"{python} ({printed.stdout.decode().strip()})"


def registry_answers(python: str) -> bool:
    """Whether pip can fetch one small package that we need anyway."""
    with open(os.path.join(ROOT, "requirements.txt"), encoding="utf-8") as file:
        pin = next(line.strip() for line in file if line.startswith("typer=="))
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        command += ["--timeout", "5", "--retries", "0", "--dest", folder, pin]
        try:
            tried = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=REGISTRY_PROBE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return False
    return tried.returncode == 0


def stamp_text(level: str, version: "tuple[int, ...]") -> str:
    """What a set-up depends on: the pins, the package's metadata, the interpreter, and where the checkout lies."""
    digest = hashlib.sha256()
    for name in ["requirements.txt", "requirements-dev.txt", "pyproject.toml"]:
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    digest.update(repr((level, version, ROOT)).encode())
    return digest.hexdigest()


def stamp_path(level: str) -> str:
    return os.path.join(VENV, ".megamoe-" + level)


def venv_is_current(level: str) -> bool:
    """A set-up for dev serves run as well."""
    python = os.path.join(VENV, "bin", "python")
    version = python_version(python)
    if version is None or version < MINIMUM_PYTHON:
        return False
    for had in ["run", "dev"] if level == "run" else ["dev"]:
        try:
            with open(stamp_path(had), encoding="ascii") as file:
                if file.read() == stamp_text(had, version):
                    return True
        except FileNotFoundError:
            continue
    return False


def install(base: str, level: str) -> None:
    """Makes or refreshes .venv; ends the program with pip's own words where that fails."""
    python = os.path.join(VENV, "bin", "python")
    begun = time.monotonic()
    version = python_version(python)
    if version is None or version < MINIMUM_PYTHON:
        say(f"making .venv with {base} ...")
        made = subprocess.run([base, "-m", "venv", "--clear", VENV], stdout=sys.stderr)
        if made.returncode != 0:
            fail(f"`{base} -m venv` failed. On Debian and Ubuntu: apt-get install python3-venv.")
    for had in ["run", "dev"]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stamp_path(had))
    say(f"installing {REQUIREMENTS[level]} into .venv ...")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    for arguments in [
        ["-r", os.path.join(ROOT, REQUIREMENTS[level])],
        # The console script `megamoe`. Without build isolation: an isolated build resolves its own requirements.
        ["--no-deps", "--no-build-isolation", "-e", ROOT],
    ]:
        if subprocess.run(pip + arguments, stdout=sys.stderr).returncode != 0:
            fail(
                "pip failed (above). Where no registry can be reached, name a Python that has what "
                f"{REQUIREMENTS[level]} lists: PYTHON=/path/to/python3."
            )
    version = python_version(python)
    assert version is not None
    temporary = stamp_path(level) + ".tmp"
    with open(temporary, "w", encoding="ascii") as file:
        file.write(stamp_text(level, version))
    os.replace(temporary, stamp_path(level))
    say(f"done in {time.monotonic() - begun:.0f} s")


def main() -> None:
    level = sys.argv[1] if len(sys.argv) == 2 else ""
    if level not in REQUIREMENTS:
        fail("usage: ensure_env.py run|dev")
    check_compiler()

    named = os.environ.get("PYTHON", "")
    if named:
        version = python_version(named)
        if version is None or version < MINIMUM_PYTHON:
            fail("PYTHON={} is {}; 3.11 or newer is needed.".format(named, version or "not an interpreter that runs"))
        missing = missing_modules(named, level)
        if missing:
            fail("PYTHON={} lacks {}.".format(named, ", ".join(missing)))
        say(f"using {describe(named)} as it is, since PYTHON names it")
        print(shutil.which(named) or named)
        return

    if not venv_is_current(level):
        base = find_python()
        if not missing_modules(base, level) and not registry_answers(base):
            say(f"no package registry answers; using {describe(base)} as it is")
            print(base)
            return
        with open(os.path.abspath(__file__), "rb") as lock:
            # Two `make` calls on a fresh machine: the second waits and finds the work done.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not venv_is_current(level):
                install(base, level)
    print(os.path.join(VENV, "bin", "python"))


main()
