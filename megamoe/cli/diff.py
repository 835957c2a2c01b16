"""``megamoe diff``: where two saved launches, or one and the oracle, first differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megamoe.inspect.diff import ViewDifference
    from megamoe.inspect.dump import Dump


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A dump, or a folder with those of one launch.")],
    second: Annotated[Path | None, typer.Argument(metavar="B", help="The same, of another run.")] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Compare A with the oracle instead (in a checkout).")
    ] = False,
) -> None:
    """Compares views in pipeline order: the first that differs, where, by how much, and the role that wrote it.

    Two launches are compared bit by bit, a launch and the oracle by the bounds of its phase. Exit code 1: they differ.
    """
    if (second is None) != oracle:
        typer.echo("megamoe diff: error: expected A and B, or A and --oracle", err=True)
        raise typer.Exit(2)
    from megamoe.inspect.image import NotSaved

    try:
        lines, differ = _compare(first, second)
    except (ValueError, OSError, NotSaved) as error:
        typer.echo(f"megamoe diff: error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo("\n".join(lines))
    raise typer.Exit(1 if differ else 0)


def _compare(first: Path, second: Path | None) -> tuple[list[str], bool]:
    from megamoe.inspect.diff import VIEW_STAGES, describe_differences, diff_dumps, writer_of
    from megamoe.inspect.dump import load_group
    from megamoe.inspect.report import describe_config, describe_facts

    group = load_group(first)
    found = _with_oracle(group) if second is None else diff_dumps(group, load_group(second))
    any_dump = next(iter(group.values()))
    lines, differ = describe_differences(found, {view: writer_of(any_dump, view) for view in VIEW_STAGES})
    about = [describe_config(any_dump.image.config), describe_facts(any_dump.facts)]
    against = "the oracle" if second is None else str(second)
    verdict = [] if differ else ["", f"{first} and {against} do not differ"]
    return [*about, "", *lines, *verdict], differ


def _with_oracle(group: dict[int, Dump]) -> list[ViewDifference]:
    """The phases know how inputs and weights were made; they are in a checkout, not in the installed package."""
    import megamoe

    checkout = Path(megamoe.__file__).resolve().parent.parent
    if not (checkout / "phases" / "support").is_dir():
        raise ValueError(f"--oracle: needs the phases of a checkout, and {checkout} has none")
    sys.path.insert(0, str(checkout))
    from phases.support.oracle_diff import diff_with_oracle

    return diff_with_oracle(group)
