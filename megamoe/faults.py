"""What a launch says when it could not finish: the fault records of the buffer, in words."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megamoe.config import MegaMoEConfig
from megamoe.layout import FAULT_RECORD, MAX_FAULT_RECORDS

if TYPE_CHECKING:
    from torch import Tensor


class FaultKind(enum.IntEnum):
    """Numbers of ``csrc/protocol/faults.hpp``."""

    INPUT = 1
    OVERFLOW = 2
    TIMEOUT = 3
    IN_USE = 4
    TOKEN_COUNT = 5


class WaitFor(enum.IntEnum):
    """Numbers of ``csrc/protocol/faults.hpp``."""

    NOTHING = 0
    ROUTES = 1
    ROUTE_CHUNKS = 2
    TABLE = 3
    ROWS = 4
    L1_TILES = 5
    EXPERT_DONE = 6


@dataclass(frozen=True)
class Fault:
    """One fault record. ``index`` counts experts, blocks, chunks or routes, as ``wait`` and ``kind`` say."""

    kind: FaultKind
    wait: WaitFor
    rank: int
    peer: int
    index: int
    epoch: int
    expected: int
    seen: int
    waited_s: float

    def describe(self, config: MegaMoEConfig) -> str:
        """One sentence: who waited, for whom, what was seen, and what that means."""
        if self.kind is FaultKind.INPUT:
            token, slot = divmod(self.index, config.num_topk)
            return (
                f"rank {self.rank}: token {token} slot {slot} of epoch {self.epoch} names expert {self.seen}, but "
                f"there are {self.expected} experts: the route was masked and the token's y row is NaN"
            )
        if self.kind is FaultKind.OVERFLOW:
            return (
                f"rank {self.rank}: epoch {self.epoch} needs {self.seen} pool rows and pool_rows allows "
                f"{self.expected}: create the buffer with a larger pool_rows"
            )
        if self.kind is FaultKind.IN_USE:
            return (
                f"rank {self.rank}: the buffer was in use by epoch {self.seen} when a second launch came: the second "
                "one did nothing and filled y with NaN; launch on one stream, or use one buffer a stream"
            )
        if self.kind is FaultKind.TOKEN_COUNT:
            return (
                f"rank {self.rank}: num_tokens on the device was {_signed(self.seen)} in epoch {self.epoch}, outside "
                f"0 to {self.expected}: it was cut to that range"
            )
        return self._describe_timeout(config)

    def _describe_timeout(self, config: MegaMoEConfig) -> str:
        waited = f"rank {self.rank} waited {self.waited_s:.1f} s"
        stamp = self.seen >> 32
        if self.wait is WaitFor.ROUTES:
            return (
                f"{waited} for rank {self.peer} to publish its routes for epoch {self.epoch} (last seen {stamp}): rank "
                f"{self.peer} did not launch, or its stream has not come to it"
            )
        if self.wait is WaitFor.EXPERT_DONE:
            return (
                f"{waited} for rank {self.peer} to finish expert {self.index} in epoch {self.epoch} (last seen "
                f"{stamp}): rank {self.peer} launched late, stopped on the way, or waits for somebody itself"
            )
        what = {
            WaitFor.ROUTE_CHUNKS: (
                f"all its route chunks to be counted ({self.seen} of {self.expected}), to list chunk {self.index}"
            ),
            WaitFor.TABLE: "its own block table",
            WaitFor.ROWS: f"pool block {self.index}: {self.seen} of {self.expected} rows arrived",
            WaitFor.L1_TILES: f"the L1 tiles of pool block {self.index}: mask {self.seen:#x} of {self.expected:#x}",
        }.get(self.wait, f"{self.wait.name.lower()} {self.index}")
        return f"{waited} in epoch {self.epoch} for {what}: a worker of this rank stopped on the way"


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class MegaMoEFault(RuntimeError):
    """Something happened on the device that made a launch's answer void, wholly or for some rows.

    Attributes:
        faults: the records found, of this rank first, then of the ranks that aborted the group.
        aborted_epoch: the epoch in which the group was aborted, or 0: then nothing needs a reset.
    """

    def __init__(self, message: str, faults: Sequence[Fault] = (), aborted_epoch: int = 0) -> None:
        super().__init__(message)
        self.faults = tuple(faults)
        self.aborted_epoch = aborted_epoch


def read_fault_records(fault_count: int, records: Tensor) -> list[Fault]:
    """Decode the complete records of a buffer.

    Args:
        fault_count: faults counted; only the first 32 have records.
        records: int32 or uint32 words [32, words of a record], on the CPU.
    """
    return decode_fault_records(fault_count, records.tolist())


def decode_fault_records(fault_count: int, records: Sequence[Sequence[int]]) -> list[Fault]:
    """`read_fault_records` of words that are Python integers."""
    faults = []
    for row in records[: min(fault_count, MAX_FAULT_RECORDS)]:
        words = {name: int(word) & 0xFFFFFFFF for name, word in zip(FAULT_RECORD.words, row, strict=True)}
        if not words["written"]:
            continue
        faults.append(
            Fault(
                kind=FaultKind(words["kind"]),
                wait=WaitFor(words["wait"]),
                rank=words["rank"],
                peer=words["peer"],
                index=words["index"],
                epoch=_u64(words, "epoch"),
                expected=_u64(words, "expected"),
                seen=_u64(words, "seen"),
                waited_s=_u64(words, "waited_us") * 1e-6,
            )
        )
    return faults


def _u64(words: dict[str, int], name: str) -> int:
    return words[f"{name}_low"] | words[f"{name}_high"] << 32
