"""Runs a compiler as a command."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from megamoe.jit.cache import CompileError


def run_compiler(command: Sequence[str]) -> str:
    """What the compiler said, output and errors together. Raises CompileError where it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        raise CompileError(shlex.join(command), f"exit code {done.returncode}\n{said}")
    return said
