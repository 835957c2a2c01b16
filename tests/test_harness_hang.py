"""A hang is explained before it is killed: by real ranks that wait for one that never launches, or that died."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness import hang, processes
from harness.hang import HANG_FOLDER, Bundle, Trouble, write_bundle
from harness.processes import ProcessKey
from tests.hang_project import NUM_RANKS, STALLED, HangProject
from tests.hang_soak import LIMIT_S, hang_once
from tests.harness_project import HarnessCall


def _bundle(call: HarnessCall) -> dict[str, str]:
    """The bundle of a call's only step: text by name of file."""
    (step,) = call.steps()
    folder = Path(step["outcome"]["bundle"])
    assert folder.name == HANG_FOLDER
    assert folder.is_relative_to(call.run_folder)
    assert str(folder) in call.output  # in the failure line
    assert any(str(folder) in reason for reason in step["reasons"])
    return {path.name: path.read_text(errors="replace") for path in folder.iterdir()}


def _only_bundle(root: Path) -> dict[str, str]:
    (folder,) = root.glob(f"runs/*/*/{HANG_FOLDER}")
    return {path.name: path.read_text(errors="replace") for path in folder.iterdir()}


# Two of the runs of `python -m tests.hang_soak`, which looks for processes, mappings and files that are left.


def _hang_when_all_are_there(kind: str, folder: Path, words: str, file: str) -> dict[str, str]:
    """The bundle of a step that hangs, with ``words`` in ``file``: those of a rank that is where it hangs. On a busy
    machine ranks may not have come so far by the limit; then once more with a longer one."""
    for limit_s in (LIMIT_S, 5 * LIMIT_S):
        place = folder / f"{folder.name}-{limit_s:g}"  # hang_once looks for that name
        place.mkdir()
        assert hang_once(kind, place, limit_s) == []
        texts = _only_bundle(place)
        if words in texts.get(file, ""):
            return texts
    raise AssertionError(f"no {words!r} in {file} of {sorted(texts)}: {texts['summary.txt']}")


def test_eight_ranks_that_wait_for_one(tmp_path: Path) -> None:
    texts = _hang_when_all_are_there("virtual", tmp_path, "launched", "rank0.txt")
    assert re.search(r"explained because: still running after \d+\.\d s", texts["summary.txt"])
    assert f"wait in epoch 2 for rank {STALLED}, which did not launch it" in texts["summary.txt"]
    assert "rank 0 of 8: epoch 2 under way" in texts["rank0.txt"]
    assert f"not published here for epoch 2 by rank {STALLED} (last for epoch 1)" in texts["rank0.txt"]
    assert "in wait_for_a_launch_that_never_ends" in texts["rank0.txt"]
    assert "--- native stack" in texts["rank0.txt"]
    assert texts["rank0.txt"].rstrip().endswith("launched")
    assert f"rank {STALLED} of 8: epoch 1 ended, none under way" in texts[f"rank{STALLED}.txt"]
    assert {f"rank{rank}-buffer0.dump" for rank in range(NUM_RANKS)} <= set(texts)
    assert "error.txt" not in texts


def test_eight_processes_that_want_to_stay(tmp_path: Path) -> None:
    # Of the last rank, its Python stack. Ranks are started in order.
    texts = _hang_when_all_are_there("process", tmp_path, 'script.py", line', f"rank{NUM_RANKS - 1}.txt")
    assert all(f"rank{rank}.txt" in texts for rank in range(NUM_RANKS))


def test_a_rank_that_dies_is_read_through_its_peers(tmp_path: Path) -> None:
    """Also where the launcher is quicker to terminate the peer than the supervisor to read its memory: here the dying
    rank itself does so first."""
    project = HangProject(tmp_path)
    project.processes(2, stall="die_after_the_peer_is_told_to_end()")
    call = project.call("run", "--target", "host")
    assert call.statuses() == {"1-2-process": "failed"}
    texts = _bundle(call)
    assert "rank 1 ended without reaching its end (a signal)" in texts["summary.txt"]
    assert "rank 0 waits in epoch 2 for rank 1, which did not launch it" in texts["summary.txt"]
    assert "rank 1 is gone; its memory was read through a peer's" in texts["summary.txt"]
    assert "rank 1 of 2: epoch 1 ended, none under way" in texts["rank1.txt"]
    assert "rank 1 does not launch" in texts["rank1.txt"]  # of its log
    assert "in synchronize" in texts["rank0.txt"]


def test_a_fault_is_explained_at_once(tmp_path: Path) -> None:
    """The rank that meets it waits until the supervisor has looked; the step then ends by itself."""
    project = HangProject(tmp_path)
    project.virtual(timeout_s=0.5, on_fault="hang.announce_fault(str(fault))")
    call = project.call("run", "--target", "host")
    (step,) = call.steps()
    assert step["status"] == "failed"
    assert step["seconds"] < 30
    texts = _bundle(call)
    assert re.search(r"rank 0 met a fault: rank \d waited", texts["summary.txt"])  # whichever was the first
    assert f"for rank {STALLED} to publish its routes for epoch 2" in texts["summary.txt"]
    assert "aborted in epoch 2" in texts["rank1.txt"]
    assert "--- fault" in texts["rank0.txt"]


@pytest.fixture
def rank() -> Iterator[ProcessKey]:
    """A process to explain. Not this one: it may hold buffers of other tests, and who holds some is stopped."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        process = processes.read_process(child.pid)
        assert process is not None
        yield process.key
        child.kill()


def test_ranks_that_end_in_order_need_no_bundle(tmp_path: Path, rank: ProcessKey) -> None:
    write_bundle(tmp_path, Trouble("rank 1 ended with exit code 1", {0: rank}, {}, ended_by_itself=True), 2.0)
    assert not (tmp_path / HANG_FOLDER).exists()
    write_bundle(tmp_path, Trouble("rank 1 ended without reaching its end (a signal)", {0: rank}, {}), 2.0)
    assert "no rank holds a buffer" in (tmp_path / HANG_FOLDER / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("script", "told"),
    [("echo frames: $@", "frames: dump --native --pid {pid}"), ("exec sleep 1000", "py-spy took longer than")],
    ids=["answers", "hangs"],
)
def test_native_stacks_by_py_spy(
    script: str, told: str, rank: ProcessKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program of that name: the real one is nothing that a test may rest on."""
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name, path: str(program))
    started = time.monotonic()
    write_bundle(tmp_path, Trouble("a test", {0: rank}, {}), 1.0)
    assert time.monotonic() - started < 3
    assert told.format(pid=rank.pid) in (tmp_path / HANG_FOLDER / "rank0.txt").read_text()


def test_a_bundle_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that writing it meets may keep the supervisor from the kill at the limit."""
    monkeypatch.setattr(hang, "write_bundle", lambda *_: time.sleep(1000))
    bundle = Bundle(tmp_path, 60.0)
    others = {child.pid for child in psutil.Process().children()}
    before = time.monotonic()
    bundle.begin(Trouble("a test", {}, {}))
    bundle.finish(0.1)
    assert time.monotonic() - before < 5
    left = [child for child in psutil.Process().children() if child.pid not in others]
    assert left == []
    assert bundle.read() == ("", "")


def test_what_goes_wrong_in_a_bundle_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / HANG_FOLDER).mkdir()
    monkeypatch.setattr(hang, "write_bundle", lambda *_: 1 // 0)
    bundle = Bundle(tmp_path, 60.0)
    bundle.begin(Trouble("a test", {}, {}))
    bundle.finish(5.0)
    assert "ZeroDivisionError" in (tmp_path / HANG_FOLDER / "error.txt").read_text()
    assert bundle.read() == (str(tmp_path / HANG_FOLDER), "the bundle was not finished in its time")
