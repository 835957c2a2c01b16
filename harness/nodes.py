"""nodes.yaml: the GPU nodes that a run may be sent to, and how to reach them by ssh (docs/nodes.md)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

DEFAULT_NODES_FILE = Path(__file__).resolve().parent.parent / "nodes.yaml"
CONNECT_SECONDS = 10

# Before the user's own options: ssh keeps the first value that it is given, so these hold.
_SSH_OPTIONS = (
    "BatchMode=yes",  # never a question in the middle of a run
    "StrictHostKeyChecking=yes",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    f"ConnectTimeout={CONNECT_SECONDS}",
    "RequestTTY=no",
    "ControlMaster=no",  # a connection that exists may be used, but none is left behind that holds our pipes open
    "ForwardX11=no",
)


class NodeError(Exception):
    """A node cannot be used as it is; one line that says what to do. Nothing was run on it."""


@dataclass(frozen=True)
class Node:
    """One entry of nodes.yaml.

    host: as ssh takes it (``name``, ``user@name``, an alias of ~/.ssh/config). folder: absolute, there, ours alone.
    exec_prefix: words put before what runs on the node, such as ``docker exec -i NAME``; () for none.
    gpus: indices as nvidia-smi counts them; None for all. file: the nodes.yaml that lists it.
    """

    name: str
    host: str
    folder: PurePosixPath
    ssh_options: tuple[str, ...] = ()
    exec_prefix: tuple[str, ...] = ()
    python: str = "python3"
    gpus: tuple[int, ...] | None = None
    file: Path = DEFAULT_NODES_FILE

    @property
    def file_option(self) -> str:
        """For commands that name this node: `` --nodes FILE``, or nothing where it is the default."""
        return "" if self.file == DEFAULT_NODES_FILE else f" --nodes {shlex.quote(str(self.file))}"

    @property
    def words(self) -> str:
        """For messages: ``gpu1 (me@host)``."""
        return self.name if self.name == self.host else f"{self.name} ({self.host})"

    @property
    def inside_words(self) -> str:
        """For messages: `` inside `docker exec -i moe` ``, or nothing."""
        return f" inside `{shlex.join(self.exec_prefix)}`" if self.exec_prefix else ""

    def ssh_command(self) -> list[str]:
        """ssh with its options, without the host."""
        fixed = [word for option in _SSH_OPTIONS for word in ("-o", option)]
        return ["ssh", *fixed, *self.ssh_options]

    def remote_command(self, *command: str) -> list[str]:
        """The local command that runs ``command`` on the node; the words arrive there as they are."""
        return [*self.ssh_command(), "--", self.host, shlex.join(command)]

    def inside(self, *command: str) -> list[str]:
        """The local command that runs ``command`` in the node's folder, inside the exec prefix."""
        enter = 'cd -- "$1" || exit 97; shift; exec "$@"'
        return self.remote_command(*self.exec_prefix, "sh", "-c", enter, "sh", str(self.folder), *command)


def _words(value: Any, where: str) -> tuple[str, ...]:
    """A list of words, or one string that is split as a shell would."""
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise NodeError(f"{where}: {error}, in {value!r}") from error
    if isinstance(value, list) and all(isinstance(word, (str, int)) for word in value):
        return tuple(str(word) for word in value)
    raise NodeError(f"{where}: expected a string or a list of words, got {value!r}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise NodeError(f"{where}: expected one line of text, got {value!r}")
    return value


def _folder(value: Any, where: str) -> PurePosixPath:
    """Everything in it that is not ours is removed, so it must be one that nobody means otherwise."""
    folder = PurePosixPath(_text(value, where))
    if not folder.is_absolute() or ".." in folder.parts or len(folder.parts) < 3:
        raise NodeError(
            f"{where}: expected an absolute path of a folder of its own, like /scratch/me/megamoe, got {value}"
        )
    return folder


def _gpus(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(gpu) is int and gpu >= 0 for gpu in value):
        raise NodeError(f"{where}: expected a list of GPU indices like [0, 1] (leave it out for all), got {value!r}")
    if len(set(value)) != len(value):
        raise NodeError(f"{where}: {value} names a GPU twice")
    return tuple(value)


def _node(name: str, fields: Mapping[str, Any], file: Path) -> Node:
    where = f"{file}: {name}"
    known = {"host", "ssh_options", "folder", "exec_prefix", "python", "gpus"}
    if strange := [field for field in fields if field not in known]:
        raise NodeError(f"{where}: no field {strange[0]!r}; there are {', '.join(sorted(known))}")
    if missing := [field for field in ("host", "folder") if field not in fields]:
        raise NodeError(f"{where}: {missing[0]} is missing")
    host = _text(fields["host"], f"{where}: host")
    if host.startswith("-") or re.search(r"\s", host):
        raise NodeError(f"{where}: host: expected a name as ssh takes it, got {host!r}")
    options = _words(fields.get("ssh_options", []), f"{where}: ssh_options")
    if any("'" in word or '"' in word for word in options):  # rsync -e cannot take every quoted word apart
        raise NodeError(f"{where}: ssh_options: no quotes inside a word; put such options into ~/.ssh/config")
    return Node(
        name=name,
        host=host,
        folder=_folder(fields["folder"], f"{where}: folder"),
        ssh_options=options,
        exec_prefix=_words(fields.get("exec_prefix", []), f"{where}: exec_prefix"),
        python=_text(fields.get("python", "python3"), f"{where}: python"),
        gpus=_gpus(fields.get("gpus"), f"{where}: gpus"),
        file=file,
    )


def load_node(name: str, path: Path) -> Node:
    """The node ``name`` of a nodes.yaml. Raises NodeError, naming file and field, for what is missing or wrong."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NodeError(f"{path}: no such file; copy nodes.example.yaml to it, or name another with --nodes") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NodeError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise NodeError(f"{path}: expected names of nodes, each with its fields (nodes.example.yaml)")
    if name not in document:
        raise NodeError(f"{path}: no node {name!r}; there are {', '.join(document) or 'none'}")
    fields = document[name]
    if not isinstance(fields, dict):
        raise NodeError(f"{path}: {name}: expected fields like host and folder, got {fields!r}")
    return _node(name, fields, path)


def explain_ssh(node: Node, errors: str) -> str:
    """One line for a connection that ssh could not make or keep (its exit code is 255), from what it printed."""
    by_hand = shlex.join(["ssh", *node.ssh_options, node.host])
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else "ssh said nothing"
    cases = {
        "IDENTIFICATION HAS CHANGED": f"its host key is not the one that is known here: ask its administrator, then "
        f"`ssh-keygen -R {node.host}` and `{by_hand}` once",
        "Host key verification failed": f"unknown host key: run `{by_hand}` once, compare the fingerprint",
        "Permission denied": f"it accepts none of your keys: make `{by_hand}` work without a password (ssh-copy-id)",
        "Could not resolve hostname": "no such host: check host in nodes.yaml, or the name server",
        "Connection refused": "nothing listens there: is sshd up, and the port right (ssh_options: [-p, '2222'])?",
        "timed out": f"it does not answer within {CONNECT_SECONDS} s: is it up, and can this machine reach it?",
        "No route to host": "it cannot be reached from this machine: is it up, is a VPN or jump host needed?",
    }
    for sign, advice in cases.items():
        if sign in errors:
            return f"{node.words}: {advice}"
    return f"{node.words}: ssh failed ({last}); try `{by_hand}`"
