"""What this machine has, what it can run, and how to get what is missing. Needs neither a GPU nor a torch with CUDA.

`look` gathers facts and judges nothing; `examine` judges them and touches nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megamoe import jit
from megamoe.jit import nvcc, nvrtc

RANKS = (1, 2, 4, 8)
HOPPER = (9, 0)
PROBE_SECONDS = 120.0
KERNEL_CUDA = (13, 0)
"""The CUDA release that NVRTC is pinned to."""
SWITCHES = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""Multicast stays off (DESIGN.md)."""

# In a process of its own: a driver that hangs must not hang the doctor.
_PROBE = """
import ctypes, json, torch
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "peers": [], "driver_cuda": None}
try:
    version = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts["driver_cuda"] = [version.value // 1000, version.value % 1000 // 10]
except OSError:
    pass
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
for i in range(count):
    p = torch.cuda.get_device_properties(i)
    facts["gpus"].append([p.name, [p.major, p.minor], p.total_memory])
facts["peers"] = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
import torch.distributed as dist
facts["gloo"] = dist.is_available() and dist.is_gloo_available()
facts["nccl"] = dist.is_available() and dist.is_nccl_available()
try:
    import torch.distributed._symmetric_memory as s
    facts["symmetric_memory"] = "" if hasattr(s, "rendezvous") and facts["cuda"] else "this torch is built without CUDA"
except ImportError as error:
    facts["symmetric_memory"] = str(error)
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch names it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Found:
    """Something that is there, in words, or why it is not; one of the two is empty."""

    what: str = ""
    problem: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """What torch and the driver say. ``problem``: why they could not be asked; the rest then says nothing."""

    version: str = ""
    cuda: str | None = None
    driver_cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    gloo: bool = False
    nccl: bool = False
    symmetric_memory: str = ""
    """Why torch's symmetric memory is not there; empty where it is."""
    problem: str = ""


@dataclass(frozen=True)
class Facts:
    """All that is looked at. ``links``: what ``nvidia-smi topo -m`` shows between GPUs, None where it says nothing."""

    python: str
    torch: TorchFacts
    compiler: Found
    cccl: Found
    nvcc: Found
    nvrtc: Found
    bindings: Found
    driver: Found
    cache: Found
    links: tuple[tuple[str, ...], ...] | None = None
    switches: dict[str, str | None] = field(default_factory=dict)
    cores: int = 1
    memory_bytes: int = 0
    kernel_compiler: str = "nvrtc"


@dataclass(frozen=True)
class Finding:
    """One line: ``state`` is yes, no or note; ``fix`` says how to get what is missing."""

    name: str
    state: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Capability:
    """Whether ranks of a kind can run on a target: ``why_not`` is empty where they can."""

    target: str
    kind: str
    ranks: int
    why_not: str


@dataclass(frozen=True)
class Diagnosis:
    """What `examine` has found."""

    findings: tuple[Finding, ...]
    capabilities: tuple[Capability, ...]

    @property
    def can_run_something(self) -> bool:
        return any(not capability.why_not for capability in self.capabilities)


# --- looking -----------------------------------------------------------------------------------------------------


def ask_torch(command: Sequence[str] = (sys.executable, "-c", _PROBE), seconds: float = PROBE_SECONDS) -> TorchFacts:
    """What the probe prints, or why it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"torch did not answer in {seconds:g} s when asked for GPUs")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return TorchFacts(problem=f"torch could not be asked: {last}")
    said = json.loads(done.stdout.splitlines()[-1])
    driver = said["driver_cuda"]
    return TorchFacts(
        version=said["torch"],
        cuda=said["cuda"],
        driver_cuda=(driver[0], driver[1]) if driver else None,
        gpus=tuple(Gpu(name, (major, minor), memory) for name, (major, minor), memory in said["gpus"]),
        peers=tuple(tuple(row) for row in said["peers"]),
        gloo=said["gloo"],
        nccl=said["nccl"],
        symmetric_memory=said["symmetric_memory"],
    )


def _try(look: Callable[[], str]) -> Found:
    try:
        return Found(what=look())
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        return Found(problem=str(error))


def _cxx() -> str:
    """The C++ compiler's own words, after it has built a C++20 program."""
    words = shlex.split(os.environ.get("CXX", "g++"))
    if not words or shutil.which(words[0]) is None:
        raise FileNotFoundError(f"no {words[0] if words else 'compiler'} on PATH")
    with tempfile.TemporaryDirectory() as folder:
        source = "#include <atomic>\n#include <concepts>\nint main() { return std::integral<int> ? 0 : 1; }\n"
        command = [*words, "-std=c++20", "-x", "c++", "-", "-o", f"{folder}/probe"]
        built = subprocess.run(command, input=source, capture_output=True, text=True)
    if built.returncode != 0:
        raise RuntimeError(f"{words[0]} does not build a C++20 program: {(built.stderr.strip() or 'no output')[:200]}")
    named = subprocess.run([*words, "--version"], capture_output=True, text=True).stdout.splitlines()
    return named[0] if named else words[0]


def _nvcc() -> str:
    path, said = nvcc.identity()
    release = re.search(r"release [0-9.]+", said)
    return f"{release[0] if release else 'unknown release'}, {path}"


def _nvrtc() -> str:
    path, version, *_ = nvrtc.identity()
    return f"{version}, {path}"


def _bindings() -> str:
    from cuda.bindings import driver

    return f"cuda-bindings {importlib.metadata.version('cuda-bindings')}, {driver.__name__}"


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: the NVIDIA driver is not loaded")
    return " ".join(path.read_text().splitlines()[0].split())


def _cache() -> str:
    """The cache's folder and size. It is not made."""
    folder = jit.cache_dir()
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise OSError(f"{folder} cannot be written ({above} is no folder that you may write)")
    files = [path for path in (folder / "entries").rglob("*") if path.is_file()]
    num_entries = sum(path.name == "manifest.json" for path in files)
    size = sum(path.stat().st_size for path in files) / 2**20
    return f"{folder}: {num_entries} builds, {size:.0f} MiB of at most {jit.cache_max_bytes() / 2**20:.0f}"


def gpu_links(text: str) -> tuple[tuple[str, ...], ...]:
    """The part of ``nvidia-smi topo -m`` that is about GPUs: a row a GPU of words like ``X``, ``NV18``, ``SYS``."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return tuple(tuple(row[1 : 1 + len(rows)]) for row in rows)


def _links() -> tuple[tuple[str, ...], ...] | None:
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return gpu_links(done.stdout) if done.returncode == 0 else None


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def look() -> Facts:
    """Ask the machine, in some seconds: torch is imported in a process of its own."""
    return Facts(
        python=platform.python_version(),
        torch=ask_torch(),
        compiler=_try(_cxx),
        cccl=_try(lambda: str(jit.cccl_include_dir())),
        nvcc=_try(_nvcc),
        nvrtc=_try(_nvrtc),
        bindings=_try(_bindings),
        driver=_try(_driver),
        cache=_try(_cache),
        links=_links(),
        switches={name: os.environ.get(name) for name in SWITCHES},
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        kernel_compiler=os.environ.get("MEGAMOE_COMPILER") or "nvrtc",
    )


# --- judging -----------------------------------------------------------------------------------------------------


def _finding(name: str, found: Found, fix: str, otherwise: str = "no") -> Finding:
    return Finding(name, "yes", found.what) if found.what else Finding(name, otherwise, found.problem, fix)


def _hoppers(facts: Facts) -> list[int]:
    return [i for i, gpu in enumerate(facts.torch.gpus) if gpu.capability == HOPPER]


def _torch_finding(torch: TorchFacts) -> Finding:
    if torch.problem:
        return Finding("torch", "no", torch.problem, "pip install 'torch>=2.11'; if it hangs, look at `nvidia-smi`")
    return Finding("torch", "yes", f"{torch.version}, " + (f"CUDA {torch.cuda}" if torch.cuda else "without CUDA"))


def _gpu_finding(facts: Facts) -> Finding:
    torch = facts.torch
    names = [
        f"{gpu.name} ({gpu.capability[0]}.{gpu.capability[1]}, {gpu.memory_bytes / 2**30:.0f} GiB)"
        for gpu in torch.gpus
    ]
    if not names:
        if torch.problem:
            why, fix = "torch could not be asked", "see torch"
        elif torch.cuda is None:
            why, fix = "this torch is built without CUDA", "on a GPU machine: pip install a torch built for CUDA 13"
        else:
            why, fix = "torch sees none", "a machine with an H100 or H200; CUDA_VISIBLE_DEVICES must not hide it"
        return Finding("GPUs", "no", why, fix)
    if not _hoppers(facts):
        return Finding(
            "GPUs", "no", ", ".join(names), "target sm90 needs compute capability 9.0: an H100, H200 or GH200"
        )
    return Finding("GPUs", "yes", ", ".join(names))


def _driver_finding(facts: Facts) -> Finding:
    cuda = facts.torch.driver_cuda
    if facts.driver.what and cuda and cuda < KERNEL_CUDA:
        fix = "kernels are compiled with CUDA 13.0: if they do not load, install driver 580 or newer"
        return Finding("driver", "note", f"{facts.driver.what}; CUDA {cuda[0]}.{cuda[1]}", fix)
    said = f"; CUDA {cuda[0]}.{cuda[1]}" if cuda else ""
    found = Found(facts.driver.what + said) if facts.driver.what else facts.driver
    return _finding("driver", found, "install the NVIDIA driver, 580 or newer, or start the container with --gpus all")


def _missing_peers(facts: Facts) -> list[str]:
    hoppers = _hoppers(facts)
    return [f"{i} and {j}" for i in hoppers for j in hoppers if i < j and not facts.torch.peers[i][j]]


def _link_findings(facts: Facts) -> Iterator[Finding]:
    hoppers = _hoppers(facts)
    if len(hoppers) < 2:
        why = "needs 2 Hopper GPUs" if len(facts.torch.gpus) != 1 else "there is one GPU"
        yield Finding("peer access", "note", why, "ranks on one GPU need none")
        return
    missing = _missing_peers(facts)
    if missing:
        fix = "one host with NVLink between its GPUs; in a virtual machine the GPUs must be passed through together"
        yield Finding("peer access", "no", f"not between GPUs {', '.join(missing)}", fix)
    else:
        yield Finding("peer access", "yes", f"between all {len(hoppers)} Hopper GPUs")
    if facts.links is None:
        yield Finding("NVLink", "note", "`nvidia-smi topo -m` does not answer", "install nvidia-smi to see the links")
        return
    pairs = {(i, j): facts.links[i][j] for i in hoppers for j in hoppers if i < j and j < len(facts.links)}
    without = [f"{i} and {j} ({how})" for (i, j), how in pairs.items() if not how.startswith("NV")]
    if without:
        yield Finding("NVLink", "note", f"none between GPUs {', '.join(without)}", "it works, slowly: rows cross PCIe")
    else:
        yield Finding("NVLink", "yes", ", ".join(sorted(set(pairs.values()))))


def _switch_finding(facts: Facts) -> Finding:
    wrong = [f"{name}={value}" for name, value in SWITCHES.items() if facts.switches.get(name) != value]
    if not wrong:
        return Finding("multicast", "yes", "off: " + ", ".join(f"{name}={value}" for name, value in SWITCHES.items()))
    fix = "the harness sets them for its steps; with several GPUs set them in your own program before it imports torch"
    return Finding("multicast", "note", f"may be on: this shell has not {', '.join(wrong)}", fix)


def _kernel_compiler(facts: Facts) -> Found:
    if facts.kernel_compiler not in ("nvrtc", "nvcc"):
        return Found(problem=f"MEGAMOE_COMPILER is {facts.kernel_compiler!r}, expected nvrtc or nvcc")
    return facts.nvrtc if facts.kernel_compiler == "nvrtc" else facts.nvcc


def _findings(facts: Facts) -> Iterator[Finding]:
    torch, chosen = facts.torch, facts.kernel_compiler
    yield Finding("Python", "yes", facts.python)
    yield _torch_finding(torch)
    yield _finding("C++ compiler", facts.compiler, "apt-get install g++ (11 or newer), or name one with CXX=")
    yield _finding("libcu++", facts.cccl, "pip install 'nvidia-cuda-cccl==13.0.*'")
    nvrtc_fix = "pip install 'nvidia-cuda-nvrtc==13.0.*' 'cuda-bindings==13.0.*'"
    yield _finding("NVRTC", facts.nvrtc, nvrtc_fix, "no" if chosen == "nvrtc" else "note")
    nvcc_fix = "a CUDA 13 toolkit" if chosen == "nvcc" else "not needed: kernels are compiled with NVRTC"
    yield _finding("nvcc", facts.nvcc, nvcc_fix, "no" if chosen == "nvcc" else "note")
    yield _finding("CUDA bindings", facts.bindings, "pip install 'cuda-bindings==13.0.*'")
    yield _driver_finding(facts)
    yield _gpu_finding(facts)
    yield from _link_findings(facts)
    nccl = Found("yes") if torch.nccl else Found(problem="this torch has no NCCL")
    yield _finding("NCCL", nccl, "for ranks as processes on GPUs: a torch built for CUDA")
    memory = Found("torch.distributed._symmetric_memory") if not torch.symmetric_memory and not torch.problem else None
    missing = Found(problem=torch.symmetric_memory or "torch could not be asked")
    yield _finding(
        "symmetric memory", memory or missing, "for ranks as processes on GPUs: torch 2.11 or newer for CUDA"
    )
    yield _switch_finding(facts)
    yield _finding("compilation cache", facts.cache, "set MEGAMOE_CACHE_DIR to a folder that you may write")
    yield Finding("machine", "yes", f"{facts.cores} cores, {facts.memory_bytes / 2**30:.0f} GiB")


def _first(*reasons: str) -> str:
    return next((reason for reason in reasons if reason), "")


def _host_why_not(facts: Facts, kind: str) -> str:
    return _first(
        facts.torch.problem and "see torch",
        facts.compiler.problem and "see C++ compiler",
        facts.cccl.problem and "see libcu++",
        facts.cache.problem and "see compilation cache",
        "this torch has no gloo" if kind == "processes" and not facts.torch.gloo else "",
    )


def _sm90_why_not(facts: Facts, kind: str, ranks: int) -> str:
    hoppers = len(_hoppers(facts))
    needed = {"processes": ranks, "virtual, one GPU": 1, "virtual, all GPUs": 2}[kind]
    several = kind != "virtual, one GPU" and needed > 1
    return _first(
        facts.torch.problem and "see torch",
        "" if hoppers else "no Hopper GPU",
        f"{needed} Hopper GPUs are needed, here: {hoppers}" if hoppers < needed else "",
        facts.driver.problem and "see driver",
        facts.cccl.problem and "see libcu++",
        _kernel_compiler(facts).problem and f"see {'nvcc' if facts.kernel_compiler == 'nvcc' else 'NVRTC'}",
        facts.bindings.problem and "see CUDA bindings",
        facts.cache.problem and "see compilation cache",
        "see peer access" if several and _missing_peers(facts) else "",
        "see NCCL" if kind == "processes" and several and not facts.torch.nccl else "",
        "see symmetric memory" if kind == "processes" and several and facts.torch.symmetric_memory else "",
    )


def examine(facts: Facts) -> Diagnosis:
    """Judge facts: what is there, and for targets, kinds of ranks and 1, 2, 4 and 8 ranks what can run."""
    capabilities = [
        Capability("host", kind, n, _host_why_not(facts, kind)) for kind in ("processes", "virtual") for n in RANKS
    ]
    capabilities += [
        Capability("sm90", kind, n, _sm90_why_not(facts, kind, n))
        for kind in ("processes", "virtual, one GPU", "virtual, all GPUs")
        for n in RANKS
        if kind != "virtual, all GPUs" or n > 1
    ]
    return Diagnosis(tuple(_findings(facts)), tuple(capabilities))


def describe(diagnosis: Diagnosis) -> str:
    """The diagnosis as text: a line a finding, then a table of what can run."""
    width = max(len(finding.name) for finding in diagnosis.findings)
    lines = []
    for finding in diagnosis.findings:
        lines.append(f"{finding.state:4}  {finding.name:{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':{width + 8}}-> {finding.fix}")
    lines += ["", "ranks on this machine".ljust(30) + "".join(f"{ranks:>5}" for ranks in RANKS)]
    for target, kind in dict.fromkeys((c.target, c.kind) for c in diagnosis.capabilities):
        of_ranks = {c.ranks: c.why_not for c in diagnosis.capabilities if (c.target, c.kind) == (target, kind)}
        cells = ["-" if ranks not in of_ranks else "no" if of_ranks[ranks] else "yes" for ranks in RANKS]
        reasons = "; ".join(dict.fromkeys(reason for reason in of_ranks.values() if reason))
        row = f"{target}, {kind}".ljust(30) + "".join(f"{cell:>5}" for cell in cells)
        lines.append(row + (f"  {reasons}" if reasons else ""))
    return "\n".join(lines)
