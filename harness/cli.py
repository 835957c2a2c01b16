"""Brings the layer up, phase by phase. Exit codes: 0 all asked-for steps passed, 1 something failed, 2 bad call,
3 nothing failed but something asked for was skipped."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness import runner
from harness.build_target import has_target
from harness.devlog import check_draft, held_figures, write_entry
from harness.display import make_display, plan_table, printable
from harness.earlier import find_run, read_run
from harness.fetch import fetch as fetch_run
from harness.nodes import DEFAULT_NODES_FILE, NodeError, load_node
from harness.plan import BadRequest, Request, check_limit
from harness.rank import DUMP_VIEWS_VARIABLE
from harness.remote import DEFAULT_RUNS_FOLDER, run_on_node
from harness.report import summary_lines, write_report
from harness.results import append_line, build_line
from harness.runner import Places
from harness.spec import TARGETS, SpecError
from harness.supervisor import StopRequest

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

PhasesOption = Annotated[str | None, typer.Option("--phases", help="1-6, 3 or 2,4; all when left out")]
TargetOption = Annotated[str, typer.Option("--target", help="host, sm90, or best")]
RanksOption = Annotated[str | None, typer.Option("--ranks", help="numbers of ranks: 1,2,8")]
GroupsOption = Annotated[str | None, typer.Option("--groups", help="process, virtual, spread; one rank always runs")]
CasesOption = Annotated[str | None, typer.Option("--cases", help="names of cases, for the asked-for phases")]
RepeatOption = Annotated[int, typer.Option("--repeat", help="run each step so often; passing sometimes is 'flaky'")]
NoGatesOption = Annotated[bool, typer.Option("--no-gates", help="not the phases that the asked-for ones rest on")]
SecondsOption = Annotated[float | None, typer.Option("--seconds", help="limit of a step, instead of its spec's")]
PhasesRootOption = Annotated[Path, typer.Option("--phases-root", help="folder that holds phase1, phase2, …")]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", help="folder that receives <time>/")]
PlainOption = Annotated[bool, typer.Option("--plain", help="plain lines on a terminal too")]
FromOption = Annotated[
    int | None, typer.Option("--from", help="phases from this one on; gates whose pass still holds are not run again")
]
RerunOption = Annotated[
    str | None, typer.Option("--rerun", help="'failed': what failed, timed out, was flaky or blocked in the last run")
]
KeepOption = Annotated[
    bool, typer.Option("--keep", help="do not run again what passed with the same sources, toolchain and machine")
]
NodeOption = Annotated[str | None, typer.Option("--node", help="run on this node of nodes.yaml (docs/nodes.md)")]
DumpOption = Annotated[
    bool, typer.Option("--dump", help="save the views of every launch that is compared, for `megamoe diff`")
]
NodesOption = Annotated[Path, typer.Option("--nodes", help="the file that lists nodes")]
RunArgument = Annotated[Path | None, typer.Argument(help="folder or name of a run; the last one when left out")]
BuildSecondsOption = Annotated[float, typer.Option("--build-seconds", help="limit of the build of one target")]


def _say(text: str) -> None:
    print(printable(text), flush=True)


def _fail(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(2)


MAX_NUMBER = 1000
"""Of a phase or of ranks: a typing error must not make a list that fills the memory."""


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """``1-3,6`` to (1, 2, 3, 6). Raises BadRequest."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or int(match[2] or match[1]) not in range(int(match[1]), MAX_NUMBER + 1):
            raise BadRequest(f"{option}: expected numbers like 3 or 1-6 or 1,2,8, got {text!r}")
        numbers.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(dict.fromkeys(numbers))


def parse_names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise BadRequest(f"{option}: expected names between commas, got {text!r}")
    return names


def _request(
    phases: str | None,
    target: str,
    ranks: str | None,
    groups: str | None,
    cases: str | None,
    repeat: int,
    no_gates: bool,
    seconds: float | None,
    from_phase: int | None,
    rerun: str | None,
    keep: bool,
) -> Request:
    if rerun not in (None, "failed"):
        raise BadRequest(f"--rerun: expected failed, got {rerun!r}")
    return Request(
        phases=parse_numbers(phases, "--phases") if phases is not None else None,
        target=target,
        ranks=parse_numbers(ranks, "--ranks") if ranks is not None else None,
        groups=parse_names(groups, "--groups") if groups is not None else None,
        cases=None if cases is None or cases == "all" else parse_names(cases, "--cases"),
        repeat=repeat,
        with_gates=not no_gates,
        seconds=seconds,
        from_phase=from_phase,
        rerun=rerun,
        keep=keep,
    )


@app.command()
def plan(
    phases: PhasesOption = None,
    target: TargetOption = "best",
    ranks: RanksOption = None,
    groups: GroupsOption = None,
    cases: CasesOption = None,
    repeat: RepeatOption = 1,
    no_gates: NoGatesOption = False,
    seconds: SecondsOption = None,
    from_phase: FromOption = None,
    rerun: RerunOption = None,
    keep: KeepOption = False,
    phases_root: PhasesRootOption = runner.DEFAULT_PHASES_ROOT,
    runs_dir: RunsDirOption = DEFAULT_RUNS_FOLDER,
) -> None:
    """Print what ``run`` with the same options would do."""
    try:
        request = _request(phases, target, ranks, groups, cases, repeat, no_gates, seconds, from_phase, rerun, keep)
        planned = runner.plan_run(request, Places(phases_root, runs_dir))
    except (BadRequest, SpecError) as error:
        raise _fail(error) from error
    console = Console()
    steps = planned.plan
    for note in planned.notes:
        console.print(note, markup=False)
    console.print(f"target {steps.target} ({steps.target_reason}), {len(steps.steps)} steps", markup=False)
    console.print(plan_table(steps))


@app.command()
def build(
    target: Annotated[list[str] | None, typer.Option("--target", help="host or sm90; may be given twice")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="every target of this checkout; with --target every kernel of it, as a table")
    ] = False,
    build_seconds: BuildSecondsOption = runner.BUILD_SECONDS,
    phases_root: PhasesRootOption = runner.DEFAULT_PHASES_ROOT,
    runs_dir: RunsDirOption = DEFAULT_RUNS_FOLDER,
) -> None:
    """Compile everything that steps of a target need."""
    wanted = target or ([name for name in TARGETS if has_target(name)] if everything else [])
    strange = [name for name in wanted if name not in TARGETS]
    if strange or not wanted:
        raise _fail(BadRequest(f"--target: expected some of {', '.join(TARGETS)}, got {strange or 'none'}"))
    stop = StopRequest()
    places = Places(phases_root, runs_dir)
    try:
        check_limit(build_seconds, "--build-seconds")
        folder = runner.new_run_folder(runs_dir)
    except BadRequest as error:
        raise _fail(error) from error
    failed = False
    for name in dict.fromkeys(wanted):
        result = runner.build(name, folder, places.project_root, stop, build_seconds)
        append_line(folder, build_line(result))
        typer.echo(f"build of target {name}: " + "; ".join([result.status, f"{result.seconds:.1f} s", *result.reasons]))
        if result.status != "passed":
            failed = True
            typer.echo(result.log_tail)
        elif everything:
            typer.echo((folder / f"build-{name}" / "launcher.log").read_text().rstrip())
    raise typer.Exit(1 if failed else 0)


def _arguments_for_node(context: typer.Context) -> list[str]:
    """The options of this call as a call on the node takes them, without those that are about this side."""
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        if name in ("node", "nodes", "runs_dir", "plain") or context.params[name] == option.get_default(context):
            continue
        if name == "phases_root":
            raise BadRequest("--phases-root: a node runs the phases of its copy of this checkout; leave it out")
        value = context.params[name]
        words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return words


@app.command()
def fetch(
    node: Annotated[str, typer.Argument(help="a node of nodes.yaml")],
    run_name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="its name there; the newest when left out")
    ] = None,
    nodes: NodesOption = DEFAULT_NODES_FILE,
    runs_dir: RunsDirOption = DEFAULT_RUNS_FOLDER,
) -> None:
    """Bring the results of a run on a node here, after its connection broke. Exit code 1: it had not ended."""
    try:
        code = fetch_run(load_node(node, nodes), run_name, runs_dir, _say)
    except NodeError as error:
        raise _fail(error) from error
    raise typer.Exit(code)


@app.command()
def run(
    context: typer.Context,
    phases: PhasesOption = None,
    target: TargetOption = "best",
    ranks: RanksOption = None,
    groups: GroupsOption = None,
    cases: CasesOption = None,
    repeat: RepeatOption = 1,
    no_gates: NoGatesOption = False,
    seconds: SecondsOption = None,
    from_phase: FromOption = None,
    rerun: RerunOption = None,
    keep: KeepOption = False,
    dump: DumpOption = False,
    phases_root: PhasesRootOption = runner.DEFAULT_PHASES_ROOT,
    runs_dir: RunsDirOption = DEFAULT_RUNS_FOLDER,
    plain: PlainOption = False,
    build_seconds: BuildSecondsOption = runner.BUILD_SECONDS,
    node: NodeOption = None,
    nodes: NodesOption = DEFAULT_NODES_FILE,
) -> None:
    """Run phases in order, gates first; results go to runs/<time>/."""
    try:
        if node is not None:
            arguments = _arguments_for_node(context)
            root = runner.DEFAULT_PHASES_ROOT.parent
            raise typer.Exit(run_on_node(load_node(node, nodes), arguments, root, runs_dir, _say))
        if dump:
            os.environ[DUMP_VIEWS_VARIABLE] = "1"  # which every step inherits
        check_limit(build_seconds, "--build-seconds")
        request = _request(phases, target, ranks, groups, cases, repeat, no_gates, seconds, from_phase, rerun, keep)
        display = make_display(Console(), plain=plain)
        code = runner.run(request, Places(phases_root, runs_dir), display, build_seconds=build_seconds)
    except (BadRequest, SpecError, NodeError) as error:
        raise _fail(error) from error
    except OSError as error:  # the disk is full, say
        typer.echo(f"error: the run in {runs_dir} cannot go on: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def _run_folder(run: Path | None, runs_dir: Path) -> Path:
    """A run by its folder or by its name below ``runs_dir``; the last one when left out. Raises BadRequest."""
    if run is None:
        return find_run(runs_dir)
    return run if run.is_dir() else runs_dir / run


@app.command()
def report(run: RunArgument = None, runs_dir: RunsDirOption = DEFAULT_RUNS_FOLDER) -> None:
    """Write report.html of a run anew, and print a line a phase."""
    try:
        folder = _run_folder(run, runs_dir)
        path = write_report(folder)
        typer.echo(printable("\n".join(summary_lines(read_run(folder)))))
    except BadRequest as error:
        raise _fail(error) from error
    typer.echo(f"report: {path}")


@app.command()
def devlog(
    run: RunArgument = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="mark the figures of this draft that no result holds; 1 if any")
    ] = None,
    runs_dir: RunsDirOption = DEFAULT_RUNS_FOLDER,
) -> None:
    """Print an entry for DEVLOG.md from a run and git, with blanks as <...>; or check the figures of a draft against
    that run, or against whatever lies in --runs-dir when none is named."""
    try:
        if check is None:
            typer.echo(write_entry(read_run(_run_folder(run, runs_dir)), Path.cwd()))
            return
        draft = check.read_text()
        folders = [_run_folder(run, runs_dir)] if run is not None else sorted(runs_dir.glob("*/"))
        marked, unheld = check_draft(draft, held_figures(folders))
    except (BadRequest, OSError) as error:
        raise _fail(error) from error
    typer.echo(marked, nl=False)
    for found in unheld:
        typer.echo(f"{check}:{found.line}: no result holds {found.figure}: {found.text}", err=True)
    raise typer.Exit(1 if unheld else 0)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without some character must not end a run
    app(prog_name="python -m harness", args=sys.argv[1:])
