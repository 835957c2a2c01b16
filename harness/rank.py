"""Starts one rank's script: ``python -m harness.rank SCRIPT [arguments]``, alone or under torchrun.

Output goes to ``rank<r>.log`` in MEGAMOE_RUN_DIR, SIGUSR1 (and the SIGTERM of torchrun) writes all Python stacks there,
the rank dies with its parent, and two small files tell the supervisor which process the rank is and how it ended. Then
the script runs as if it had been started by name.

torchrun terminates the other ranks as soon as it sees one dead. They hold what tells why it died, so under torchrun
SIGTERM does not end a rank: the supervisor does, once the step is explained.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import signal
import sys
from pathlib import Path

from harness.processes import own_key, set_parent_death_signal

DUMP_SUFFIX = ".dump"
"""Of a rank's saved buffer (megamoe/inspect/dump.py)."""
DUMP_VIEWS_VARIABLE = "MEGAMOE_DUMP_VIEWS"
"""Set by ``harness run --dump``: save every launch that is compared, not only the first that fails."""


def pid_file(folder: Path, rank: int) -> Path:
    """Holds ``<pid> <start ticks>`` from the moment a rank starts."""
    return folder / f"rank{rank}.pid"


def exit_file(folder: Path, rank: int) -> Path:
    """Holds the exit code of a rank that reached its end; missing when a signal ended it."""
    return folder / f"rank{rank}.exit"


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def fault_file(folder: Path, rank: int) -> Path:
    """Holds a fault that aborted this rank's group, in words: the supervisor has the step explained."""
    return folder / f"rank{rank}.fault"


def launch_file(folder: Path, rank: int) -> Path:
    """Holds what the last launch of this rank's process was asked to do, as JSON: config and facts."""
    return folder / f"rank{rank}.launch"


def responder_file(folder: Path, rank: int) -> Path:
    """There where a thread of the rank's process can save buffers that lie on a GPU (see hang.py)."""
    return folder / f"rank{rank}.responder"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever finds it finds all of it."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _redirect_output(log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a rank said must be in its log when it is killed


def _exit_code(end: SystemExit) -> int:
    """What the interpreter makes of ``sys.exit(end.code)``."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def _run(script: str, result: Path) -> None:
    """Run the script as ``__main__`` and write its exit code; every exception goes on to the interpreter."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        write_whole(result, str(_exit_code(end)))
        raise
    except BaseException:
        write_whole(result, "1")
        raise
    write_whole(result, "0")


def main(arguments: list[str]) -> int:
    if not arguments:
        print("usage: python -m harness.rank SCRIPT [arguments]", file=sys.stderr)
        return 2
    parent_pid = os.getppid()
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        return 1  # the parent ended before it could be watched
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(os.environ["MEGAMOE_RUN_DIR"])
    _redirect_output(log_file(folder, rank))
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        faulthandler.register(signal.SIGTERM, file=2, all_threads=True)
        # What the script forks must still end at SIGTERM.
        os.register_at_fork(after_in_child=lambda: faulthandler.unregister(signal.SIGTERM))
    key = own_key()
    write_whole(pid_file(folder, rank), f"{key.pid} {key.start_ticks}")
    script = arguments[0]
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    _run(script, exit_file(folder, rank))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
