"""``megamoe inspect``: saved buffers, or those of a living process, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="DUMP...", help="Dump files, or folders that hold some.")
    ] = None,
    pid: Annotated[
        list[int] | None, typer.Option(help="A process of this machine whose ranks are on the CPU; may be given often.")
    ] = None,
) -> None:
    """Prints counts, claims, arrivals, masks and faults of buffers in words: what each rank did, and waits for.

    Of dumps that belong to one launch, and of processes of one group, name all: then missing rows are named too.
    """
    from megamoe.inspect.image import NotSaved
    from megamoe.inspect.outside import OutsideBuffers
    from megamoe.inspect.report import describe_dumps, describe_outside

    if not places and not pid:
        typer.echo("megamoe inspect: error: expected a DUMP or --pid", err=True)
        raise typer.Exit(2)
    try:
        texts = describe_dumps(places) if places else []
    except (ValueError, OSError, NotSaved) as error:
        typer.echo(f"megamoe inspect: error: {error}", err=True)
        raise typer.Exit(2) from None
    if pid:
        buffers = OutsideBuffers(pid)
        try:
            texts += describe_outside(buffers)
        finally:
            buffers.close()
        if not buffers.found:
            found = "; ".join(buffers.problems) or "no buffer of a rank on the CPU (pids of a step: its rank*.pid)"
            typer.echo(f"megamoe inspect: error: --pid {' '.join(map(str, pid))}: {found}", err=True)
            raise typer.Exit(2)
    typer.echo("\n".join(texts))
