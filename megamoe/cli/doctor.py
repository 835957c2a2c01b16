"""``megamoe doctor``: what this machine can run, and what is missing for the rest."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Prints what is here, what this machine can run, and how to get the rest. Exit code 1: it can run nothing."""
    from megamoe.doctor import describe, examine, look

    diagnosis = examine(look())
    if as_json:
        values = {**dataclasses.asdict(diagnosis), "can_run_something": diagnosis.can_run_something}
        typer.echo(json.dumps(values, indent=1))
    else:
        typer.echo(describe(diagnosis))
    raise typer.Exit(0 if diagnosis.can_run_something else 1)
