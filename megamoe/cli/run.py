"""``megamoe run``: one MoE layer of a checkpoint over the ranks, compared with the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megamoe.config import Accumulate

if TYPE_CHECKING:
    from megamoe.cli.layer_run import LayerRun
    from megamoe.cli.ranks import Ranks

Target = Literal["host", "sm90", "best"]


def run(
    checkpoint: Annotated[Path, typer.Option(help="Folder with config.json and the safetensors files.")],
    layer: Annotated[int, typer.Option(help="Number of the MoE layer.")],
    ranks: Annotated[
        int | None, typer.Option(help="Expert-parallel ranks: virtual ones, or as many as torchrun started.")
    ] = None,
    hidden: Annotated[
        Path | None, typer.Option(help="safetensors file with `hidden_states` [tokens, hidden], bf16 or fp32.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="safetensors file to write: y (routed experts only), topk_idx, topk_weights.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens over all ranks: the first ones of --hidden, else generated (64).")
    ] = None,
    distribution: Annotated[
        Literal["normal", "heavy-tailed"], typer.Option(help="Of generated hidden states.")
    ] = "normal",
    seed: Annotated[int, typer.Option(help="Of generated hidden states.")] = 0,
    target: Annotated[Target, typer.Option(help="What runs the layer.")] = "best",
    accumulate: Annotated[
        Accumulate, typer.Option(help="How sums are made on sm90: fp32, or fast, with twice the bounds.")
    ] = "fp32",
    timeout_s: Annotated[
        float | None, typer.Option(help="Seconds a rank waits for another one; MEGAMOE_TIMEOUT_S, else 300.")
    ] = None,
) -> None:
    """Runs one MoE layer of a Hugging Face checkpoint (DeepSeek-V3/R1, Qwen3-MoE) and compares it with the oracle.

    Prints the error, the routes of each expert and rank, and the time of each stage. Exit code 1: a fault, or an error
    beyond its bound. Exit code 2: a call or a checkpoint that cannot be run.
    """
    from megamoe.cli.layer_run import LayerRun
    from megamoe.cli.ranks import RunError, open_ranks, resolve_target

    chosen = resolve_target(target)
    settings = LayerRun(
        checkpoint=checkpoint,
        layer=layer,
        ranks=ranks,
        hidden=hidden,
        output=output,
        tokens=tokens,
        distribution=distribution,
        seed=seed,
        target=chosen,
        accumulate=accumulate,
        timeout_s=timeout_s,
    )
    try:
        with open_ranks(ranks, chosen) as these:
            exit_code = _run_and_tell(these, settings)
    except RunError as error:
        typer.echo(f"megamoe run: error: {error}", err=True)
        exit_code = error.exit_code
    raise typer.Exit(exit_code)


def _run_and_tell(ranks: Ranks, settings: LayerRun) -> int:
    """Runs the layer, prints what it says or why not, and returns the exit code."""
    from megamoe.cli.layer_run import run_layer
    from megamoe.cli.ranks import FAULT, RunError

    try:
        lines, within_bounds = run_layer(ranks, settings)
    except RunError as error:
        if ranks.speaks or not error.shared:
            typer.echo(f"megamoe run: error: {error}", err=True)
        if error.shared:
            ranks.wait_for_all()
        return error.exit_code
    if ranks.speaks:
        typer.echo("\n".join(lines))
    ranks.wait_for_all()
    return 0 if within_bounds else FAULT
