"""What every test shares: few threads on a small machine, and hypothesis settings that neither flake nor time out."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

# CI has 2 cores, and the host target brings its own threads.
torch.set_num_threads(2)

# A slow machine is no failure. Derandomised: the same commit gives the same answer;
# `--hypothesis-profile=explore` draws anew.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, derandomize=False, max_examples=500, print_blob=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty compilation cache for one test; subprocesses inherit it."""
    folder = tmp_path / "megamoe_cache"
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(folder))
    monkeypatch.delenv("MEGAMOE_CACHE_MAX_BYTES", raising=False)
    return folder
