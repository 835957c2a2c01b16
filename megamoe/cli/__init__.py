"""The ``megamoe`` command. Exit codes: 0 done and within bounds, 1 fault, bound missed or difference, 2 bad call."""

from __future__ import annotations

import sys

try:
    import typer
except ModuleNotFoundError:
    print(f"error: {sys.executable} has no typer: use .venv/bin/python, which make sets up", file=sys.stderr)
    sys.exit(2)

from megamoe.cli.diff import diff
from megamoe.cli.doctor import doctor
from megamoe.cli.inspect import inspect
from megamoe.cli.layout import layout
from megamoe.cli.run import run

app = typer.Typer(
    name="megamoe",
    help="One mixture-of-experts layer over expert-parallel ranks as one kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would take [tokens, hidden] in a help text for markup
)
app.command()(run)
app.command()(layout)
app.command()(inspect)
app.command()(diff)
app.command()(doctor)


def main() -> None:
    """The console script."""
    app(prog_name="megamoe")
