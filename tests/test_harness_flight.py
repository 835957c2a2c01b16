"""Pre- and post-flight: a stand-in nvidia-smi that answers as the real one does, real files, real processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import flight, flight_gpus, processes
from harness.flight_gpus import GpuLook, compare_after, look_at_gpus, problems_before
from harness.launch import run_mark
from harness.machine import Gpu, Machine
from tests.harness_project import PASSING, Project, processes_in
from tests.ssh_node import stand_in

GPUS = "0, GPU-aaaa1111, NVIDIA H200, 143771, {0}\n1, GPU-bbbb2222, NVIDIA H200, 143771, {1}\n"

# As nvidia-smi does, by query; it answers the n-th call for GPUs from the n-th file, later ones from the last.
SCRIPT = """
folder={folder}
case "$*" in
  "--query-gpu=index,uuid,name,memory.total,memory.used --format=csv,noheader,nounits")
    echo x >> $folder/asked
    n=$(wc -l < $folder/asked)
    while [ ! -e $folder/gpus$n ]; do n=$((n - 1)); done
    cat $folder/gpus$n; [ -e $folder/apps$n ] && cp $folder/apps$n $folder/apps; exit 0;;
  "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory --format=csv,noheader,nounits")
    [ -e $folder/apps ] && cat $folder/apps; exit 0;;
esac
echo "Unknown option $*"; exit 2
"""


class NvidiaSmi:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = itertools.count(1)
        stand_in(folder, "nvidia-smi", SCRIPT.format(folder=folder))

    def answer(self, used_0: object, used_1: object, apps: str = "") -> None:
        """What the next look finds: MiB taken on each of two GPUs, and the lines of its processes."""
        number = next(self._number)
        (self.folder / f"gpus{number}").write_text(GPUS.format(used_0, used_1))
        (self.folder / f"apps{number}").write_text(apps)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaSmi:
    made = NvidiaSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def machine(num_gpus: int, problem: str = "") -> Machine:
    gpu = Gpu("NVIDIA H200", (9, 0))
    return Machine("m", "3.11", "2.13", 2, 1 << 34, (gpu,) * num_gpus, problem)


def test_free_gpus(smi: NvidiaSmi) -> None:
    smi.answer(0, 4)
    look = look_at_gpus()
    assert [(gpu.index, gpu.uuid, gpu.used_bytes) for gpu in look.gpus] == [
        (0, "GPU-aaaa1111", 0),
        (1, "GPU-bbbb2222", 4 << 20),
    ]
    assert look.gpus[0].total_bytes == 143771 << 20
    assert problems_before(look, machine(2)) == []


def test_taken_gpus(smi: NvidiaSmi) -> None:
    """By whom, where that is shown; memory that nobody shows as his counts from 1 GiB on."""
    smi.answer(23552, 2048, "GPU-aaaa1111, 77, /opt/a, b/python, 23540\n")
    first, second = problems_before(look_at_gpus(), machine(2))
    assert first.startswith("GPU 0: 23.00 of 140 GiB taken, by pid 77 /opt/a,b/python (22.99 GiB); wait for it, end it")
    assert second.startswith("GPU 1: 2.00 of 140 GiB taken, by a process that this one may not see; ")


def test_chosen_gpus(smi: NvidiaSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.answer(23552, 0, "GPU-aaaa1111, 77, python, [N/A]\n")
    for chosen, found in (("1", [1]), ("GPU-bbbb", [1]), ("1,0", [1, 0]), ("1,-1,0", [1]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        look = look_at_gpus()
        assert [gpu.index for gpu in look.gpus] == found
        assert bool(problems_before(look, machine(len(found)))) == (0 in found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7")
    (problem,) = problems_before(look_at_gpus(), machine(0))
    assert problem == "GPUs: CUDA_VISIBLE_DEVICES=1,7 names 7, there are 0, 1: correct it, or gpus in nodes.yaml"


def test_driver_that_does_not_tell(smi: NvidiaSmi) -> None:
    smi.answer("[N/A]", "[Not Supported]", "GPU-bbbb2222, 9, [Not Found], [N/A]\n")
    look = look_at_gpus()
    assert [gpu.used_bytes for gpu in look.gpus] == [None, None]
    (problem,) = problems_before(look, machine(2))
    assert problem.startswith("GPU 1: memory (how much is not told) taken, by pid 9 [Not Found]; ")
    assert compare_after(look) == ([], [])


def test_torch_sees_other_gpus(smi: NvidiaSmi) -> None:
    smi.answer(0, 0)
    (problem,) = problems_before(look_at_gpus(), machine(0, "torch could not be asked"))
    assert problem.startswith(
        "GPUs: nvidia-smi shows 2, torch sees 0 (torch could not be asked): is this torch built for"
    )


def test_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_gpus, "QUERY_SECONDS", 0.3)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    for text, words in (
        (
            f'echo "{failed}"; exit 9',
            f"GPUs: nvidia-smi failed with 9 ({failed}): is the driver loaded and of one version?",
        ),
        ("exec sleep 10", "GPUs: nvidia-smi did not answer in 0.3 s: the driver may be stuck, look at `dmesg`"),
    ):
        stand_in(tmp_path, "nvidia-smi", text)
        assert problems_before(look_at_gpus(), machine(2)) == [words]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    (problem,) = problems_before(look_at_gpus(), machine(2))
    assert problem.startswith(
        "GPUs: no nvidia-smi on PATH, so nobody knows who uses them; it comes with the driver (in a"
    )


def test_memory_after(smi: NvidiaSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's own ups and downs are nothing; memory that is late is waited for; a process that shows is somebody
    else's, whether it is new or has grown; memory of none is left behind."""
    monkeypatch.setattr(flight_gpus, "RELEASE_S", 0.2)
    monkeypatch.setattr(flight_gpus, "is_container", lambda: False)
    smi.answer(0, 500, "GPU-bbbb2222, 5, python, 490\n")
    before = look_at_gpus()
    smi.answer(60, 500)
    assert compare_after(before) == ([], [])
    smi.answer(900, 500)
    smi.answer(0, 500)
    assert compare_after(before) == ([], [])
    smi.answer(1024, 500)
    (left,), notes = compare_after(before)
    assert left.startswith("GPU 0: 1.00 GiB more are taken than before the run, and no process shows there: look at")
    assert notes == []
    smi.answer(0, 1012, "GPU-bbbb2222, 5, python, 1002\n")
    assert compare_after(before) == (
        [],
        ["GPU 1: 0.50 GiB more are taken than before the run, by pid 5 python (0.98 GiB), not of this run"],
    )
    smi.answer(0, 1012, "GPU-bbbb2222, 6, other, 510\n")
    assert compare_after(before) == (
        [],
        ["GPU 1: 0.50 GiB more are taken than before the run, by pid 6 other (0.50 GiB), not of this run"],
    )
    assert compare_after(GpuLook(problem="no nvidia-smi")) == ([], [])
    (smi.folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert compare_after(before)[0][0].startswith("GPUs: nvidia-smi failed with 9")


def test_memory_after_in_a_container(smi: NvidiaSmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi shows no processes there: what /proc shows is named, and nothing of others fails a run."""
    monkeypatch.setattr(flight_gpus, "RELEASE_S", 0.2)
    monkeypatch.setattr(flight_gpus, "FIRST_PID_NAMESPACE", "pid:[0]")
    smi.answer(0, 500)
    before = look_at_gpus()
    smi.answer(1024, 500)
    left, (note,) = compare_after(before)
    assert left == []
    assert note.startswith(
        "GPU 0: 1.00 GiB more are taken than before the run, by a process outside this container: every process of"
    )
    proc = tmp_path / "proc"
    for pid, link in ((5, "/dev/nvidia0"), (6, "/dev/nvidiactl")):
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "fd" / "3").symlink_to(link)
        (proc / str(pid) / "stat").write_text((processes.PROC / "self" / "stat").read_text())
        (proc / str(pid) / "cmdline").write_bytes(b"python\0side.py\0")
    monkeypatch.setattr(processes, "PROC", proc)
    left, (note,) = compare_after(before)
    assert left == []
    holder = (
        re.escape("by a process outside this container, or by pid 5 (state ")
        + "[A-Z]"
        + re.escape(") python side.py: ")
    )
    assert re.search(holder, note), note


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_run_for_gpus(project: Project, smi: NvidiaSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures, warnings and what was left are in results.jsonl, in run.json and in the output; left memory fails it,
    where nvidia-smi shows whether it is somebody else's."""
    environment = {**project.environment()}
    del environment["CUDA_VISIBLE_DEVICES"]
    monkeypatch.setattr(project, "environment", lambda: environment)
    project.phase(1, PASSING, targets={"sm90": {"ranks": {1: ["single"]}}})
    smi.answer(0, 2048, "GPU-bbbb2222, 5, python, 2040\n")
    smi.answer(3072, 2048, "GPU-bbbb2222, 5, python, 2040\n")
    call = project.call("run", "--target", "sm90")
    in_container = flight_gpus.is_container()
    assert call.code == (0 if in_container else 1)
    before, after = (line for line in call.lines() if line["kind"].endswith("flight"))
    assert [before["kind"], after["kind"]] == ["pre_flight", "post_flight"]
    assert [gpu["used_bytes"] for gpu in before["gpus"]] == [0, 2 << 30]
    assert before["warnings"][0].startswith("GPUs: nvidia-smi shows 2, torch sees 0")
    assert before["warnings"][1].startswith("GPU 1: 2.00 of 140 GiB taken, by pid 5 python")
    (told,) = [text for text in (*after["leftovers"], *after["notes"]) if text.startswith("GPU")]
    assert told.startswith("GPU 0: 3.00 GiB more are taken than before the run")
    assert (told in after["notes"]) == in_container
    facts = json.loads((call.run_folder / "run.json").read_text())
    assert facts["pre_flight"]["warnings"] == before["warnings"]
    assert facts["post_flight"]["leftovers"] == after["leftovers"]
    assert "pre-flight: GPU 1: 2.00 of 140 GiB taken" in call.output
    assert ("post-flight" if in_container else "LEFT BEHIND") + ": GPU 0: 3.00 GiB more" in call.output


def test_host_runs_do_not_ask_for_gpus(project: Project, smi: NvidiaSmi) -> None:
    project.phase(1, PASSING)
    call = project.call("run", "--target", "host")
    assert call.code == 0
    assert not (smi.folder / "asked").exists()


@pytest.fixture
def shared_files() -> Iterator[Callable[[str], Path]]:
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(Path("/dev/shm") / f"{name}-{os.getpid()}")
        made[-1].write_bytes(b"x")
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_files_after(tmp_path: Path, shared_files: Callable[[str], Path]) -> None:
    """Files that a step held are removed and named; those of others are noted and stay, as do older ones."""
    shared_files("older")
    _, baseline = flight.pre_flight(tmp_path, machine(0), with_gpus=False)
    held, other = shared_files("held"), shared_files("other")
    step = tmp_path / "phase1-host-1-single"
    step.mkdir()
    status = held.stat()
    line = {"device": status.st_dev, "inode": status.st_ino, "name": str(held)}
    (step / "shared_memory.jsonl").write_text(json.dumps(line) + "\n")
    after = flight.post_flight(tmp_path, baseline)
    assert after.leftovers == (f"removed {held}",)
    assert not held.exists()
    (note,) = [note for note in after.notes if note.startswith("/dev/shm/o") and str(os.getpid()) in note]
    assert note == f"{other} is new, and no process of this run was seen to hold it; remove it if it is yours"
    assert other.exists()


def test_processes_after(tmp_path: Path) -> None:
    """A process that carries this run's mark is ended and named."""
    _, baseline = flight.pre_flight(tmp_path, machine(0), with_gpus=False)
    mark = run_mark(processes.own_key())
    environment = {**os.environ, "MEGAMOE_STEP_ID": f"{mark}.1.abcdef12", "MEGAMOE_RUN_DIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], env=environment)
    while not processes_in(tmp_path):  # until it has its own environment
        pass
    after = flight.post_flight(tmp_path, baseline)
    assert child.wait(timeout=5) != 0
    (left,) = after.leftovers
    assert left.startswith(f"ended pid {child.pid} (state ")


def test_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for one full disk, though results and temporary files are on it."""
    monkeypatch.setattr(flight, "MIN_DISK_BYTES", 1 << 60)
    monkeypatch.setattr(flight, "MIN_MEMORY_BYTES", 1 << 60)
    before, _ = flight.pre_flight(tmp_path, machine(0), with_gpus=False)
    disk, memory = before.warnings[:2]
    assert disk.endswith(f"GiB free for {tmp_path}; logs and dumps may not fit, make room")
    assert memory.endswith("GiB available, a step of 8 ranks may take 4; end what holds it, or use fewer")
