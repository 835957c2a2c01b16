"""Saves what launches leave, for `megamoe inspect` and `megamoe diff`: by itself at the first comparison that fails."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from harness.hang import HANG_FOLDER, REQUEST, answer_file
from harness.rank import DUMP_VIEWS_VARIABLE, launch_file, responder_file, write_whole
from megamoe import L1Weights, L2Weights, MegaMoEConfig, SymmBuffer
from megamoe.inspect import bytes_of, image_of
from megamoe.inspect.dump import MAX_DATA_BYTES, SUFFIX, Extra, LaunchFacts, write_dump
from megamoe.inspect.image import Image
from megamoe.inspect.tensors import as_extra
from megamoe.layout import Region

VIEWS_FOLDER = "views"
POLL_S = 0.25
STAGING_BYTES = 1 << 20
WEIGHTS = ("l1_weight", "l1_sf", "l2_weight", "l2_sf")


def run_folder() -> Path | None:
    """Where a step's files go; None in a process that no harness started."""
    folder = os.environ.get("MEGAMOE_RUN_DIR")
    return Path(folder) if folder is not None else None


def process_rank() -> int:
    """By which the files of this process are named; 0 for the one that holds all virtual ranks."""
    return int(os.environ.get("RANK", "0"))


def note_launch(config: MegaMoEConfig, facts: LaunchFacts) -> None:
    """Tell whoever explains a hang what the launch that comes next was asked to do."""
    folder = run_folder()
    if folder is not None:
        said = {"config": asdict(config), "facts": asdict(facts)}
        write_whole(launch_file(folder, process_rank()), json.dumps(said))


@dataclass
class ViewDumps:
    """What of a step's launches is saved: the first that fails; all, where that was asked for."""

    saved: int = 0
    _everything: bool = field(default_factory=lambda: DUMP_VIEWS_VARIABLE in os.environ)

    @property
    def may_save(self) -> bool:
        """The same on every process of a step, but for those that compare nothing."""
        return run_folder() is not None and (self._everything or self.saved == 0)

    def wants(self, failed: bool) -> bool:
        """Whether a launch is saved, given that `may_save`; ``failed`` on any rank."""
        return failed or self._everything

    def save(
        self,
        facts: LaunchFacts,
        buffers: Mapping[int, SymmBuffer],
        y: Mapping[int, Tensor],
        weights: Mapping[int, tuple[L1Weights, L2Weights]],
    ) -> list[str]:
        """Save the buffers of the ranks here with y and, where they are small, the weights. Returns the paths.

        Of larger weights the dump has checksums: the phases' weights can be made again.
        """
        folder = run_folder()
        assert folder is not None  # may_save saw to it
        self.saved += 1
        name = "".join(letter if letter.isalnum() or letter in "=," else "_" for letter in facts.case).strip("_")
        place = folder / VIEWS_FOLDER / (name if self.saved == 1 else f"{name}.{self.saved}")
        place.mkdir(parents=True, exist_ok=True)
        paths = []
        for rank, buffer in buffers.items():
            extras, checksums = {"y": as_extra(y[rank])}, {}
            tensors = dict(zip(WEIGHTS, (*weights[rank][0], *weights[rank][1]), strict=True))
            if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) <= MAX_DATA_BYTES:
                extras |= {name: as_extra(tensor) for name, tensor in tensors.items()}
            else:
                checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
            path = place / f"rank{rank}-views{SUFFIX}"
            write_dump(path, image_of(buffer), facts, extras, checksums)
            paths.append(str(path))
        return paths


def checksum(tensor: Tensor) -> int:
    """crc32 of a tensor's bytes."""
    extra: Extra = as_extra(tensor)
    return zlib.crc32(extra.content)


# --- buffers on a GPU, from inside a rank that hangs ------------------------------------------------------------------


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Responder:
    """A thread that saves this process's buffers on GPUs when the supervisor asks for it (harness/hang.py), through a
    stream of its own: a kernel that never ends does not keep a copy engine busy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffers: list[weakref.ref[SymmBuffer]] = []
        self._staging = _pinned(STAGING_BYTES)  # now: not while a kernel hangs
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        threading.Thread(target=self._serve, name="megamoe-responder", daemon=True).start()
        write_whole(responder_file(folder, process_rank()), "")

    def add(self, buffers: Sequence[SymmBuffer]) -> None:
        """Answer for these too, as long as somebody else keeps them."""
        for buffer in buffers:
            self._buffers.append(weakref.ref(buffer))
            if buffer.device not in self._streams:
                self._streams[buffer.device] = torch.cuda.Stream(buffer.device)

    def _serve(self) -> None:
        request = self._folder / HANG_FOLDER / REQUEST
        while not request.exists():
            time.sleep(POLL_S)
        until = time.monotonic() + float(request.read_text())
        try:
            answer = self._save(until)
        except (OSError, RuntimeError, ValueError) as error:  # of a file, of CUDA, of a closed buffer
            answer = f"could not save its buffers: {error}"
        write_whole(answer_file(self._folder, process_rank()), answer)

    def _save(self, until: float) -> str:
        saved = 0
        for number, reference in enumerate(self._buffers):
            buffer = reference()
            if buffer is None or buffer.is_closed:
                continue
            image = self._image(buffer, until)
            if image.is_troubled or saved == 0:
                write_dump(self._folder / HANG_FOLDER / f"rank{buffer.rank}-device{number}{SUFFIX}", image)
                saved += 1
        return f"saved {saved} buffers"

    def _image(self, buffer: SymmBuffer, until: float) -> Image:
        memory, stream = buffer.memory_of(), self._streams[buffer.device]

        def read(region: Region, first: int, size: int) -> bytes:
            start, content = region.offset + first, bytearray()
            while len(content) < size:
                part = memory[start + len(content) : start + min(size, len(content) + self._staging.numel())]
                with torch.cuda.stream(stream):
                    self._staging[: part.numel()].copy_(part, non_blocking=True)
                    copied = torch.cuda.Event()
                    copied.record(stream)
                while not copied.query():
                    if time.monotonic() > until:
                        raise TimeoutError(f"{region.name}: a copy on a stream of its own did not end in time")
                    time.sleep(0.001)
                content += bytes_of(self._staging[: part.numel()])
            return bytes(content)

        return Image(buffer.config, buffer.rank, "inside the rank, by a side stream", read)


_responder: Responder | None = None


def answer_for(buffers: Sequence[SymmBuffer]) -> None:
    """Have this process's thread answer for these buffers, where they are on GPUs and a harness may ask."""
    global _responder
    folder = run_folder()
    if folder is None or buffers[0].device.type != "cuda":
        return
    _responder = _responder or Responder(folder)
    _responder.add(buffers)
