"""The compilation cache, with real processes: one build a key, nothing broken after a kill, eviction, keys."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megamoe.jit import Artifact, CompileError, build_shared_library, cache, cache_max_bytes
from megamoe.jit.sources import dependency_digests

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("private_cache")


class Worker:
    """A process that runs a Python text once it is told to go, and then stays until it is told to end."""

    def __init__(self, text: str) -> None:
        # Only megamoe.jit is wanted: without the package's own __init__, so without torch, it starts in 0.1 s.
        script = (
            "import sys, types; from pathlib import Path\n"
            f"package = types.ModuleType('megamoe'); package.__path__ = [{str(ROOT / 'megamoe')!r}]\n"
            "sys.modules['megamoe'] = package\n"
            "import os\n"
            "from megamoe.jit import build_shared_library, cache\n"
            "def make(name, size):\n"
            "    def build(folder, scratch):\n"
            "        (folder / 'data').write_bytes(b'x' * size); return ''\n"
            "    return cache.get_or_build(name, {}, 'data', build)\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            f"{text}\n"
            "print('done', flush=True); sys.stdin.readline()\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.expect("ready")

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.end()


def run_worker(text: str) -> None:
    worker = Worker(text)
    worker.go()
    worker.expect("done")
    worker.end()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


@pytest.fixture
def counting_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CXX that notes its pid for each compilation, and stops in it while the file `stall` is there."""
    calls = tmp_path / "calls"
    calls.mkdir()
    script = tmp_path / "counting_cxx"
    script.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -c "*)\n'
        f"echo > {calls}/$$\n"
        f"if [ -e {tmp_path}/stall ]; then exec sleep 100; fi\n"
        "sleep 0.3;;\n"
        "esac\n"
        'exec g++ "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return calls


def entries(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in (folder / "entries").iterdir())


def make(name: str, text: str = "text", builds: list[str] | None = None) -> Artifact:
    """An entry without a compiler; notes in `builds` that it was built."""

    def build(folder: Path, scratch: Path) -> str:
        if builds is not None:
            builds.append(name)
        (folder / "data").write_text(text)
        (scratch / "left").write_text("thrown away")
        return "what the compiler said\n"

    return cache.get_or_build(name, {"text": text}, "data", build)


def test_four_processes_compile_once(source: Path, counting_cxx: Path, workers: list[Worker]) -> None:
    text = f"artifact = build_shared_library('answer', [Path({str(source)!r})])"
    for _ in range(4):
        workers.append(Worker(text))
    for worker in workers:
        worker.go()
    for worker in workers:
        worker.expect("done")
    assert len(list(counting_cxx.iterdir())) == 1
    assert build_shared_library("answer", [source]).cached


def test_killed_builder_leaves_nothing_broken(
    source: Path, counting_cxx: Path, private_cache: Path, workers: list[Worker]
) -> None:
    (stall := source.parent / "stall").touch()
    workers.append(Worker(f"build_shared_library('answer', [Path({str(source)!r})])"))
    workers[0].go()
    deadline = time.monotonic() + 20
    while not list(counting_cxx.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers[0].process.send_signal(signal.SIGKILL)
    workers[0].process.wait()
    assert list((private_cache / "scratch").iterdir()), "the kill came too late to leave an unfinished build"
    assert entries(private_cache) == []
    for pid in counting_cxx.iterdir():  # the compiler that the dead builder started
        os.kill(int(pid.name), signal.SIGKILL)
    stall.unlink()

    built = build_shared_library("answer", [source])
    assert not built.cached
    assert entries(private_cache) == ["answer"]
    assert list((private_cache / "scratch").iterdir()) == []
    assert build_shared_library("answer", [source]).cached


def test_builder_dying_just_before_its_entry_appears(private_cache: Path) -> None:
    worker = Worker("cache._sync_tree = lambda folder: os._exit(9)\nmake('entry', 10)")
    worker.go()
    assert worker.process.wait() == 9
    assert entries(private_cache) == []
    assert list((private_cache / "scratch").iterdir())
    run_worker("assert not make('entry', 10).cached")
    assert list((private_cache / "scratch").iterdir()) == []


def test_builder_dying_just_after_its_entry_appears(private_cache: Path) -> None:
    worker = Worker("cache._sync = lambda path: os._exit(9) if path.name == 'entries' else None\nmake('entry', 10)")
    worker.go()
    assert worker.process.wait() == 9
    run_worker("assert make('entry', 10).cached")


def test_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    """An eviction removes a key's lock files while others wait for them: then two may hold "the" lock."""
    path = tmp_path / "key.build"
    ours = cache._acquire(path, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache._acquire, path, fcntl.LOCK_EX)
        time.sleep(0.2)
        assert not waiting.done()
        path.unlink()
        os.close(ours)
        theirs = waiting.result(timeout=10)
    with pytest.raises(BlockingIOError):
        cache._acquire(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(theirs)


@pytest.mark.parametrize("victim", ["data", "log.txt", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "one byte changed", "removed", "emptied"])
def test_damaged_entry_is_built_again(victim: str, damage: str) -> None:
    builds: list[str] = []
    first = make("entry", "a text of some length", builds)
    path = first.path.parent / victim
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "one byte changed":
        at = content.index(b'"data"') + 1 if victim == "manifest.json" else 3
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"")
    again = make("entry", "a text of some length", builds)
    assert not again.cached
    assert builds == ["entry", "entry"]
    assert again.path.read_text() == "a text of some length"
    assert make("entry", "a text of some length", builds).cached


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_what_is_finished_in_a_read_only_cache_is_used(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    make("entry")
    monkeypatch.setattr(cache, "_held", {})
    real_open = os.open

    def open_to_read(path: os.PathLike[str] | str, flags: int, *rest: int, **options: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(number, os.strerror(number), os.fspath(path))
        return real_open(path, flags, *rest, **options)

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", open_to_read)
    monkeypatch.setattr(os, "utime", refuse)
    assert make("entry").cached
    with pytest.raises(OSError):
        make("another")


def test_a_cache_that_cannot_be_made_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cache folder .*file cannot be made \(.*\): MEGAMOE_CACHE_DIR names another"):
        make("entry")


def test_hit_returns_what_the_build_said() -> None:
    built, found = make("entry"), make("entry")
    assert (built.cached, found.cached) == (False, True)
    assert (built.path, built.log, built.seconds) == (found.path, found.log, found.seconds)
    assert found.log == "what the compiler said\n"
    assert sorted(path.name for path in found.path.parent.iterdir()) == ["data", "log.txt", "manifest.json"]


def test_failed_build_leaves_nothing(tmp_path: Path, private_cache: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main() { return no_such_name; }\n")
    with pytest.raises(CompileError, match="no_such_name") as caught:
        build_shared_library("broken", [broken], options=["-DSOME_OPTION=1"])
    assert "-DSOME_OPTION=1" in caught.value.command
    assert "broken.cpp:1" in caught.value.log
    assert entries(private_cache) == []
    assert list((private_cache / "scratch").iterdir()) == []
    copied = pickle.loads(pickle.dumps(caught.value))  # it may cross from a worker process
    assert (copied.command, copied.log, str(copied)) == (caught.value.command, caught.value.log, str(caught.value))


def test_eviction_takes_the_least_recently_used(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_worker("for name in 'abc': make(name, 100_000)")
    for age, name in enumerate("cba"):
        (entry,) = (private_cache / "entries").glob(f"{name}-*")
        os.utime(entry / "manifest.json", (1000.0 - age, 1000.0 - age))  # a is the oldest
    run_worker("assert make('a', 100_000).cached")  # and is now used
    monkeypatch.setenv("MEGAMOE_CACHE_MAX_BYTES", "350000")
    run_worker("make('d', 100_000)")
    assert entries(private_cache) == ["a", "c", "d"]
    assert len(list((private_cache / "locks").iterdir())) == 2 * 3, "the locks of b are gone too"


def test_eviction_spares_what_another_process_holds(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch, workers: list[Worker]
) -> None:
    workers.append(Worker("make('held', 100_000)"))
    workers[0].go()
    workers[0].expect("done")
    monkeypatch.setenv("MEGAMOE_CACHE_MAX_BYTES", "0")
    run_worker("make('second', 100_000)")
    assert entries(private_cache) == ["held", "second"]  # the second was held by its own builder
    workers[0].end()
    run_worker("make('third', 100_000)")
    assert entries(private_cache) == ["third"]


def test_eviction_and_use_at_the_same_time(monkeypatch: pytest.MonkeyPatch, workers: list[Worker]) -> None:
    """Whatever a process was given is there and whole while it lives, with others evicting all they can."""
    monkeypatch.setenv("MEGAMOE_CACHE_MAX_BYTES", "0")
    text = (
        "import time\n"
        "for round in range(60):\n"
        "    name = f'e{round % 5}_{os.getpid() % 2}'\n"
        "    assert make(name, 5000).path.read_bytes() == b'x' * 5000\n"
        "    if round % 4 == 3:\n"
        "        for lock in cache._held.values(): os.close(lock)\n"
        "        cache._held.clear()\n"
    )
    for _ in range(3):
        workers.append(Worker(text))
    for worker in workers:
        worker.go()
    for worker in workers:
        worker.expect("done")


@pytest.mark.parametrize("text", ["4 GiB", "-1", "", "1e9"])
def test_bad_size_bound(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_MAX_BYTES", text)
    with pytest.raises(ValueError, match=f"MEGAMOE_CACHE_MAX_BYTES is {text!r}; expected a whole number of bytes"):
        cache_max_bytes()
    with pytest.raises(ValueError, match="MEGAMOE_CACHE_MAX_BYTES"):  # at every call, not only one that builds
        cache.get_or_build("name", {}, "file", lambda folder, scratch: "")


def test_bad_name() -> None:
    with pytest.raises(ValueError, match=r"name is '\.\./escape'; expected letters"):
        make("../escape")


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """main.cpp includes near.hpp (beside it) and <inc/a.hpp>, which includes b.hpp; unrelated.hpp is nobody's."""
    (tmp_path / "include" / "inc").mkdir(parents=True)
    (tmp_path / "main.cpp").write_text(
        '#include "near.hpp"\n#  include <inc/a.hpp>\n#include <vector>\n#include "buffer_layout.hpp"\n'
        'extern "C" int answer() { return A + B + NEAR + LAYOUT; }\n'
    )
    (tmp_path / "near.hpp").write_text("#define NEAR 1\n")
    (tmp_path / "include" / "inc" / "a.hpp").write_text('#if 1\n#include "b.hpp"\n#endif\n#define A 1\n')
    (tmp_path / "include" / "inc" / "b.hpp").write_text("#define B 1\n")
    (tmp_path / "include" / "inc" / "unrelated.hpp").write_text("#define UNRELATED 1\n")
    return tmp_path


def build_tree(tree: Path, layout: str = "#define LAYOUT 1\n", options: Sequence[str] = ()) -> Artifact:
    return build_shared_library(
        "tree",
        [tree / "main.cpp"],
        generated={"buffer_layout.hpp": layout},
        options=options,
        include_dirs=[tree / "include"],
    )


def test_key_follows_what_the_build_reads(tree: Path) -> None:
    seen = {build_tree(tree).path}

    def is_new(artifact: Artifact) -> bool:
        new = artifact.path not in seen
        assert artifact.cached == (not new)
        seen.add(artifact.path)
        return new

    (tree / "include" / "inc" / "unrelated.hpp").write_text("#define UNRELATED 2\n")
    assert not is_new(build_tree(tree))
    for header in ["near.hpp", "include/inc/a.hpp", "include/inc/b.hpp", "main.cpp"]:
        with (tree / header).open("a") as file:
            file.write("// a comment is a change\n")
        assert is_new(build_tree(tree)), header
    assert is_new(build_tree(tree, layout="#define LAYOUT 2\n"))
    assert is_new(build_tree(tree, options=["-DX=1"]))
    assert is_new(build_tree(tree, options=["-DX=2"]))
    (tree / "near.hpp").write_text("#define NEAR 1\n// a comment is a change\n")
    assert not is_new(build_tree(tree))


def test_key_follows_the_compiler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {build_shared_library("answer", [source]).path}
    for number, version in enumerate(["13.1.0", "13.2.0", "13.2.0"]):
        script = tmp_path / f"g++-{number}"
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "g++ {version}" && exit\nexec g++ "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        paths.add(build_shared_library("answer", [source]).path)
    monkeypatch.setenv("CPATH", str(tmp_path))
    paths.add(build_shared_library("answer", [source]).path)
    assert len(paths) == 5


def test_key_follows_the_cpu_where_the_build_does(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe.jit import gxx

    portable, native = (
        build_shared_library("answer", [source], options=options) for options in ([], ["-march=native"])
    )
    monkeypatch.setattr(gxx, "_native_flags", lambda compiler: "flags of another CPU")
    assert build_shared_library("answer", [source]).path == portable.path
    assert build_shared_library("answer", [source], options=["-march=native"]).path != native.path


def test_key_ignores_where_the_checkout_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.cpp").write_text('#include "a.hpp"\n')
        (tmp_path / name / "a.hpp").write_text("int value();\n")
    one, two = (dependency_digests([tmp_path / name / "a.cpp"], {}, []) for name in ("one", "two"))
    assert one == two
    assert [name for name, _ in one] == ["a.cpp", "a.hpp"]


def test_key_follows_the_version_of_toolchain_headers(tmp_path: Path) -> None:
    version = tmp_path / "cccl" / "cuda" / "std" / "__cccl" / "version.h"
    version.parent.mkdir(parents=True)
    (tmp_path / "a.cpp").write_text("#include <cuda/atomic>\n")
    (tmp_path / "cccl" / "cuda" / "atomic").write_text("#include MACRO_NAME_OF_ITS_OWN\n")
    version.write_text("#define CCCL_VERSION 3000000\n")
    old = dependency_digests([tmp_path / "a.cpp"], {}, [tmp_path / "cccl"])
    version.write_text("#define CCCL_VERSION 3001000\n")
    assert dependency_digests([tmp_path / "a.cpp"], {}, [tmp_path / "cccl"]) != old


def test_include_by_macro_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("#define NAME <vector>\n#include NAME\n")
    with pytest.raises(ValueError, match=r"a\.cpp: '#include NAME' cannot be followed"):
        build_shared_library("a", [tmp_path / "a.cpp"])


def test_manifest_tells_what_went_in(tree: Path) -> None:
    built = build_tree(tree, options=["-DX=1"])
    ingredients = json.loads((built.path.parent / "manifest.json").read_text())["ingredients"]
    assert ingredients["options"][-1] == "-DX=1"
    assert {"main.cpp", "near.hpp", "inc/a.hpp", "b.hpp", "buffer_layout.hpp"} == {n for n, _ in ingredients["texts"]}
    assert (built.path.parent / "generated" / "buffer_layout.hpp").read_text() == "#define LAYOUT 1\n"
