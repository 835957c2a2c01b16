"""Programs and permissions that some tests need and a machine may lack."""

from __future__ import annotations

import os

import pytest


def need(condition: object, what: str) -> None:
    """Skip the test where ``what`` is missing; under .ci/run, which installs it, that is a failure."""
    if condition:
        return
    if os.environ.get("MEGAMOE_CI"):
        pytest.fail(f"CI has no {what}")
    pytest.skip(f"needs {what}")
