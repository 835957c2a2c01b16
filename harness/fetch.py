"""``python -m harness fetch NODE [RUN]``: the results of a run on a node whose connection broke, or once more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.nodes import Node, NodeError
from harness.remote import ORIGIN_FILE, Session, write_origin
from harness.remote_agent import STATE_FILE
from harness.results import fresh_folder
from harness.sync import probe, pull


def _read(path: Path) -> dict[str, Any]:
    """{} when there is no such file, or not one of ours."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _local_folder(node: Node, run: str, runs_folder: Path) -> Path:
    """Where that run's results are or begin to be here; a new folder when there is none."""
    for path in sorted(runs_folder.glob(f"*/{ORIGIN_FILE}")):
        origin = _read(path)
        if (origin.get("node"), origin.get("host"), origin.get("run")) == (node.name, node.host, run):
            return path.parent.resolve()
    folder = fresh_folder(runs_folder, run)
    write_origin(node, run, folder)
    return folder


def fetch(node: Node, run: str | None, runs_folder: Path, say: Callable[[str], None]) -> int:
    """Bring the results of ``run`` (the newest when None) here: 0 when the run had ended, 1 when it had not.

    Raises NodeError when there is nothing to fetch or the node cannot be reached.
    """
    probe(node, create=False)
    with Session(node) as session:
        hello = session.greet()
    if not hello["runs"]:
        raise NodeError(f"{node.words}: there are no runs in {node.folder}/runs")
    if run is None:
        run = str(hello["runs"][-1])
    elif run not in hello["runs"]:
        raise NodeError(f"{node.words}: no run {run!r}; the newest are {', '.join(hello['runs'][-5:])}")
    folder = _local_folder(node, run, runs_folder)
    pull(node, run, folder)
    state = _read(folder / STATE_FILE)
    is_newest_and_busy = hello["busy"] is not None and run == hello["runs"][-1]
    if state.get("state") == "ended":
        say(
            f"run {run} of {node.words} ended by {state['ended_by']}, exit code {state['exit_code']}; results: {folder}"
        )
        return 0
    words = (
        "is still going on; fetch it again later" if is_newest_and_busy else "was cut off: its node or prefix went down"
    )
    say(f"run {run} of {node.words} {words}; what there is: {folder}")
    return 1
