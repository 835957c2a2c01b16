"""``megamoe doctor``: on this machine, and with stand-ins for what is missing or there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamoe.doctor import (
    Diagnosis,
    Facts,
    Finding,
    Found,
    Gpu,
    TorchFacts,
    ask_torch,
    describe,
    examine,
    gpu_links,
)

H200 = Gpu("NVIDIA H200", (9, 0), 150 << 30)
L4 = Gpu("NVIDIA L4", (8, 9), 24 << 30)
HERE = Found("here")
TOPOLOGY = """\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47
GPU1\tNV18\t X \tSYS\t48-95
NIC0\tPIX\tSYS\t X \t

Legend:
"""


def _facts(*gpus: Gpu, **changes: Any) -> Facts:
    """A machine that has everything, with these GPUs, all of them linked."""
    count = len(gpus)
    torch = TorchFacts(
        version="2.13.0+cu130",
        cuda="13.0",
        driver_cuda=(13, 0),
        gpus=gpus,
        peers=tuple(tuple(True for _ in gpus) for _ in gpus),
        gloo=True,
        nccl=True,
    )
    links = tuple(tuple("X" if i == j else "NV18" for j in range(count)) for i in range(count))
    switches = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    named = ("compiler", "cccl", "nvcc", "nvrtc", "bindings", "driver", "cache")
    facts = Facts("3.12.1", torch, **dict.fromkeys(named, HERE), links=links, switches=switches)  # type: ignore[arg-type]
    return replace(facts, **changes)


def _can(diagnosis: Diagnosis) -> dict[tuple[str, str], list[int]]:
    """Kinds of ranks -> numbers of them that can run."""
    found: dict[tuple[str, str], list[int]] = {}
    for capability in diagnosis.capabilities:
        ranks = found.setdefault((capability.target, capability.kind), [])
        ranks += [] if capability.why_not else [capability.ranks]
    return found


def _finding(diagnosis: Diagnosis, name: str) -> Finding:
    (found,) = [finding for finding in diagnosis.findings if finding.name == name]
    return found


def _doctor(tmp_path: Path, **environment: str) -> tuple[int, dict[str, Any]]:
    """A real call: (exit code, its JSON)."""
    variables = {**os.environ, "MEGAMOE_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "megamoe.cli", "doctor", "--json"],
        env={name: value for name, value in variables.items() if value != "absent"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def _by_name(said: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in said["findings"]}


def test_this_machine(tmp_path: Path) -> None:
    """Its GPUs hidden, it runs the host target, makes no cache, and says what the GPU target lacks."""
    code, said = _doctor(tmp_path)
    assert code == 0
    assert said["can_run_something"]
    able = {(c["target"], c["kind"], c["ranks"]) for c in said["capabilities"] if not c["why_not"]}
    assert able == {("host", kind, ranks) for kind in ("processes", "virtual") for ranks in (1, 2, 4, 8)}
    assert {c["why_not"] for c in said["capabilities"] if c["target"] == "sm90"} == {"no Hopper GPU"}
    found = _by_name(said)
    assert found["GPUs"]["state"] == "no"
    assert found["C++ compiler"]["state"] == found["NVRTC"]["state"] == found["compilation cache"]["state"] == "yes"
    assert "0 builds" in found["compilation cache"]["found"]
    assert not (tmp_path / "cache").exists()


def test_a_machine_that_can_run_nothing(tmp_path: Path) -> None:
    """No compiler, no NVRTC, no place for a cache: exit code 1, and for each how to get it."""
    shadow = tmp_path / "shadow" / "cuda"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").touch()
    code, said = _doctor(
        tmp_path,
        PATH=str(tmp_path),
        CXX="absent",
        CUDA_HOME="absent",
        MEGAMOE_CACHE_DIR="/dev/null/cache",
        PYTHONPATH=os.pathsep.join([str(shadow.parent), str(Path(__file__).resolve().parent.parent)]),
    )
    assert code == 1
    found = _by_name(said)
    assert (found["C++ compiler"]["state"], found["C++ compiler"]["found"]) == ("no", "no g++ on PATH")
    assert "apt-get install g++" in found["C++ compiler"]["fix"]
    assert "cuda.bindings does not import" in found["NVRTC"]["found"]
    assert "nvidia-cuda-nvrtc==13.0.*" in found["NVRTC"]["fix"]
    assert "MEGAMOE_CACHE_DIR" in found["compilation cache"]["fix"]
    assert {c["why_not"] for c in said["capabilities"] if c["target"] == "host"} == {"see C++ compiler"}


def test_a_compiler_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "oldc++"
    old.write_text("#!/bin/sh\necho 'unknown option -std=c++20' >&2\nexit 1\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    code, said = _doctor(tmp_path, CXX=str(old))
    assert code == 1
    words = _by_name(said)["C++ compiler"]["found"]
    assert words == f"{old} does not build a C++20 program: unknown option -std=c++20"


def test_a_driver_that_hangs_and_a_torch_that_breaks() -> None:
    hangs = ask_torch([sys.executable, "-c", "import time; time.sleep(100)"], seconds=0.5)
    assert hangs.problem == "torch did not answer in 0.5 s when asked for GPUs"
    breaks = ask_torch([sys.executable, "-c", "raise ImportError('libcudart.so.13: no such file')"])
    assert breaks.problem == "torch could not be asked: ImportError: libcudart.so.13: no such file"
    diagnosis = examine(_facts(torch=breaks))
    assert not diagnosis.can_run_something
    assert {capability.why_not for capability in diagnosis.capabilities} == {"see torch"}


def test_gpus() -> None:
    """One GPU: virtual ranks only; two: two processes, and ranks over both; another kind of GPU: none."""
    host = {("host", "processes"): [1, 2, 4, 8], ("host", "virtual"): [1, 2, 4, 8]}
    kinds = [("sm90", "processes"), ("sm90", "virtual, one GPU"), ("sm90", "virtual, all GPUs")]
    machines: list[tuple[list[Gpu], list[list[int]]]] = [
        ([L4], [[], [], []]),
        ([H200], [[1], [1, 2, 4, 8], []]),
        ([H200, L4], [[1], [1, 2, 4, 8], []]),
        ([H200] * 2, [[1, 2], [1, 2, 4, 8], [2, 4, 8]]),
        ([H200] * 8, [[1, 2, 4, 8], [1, 2, 4, 8], [2, 4, 8]]),
    ]
    for gpus, expected in machines:
        assert _can(examine(_facts(*gpus))) == {**host, **dict(zip(kinds, expected, strict=True))}, gpus
    assert _finding(examine(_facts(L4)), "GPUs").state == "no"
    assert "an H100" in _finding(examine(_facts(L4)), "GPUs").fix


@pytest.mark.parametrize(
    ("changes", "name", "able"),
    [
        ({"nvrtc": Found(problem="gone")}, "NVRTC", [[], [], []]),
        ({"nvcc": Found(problem="gone"), "kernel_compiler": "nvcc"}, "nvcc", [[], [], []]),
        ({"driver": Found(problem="gone")}, "driver", [[], [], []]),
        ({"bindings": Found(problem="gone")}, "CUDA bindings", [[], [], []]),
        ({"cccl": Found(problem="gone")}, "libcu++", [[], [], []]),
        ({"cache": Found(problem="gone")}, "compilation cache", [[], [], []]),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Found], name: str, able: list[list[int]]) -> None:
    """With two Hopper GPUs; each "no" says how to get the thing."""
    diagnosis = examine(_facts(H200, H200, **changes))
    assert [ranks for (target, _), ranks in _can(diagnosis).items() if target == "sm90"] == able
    finding = _finding(diagnosis, name)
    assert (finding.state, finding.found) == ("no", "gone")
    assert finding.fix
    assert f"see {name}" in describe(diagnosis)


def test_ranks_as_processes_need_more() -> None:
    """NCCL, symmetric memory and peer access: one rank and ranks on one GPU go on without."""
    two = _facts(H200, H200)
    for torch, name in [
        (replace(two.torch, nccl=False), "NCCL"),
        (replace(two.torch, symmetric_memory="no module"), "symmetric memory"),
    ]:
        diagnosis = examine(replace(two, torch=torch))
        assert _can(diagnosis)["sm90", "processes"] == [1]
        assert _can(diagnosis)["sm90", "virtual, all GPUs"] == [2, 4, 8]
        assert _finding(diagnosis, name).state == "no"
    apart = replace(two.torch, peers=((True, False), (False, True)))
    diagnosis = examine(replace(two, torch=apart))
    assert _can(diagnosis)["sm90", "processes"] == [1]
    assert _can(diagnosis)["sm90", "virtual, all GPUs"] == []
    assert _finding(diagnosis, "peer access").found == "not between GPUs 0 and 1"


def test_links_and_switches() -> None:
    assert gpu_links(TOPOLOGY) == (("X", "NV18"), ("NV18", "X"))
    two = _facts(H200, H200)
    assert _finding(examine(two), "NVLink") == Finding("NVLink", "yes", "NV18")
    slow = examine(replace(two, links=(("X", "SYS"), ("SYS", "X"))))
    assert _finding(slow, "NVLink").state == "note"
    assert _finding(slow, "NVLink").found == "none between GPUs 0 and 1 (SYS)"
    assert _finding(examine(replace(two, links=None)), "NVLink").state == "note"
    assert _finding(examine(two), "multicast").state == "yes"
    loose = examine(replace(two, switches={"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": None}))
    assert _finding(loose, "multicast").state == "note"
    assert "NCCL_NVLS_ENABLE=0" in _finding(loose, "multicast").found


def test_an_old_driver_is_a_note() -> None:
    facts = _facts(H200)
    old = examine(replace(facts, torch=replace(facts.torch, driver_cuda=(12, 8))))
    assert _finding(old, "driver").state == "note"
    assert "580" in _finding(old, "driver").fix
    assert old.can_run_something


def test_text() -> None:
    """A line a finding, the fix below it, and the table."""
    lines = describe(examine(_facts(H200, H200))).splitlines()
    assert "yes   GPUs               NVIDIA H200 (9.0, 150 GiB), NVIDIA H200 (9.0, 150 GiB)" in lines
    row = next(line for line in lines if line.startswith("sm90, processes"))
    assert row.split()[2:6] == ["yes", "yes", "no", "no"]
    assert row.endswith("4 Hopper GPUs are needed, here: 2; 8 Hopper GPUs are needed, here: 2")
