"""``megamoe layout``: the regions of the symmetric buffer for a given shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer


def layout(
    ranks: Annotated[int, typer.Option(help="Expert-parallel ranks.")] = 8,
    experts: Annotated[int, typer.Option(help="Experts over all ranks.")] = 256,
    topk: Annotated[int, typer.Option(help="Experts a token goes to.")] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 7168,
    intermediate: Annotated[int, typer.Option(help="Width of an expert.")] = 2048,
    tokens: Annotated[int, typer.Option(help="Token capacity of a rank.")] = 8192,
    l2_sf_granularity: Annotated[int, typer.Option(help="Columns that share a scale of h: 64 or 128.")] = 128,
    pool_rows: Annotated[int | None, typer.Option(help="Rows of the pool; the worst case if not given.")] = None,
    block_m: Annotated[
        int | None, typer.Option(help="Rows of a pool block: 32, 64 or 128; MEGAMOE_CONFIG, else 128.")
    ] = None,
) -> None:
    """Prints offset, bytes, writer and reader of each region of the symmetric buffer."""
    from megamoe.api import make_config
    from megamoe.layout import describe

    try:
        config = make_config(
            ranks,
            experts,
            tokens,
            topk,
            hidden,
            intermediate,
            l2_sf_granularity=l2_sf_granularity,
            pool_rows=pool_rows,
        )
        if block_m is not None:
            config = replace(config, block_m=block_m)
    except ValueError as error:
        typer.echo(f"megamoe layout: error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(describe(config))
