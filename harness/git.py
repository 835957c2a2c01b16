"""What git says of a checkout."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GIT_SECONDS = 60.0


class GitError(Exception):
    """Why git does not say it, in one line."""


def run_git(checkout: Path, *arguments: str) -> str:
    """What git prints in ``checkout``. Raises GitError where it is absent, fails or takes longer than 60 s."""
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, timeout=GIT_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise GitError("git is not on PATH: install it") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git {arguments[0]} in {checkout}: {error}") from error
    if done.returncode != 0:
        said = " ".join(os.fsdecode(done.stderr).split())
        raise GitError(f"git {arguments[0]} in {checkout}: {said or f'exit code {done.returncode}'}")
    return os.fsdecode(done.stdout)


def describe_commit(checkout: Path) -> str:
    """The commit of a checkout, with ``+`` when files differ from it. Raises GitError."""
    return run_git(checkout, "describe", "--always", "--abbrev=40", "--dirty=+").strip()
