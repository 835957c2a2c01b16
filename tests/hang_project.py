"""Steps that hang on purpose, with ranks of the real package: what the harness's hang bundle is tested on."""

from __future__ import annotations

from pathlib import Path

from tests.harness_project import Project

NUM_RANKS = 8
STALLED = 3
"""The rank that does not launch."""

# 16 experts on 8 ranks; every token goes to one expert of its own rank and to one of the next, so that each rank waits
# for all.
LAYER = """
import torch, time
import torch.distributed as dist
from harness import hang
from megamoe import MegaMoEFault, VirtualGroup
from megamoe import get_symm_buffer_for_mega_moe, launch_mega_moe, transform_weights_for_mega_moe
from megamoe.quant import quantize_weights
NUM_RANKS, STALLED, TOKENS = 8, 3, 6
torch.set_num_threads(1)

def weights():
    l1 = torch.randn(2, 256, 128, generator=torch.Generator().manual_seed(1)) / 11
    l2 = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(2)) / 11
    return transform_weights_for_mega_moe(quantize_weights(l1), quantize_weights(l2))

def open_buffers(group, timeout_s):
    return get_symm_buffer_for_mega_moe(group, 2 * NUM_RANKS, TOKENS, 2, 128, 128, timeout_s=timeout_s)

def launch(buffer):
    ids = torch.tensor([[2 * buffer.rank, 2 * ((buffer.rank + 1) % NUM_RANKS) + 1]] * TOKENS)
    x = torch.ones(TOKENS, 128, dtype=torch.bfloat16)
    buffer.fill(x, ids, torch.ones(TOKENS, 2))
    y = torch.empty(TOKENS, 128, dtype=torch.bfloat16)
    launch_mega_moe(y, *weights(), buffer)
    return y
"""

# Every rank launches once; then all but one launch again and wait for a launch that never comes.
VIRTUAL = (
    LAYER
    + """
buffers = open_buffers(VirtualGroup(NUM_RANKS), {timeout_s})
kept = [launch(buffer) for buffer in buffers.ranks]
buffers.check()
kept += [launch(buffer) for buffer in buffers.ranks if buffer.rank != STALLED]
print("launched", flush=True)

def wait_for_a_launch_that_never_ends():
    try:
        buffers.ranks[0].check()
    except MegaMoEFault as fault:
        {on_fault}
        raise

wait_for_a_launch_that_never_ends()
"""
)

PROCESSES = (
    LAYER
    + """
dist.init_process_group("gloo")
buffer = open_buffers(dist.group.WORLD, {timeout_s})
kept = [launch(buffer)]
buffer.check()
dist.barrier()

def die_after_the_peer_is_told_to_end():
    folder = os.environ["MEGAMOE_RUN_DIR"]
    peer = int(open(f"{{folder}}/rank0.pid").read().split()[0])
    while "in synchronize" not in open(f"{{folder}}/rank0.log").read():  # until it waits for this rank
        os.kill(peer, signal.SIGUSR1)  # asks for its stacks
        time.sleep(0.05)
    os.kill(peer, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

def forgets_to_launch():
    {stall}

if rank == STALLED:
    print("rank", rank, "does not launch", flush=True)
    forgets_to_launch()
kept.append(launch(buffer))
print("launched", flush=True)
buffer.check()
"""
)


# Ignores what can be ignored, and holds memory and a file in /dev/shm; its daemon does too.
STUBBORN = """
import mmap
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
memory = os.memfd_create(f"megamoe-hang-FOLDER-{rank}")
os.ftruncate(memory, 1 << 20)
mapped = mmap.mmap(memory, 1 << 20)
file = os.open(f"/dev/shm/megamoe-hang-FOLDER-{rank}", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
shared = mmap.mmap(file, 4096)
daemon(ignore=(signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
time.sleep(1000)
"""


class HangProject(Project):
    """A project without a package of its own: its steps use the checkout's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs_folder = root / "runs"

    def virtual(self, timeout_s: float = 1000, on_fault: str = "pass") -> None:
        """Phase 1: eight virtual ranks, one of which does not launch; ``on_fault``: what its process does then."""
        targets = {"host": {"ranks": {NUM_RANKS: ["virtual"]}}}
        self.phase(1, VIRTUAL.format(timeout_s=timeout_s, on_fault=on_fault), targets=targets)

    def processes(self, num_ranks: int, stall: str = "time.sleep(1000)", timeout_s: float = 1000) -> None:
        """Phase 1: a process each, all waiting for the last one, which does ``stall`` instead of launching."""
        body = PROCESSES.format(timeout_s=timeout_s, stall=stall)
        body = body.replace(
            "NUM_RANKS, STALLED, TOKENS = 8, 3,", f"NUM_RANKS, STALLED, TOKENS = {num_ranks}, {num_ranks - 1},"
        )
        self.phase(1, body, targets={"host": {"ranks": {num_ranks: ["process"]}}})

    def stubborn_processes(self) -> None:
        """Phase 1: eight processes without torch that do all they can to stay."""
        body = STUBBORN.replace("FOLDER", self.root.name)
        self.phase(1, body, targets={"host": {"ranks": {NUM_RANKS: ["process"]}}})
