"""The compilation cache: a folder of finished builds that any number of processes share.

    <cache>/entries/<name>-<key>/   the artifact, log.txt, generated headers, and manifest.json: a SHA-256 of each file
    <cache>/locks/<key>.build       held (exclusive) while one process builds that key; the others wait for it
    <cache>/locks/<key>.use         held (shared) by every process that was given the artifact, until it ends
    <cache>/scratch/                unfinished builds

An entry appears by one rename of a complete, synced folder. An entry whose files do not match its manifest is a miss.
Locks are flock(2): the kernel drops them when their holder dies, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

DEFAULT_MAX_BYTES = 4 << 30
# Part of every key: raise it when the meaning of an entry changes.
_SCHEMA = 1
_MANIFEST = "manifest.json"
_LOG = "log.txt"


class CompileError(RuntimeError):
    """A compiler refused a source. `command` is what was run, `log` is everything that it said."""

    def __init__(self, command: str, log: str) -> None:
        super().__init__(f"compilation failed.\ncommand: {command}\n{log.rstrip()}")
        self.command = command
        self.log = log

    def __reduce__(self) -> tuple[type[CompileError], tuple[str, str]]:
        return CompileError, (self.command, self.log)


@dataclass(frozen=True)
class Artifact:
    """A finished build.

    path: the file; it stays in place while this process lives.
    log: what the compiler said when it was built.
    seconds: how long that build took, whoever did it.
    cached: whether this call found it finished.
    """

    path: Path
    log: str
    seconds: float
    cached: bool


def cache_dir() -> Path:
    """MEGAMOE_CACHE_DIR, or ~/.cache/megamoe."""
    named = os.environ.get("MEGAMOE_CACHE_DIR")
    return Path(named).absolute() if named else Path.home() / ".cache" / "megamoe"


def cache_max_bytes() -> int:
    """MEGAMOE_CACHE_MAX_BYTES, or 4 GiB. Raises ValueError where it is not a whole number of bytes."""
    text = os.environ.get("MEGAMOE_CACHE_MAX_BYTES")
    if text is None:
        return DEFAULT_MAX_BYTES
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"MEGAMOE_CACHE_MAX_BYTES is {text!r}; expected a whole number of bytes, 0 or more")
    return int(text)


def get_or_build(
    name: str, ingredients: Mapping[str, object], file_name: str, build: Callable[[Path, Path], str]
) -> Artifact:
    """Returns the artifact of `ingredients`, building it if no process has done so yet.

    ingredients: everything that the result depends on, as JSON can write it; the key is its SHA-256.
    file_name: the artifact's name in its folder.
    build(folder, scratch): writes the artifact to folder / file_name and returns the log; `scratch` is thrown away.
    Raises CompileError (from `build`), ValueError for a bad name or bound, OSError where the cache cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(f"name is {name!r}; expected letters, digits, '_', '.', '-': it names a folder of the cache")
    max_bytes = cache_max_bytes()
    canonical = json.dumps({"schema": _SCHEMA, "name": name, **ingredients}, sort_keys=True)
    key = hashlib.sha256(canonical.encode()).hexdigest()[:40]
    root = cache_dir()
    try:
        for folder in ("entries", "locks", "scratch"):
            (root / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cache folder {root} cannot be made ({error}): MEGAMOE_CACHE_DIR names another") from error
    entry = root / "entries" / f"{name}-{key}"

    # From here on no eviction takes this key away, so what was verified stays.
    _hold_for_life(_use_lock(root, key))
    found = _load(entry, file_name)
    if found is not None:
        return found
    with _locked(_build_lock(root, key), fcntl.LOCK_EX):
        found = _load(entry, file_name)  # another process may have built it while this one waited
        if found is not None:
            return found
        _build_entry(root, key, entry, canonical, file_name, build)
        built = _load(entry, file_name, cached=False)
    if built is None:
        raise OSError(f"{entry} was written and does not read back as written: is the disk full or failing?")
    _evict(root, max_bytes)
    return built


def _build_entry(
    root: Path, key: str, entry: Path, canonical: str, file_name: str, build: Callable[[Path, Path], str]
) -> None:
    """Builds beside the cache and renames into it. The caller holds the key's build lock."""
    work = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=root / "scratch"))
    try:
        finished, scratch = work / "finished", work / "scratch"
        finished.mkdir()
        scratch.mkdir()
        begun = time.monotonic()
        log = build(finished, scratch)
        seconds = time.monotonic() - begun
        if not (finished / file_name).is_file():
            raise FileNotFoundError(f"the compiler reported success and left no {file_name}; it said:\n{log}")
        (finished / _LOG).write_text(log)
        files = {str(p.relative_to(finished)): _sha256(p) for p in sorted(finished.rglob("*")) if p.is_file()}
        manifest = {"files": files, "seconds": seconds, "ingredients": json.loads(canonical)}
        (finished / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync_tree(finished)
        if entry.exists():  # damaged, or it would have been used
            entry.rename(work / "damaged")
        finished.rename(entry)
        _sync(entry.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _load(entry: Path, file_name: str, *, cached: bool = True) -> Artifact | None:
    """The entry's artifact, or None where it is absent or any of its files is not what was written."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        files = cast(dict[str, str], manifest["files"])
        seconds = float(manifest["seconds"])
        if file_name not in files or _LOG not in files:
            return None
        if any(_sha256(entry / name) != digest for name, digest in files.items()):
            return None
        log = (entry / _LOG).read_text()
        _touch(entry / _MANIFEST)
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Artifact(entry / file_name, log, seconds, cached)


# --- locks -----------------------------------------------------------------------------------------------------------

_NOT_OURS_TO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Another user's cache, or one in a read-only image: what is finished there can be used."""
_held: dict[Path, int] = {}
_held_guard = threading.Lock()


def _build_lock(root: Path, key: str) -> Path:
    return root / "locks" / f"{key}.build"


def _use_lock(root: Path, key: str) -> Path:
    return root / "locks" / f"{key}.use"


def _acquire(path: Path, how: int) -> int:
    """An open, locked file. Raises BlockingIOError if `how` has LOCK_NB and another holds it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in _NOT_OURS_TO_WRITE:
                raise
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # which is enough for a lock
        try:
            fcntl.flock(descriptor, how)
            # An eviction may have removed the file between open and lock; such a lock excludes nobody.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    descriptor = _acquire(path, how)
    try:
        yield
    finally:
        os.close(descriptor)


def _hold_for_life(path: Path) -> None:
    with _held_guard:
        if path not in _held:
            _held[path] = _acquire(path, fcntl.LOCK_SH)


# --- eviction --------------------------------------------------------------------------------------------------------


def _evict(root: Path, max_bytes: int) -> None:
    """Removes abandoned builds, then least recently used entries until the rest fit; skips what any process holds."""
    for work in (root / "scratch").iterdir():
        with (
            suppress(BlockingIOError, FileNotFoundError),
            _locked(_build_lock(root, work.name.partition(".")[0]), fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            shutil.rmtree(work, ignore_errors=True)
    entries: list[tuple[float, int, Path]] = []
    for entry in (root / "entries").iterdir():
        used = 0.0  # no manifest: damaged, so it goes first
        with suppress(FileNotFoundError):
            used = (entry / _MANIFEST).stat().st_mtime
        entries.append((used, _tree_bytes(entry), entry))
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= max_bytes:
            return
        if _remove_unless_held(root, entry):
            total -= size


def _remove_unless_held(root: Path, entry: Path) -> bool:
    key = entry.name.rpartition("-")[2]
    build_lock, use_lock = _build_lock(root, key), _use_lock(root, key)
    try:
        with _locked(build_lock, fcntl.LOCK_EX | fcntl.LOCK_NB), _locked(use_lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(entry, ignore_errors=True)
            build_lock.unlink(missing_ok=True)
            use_lock.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    return True


def _touch(manifest: Path) -> None:
    """Its time is that of the last use; eviction goes by it."""
    try:
        os.utime(manifest)
    except OSError as error:
        if error.errno not in _NOT_OURS_TO_WRITE:
            raise


# --- files -----------------------------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, goes on where another process removes what it walks
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)
