"""What lies in slots of a tier instead of blocks, and the jobs that move it there and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from .free_runs import IntArray

Checksums = np.ndarray[tuple[int], np.dtype[Any]]
"""uint32 [slots], CRC-32 of what each slot holds; or other numbers of 32 bits."""


Name = tuple[str, int, bytes]
"""Of a block that was sealed: pool, tenant and prefix hash."""


class Tier(StrEnum):
    """Where slots are."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Slots that a move copies, and what they hold."""

    tier: Tier
    slots: IntArray
    checksums: Checksums


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """A lease's blocks in slots, in table order, and how the lease stood then."""

    tier: Tier
    slots: IntArray
    checksums: Checksums
    length: int
    position: int
    compressed_length: int
    observed_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What a lease has parked, or its checkpoint, is copied into `slots` of another tier.

    The lease need not wait: if it goes its way meanwhile, the copy is of no use and forgotten.
    """

    move_id: int
    pool: str
    lease_id: int
    is_checkpoint: bool
    parked: Parked
    tier: Tier
    slots: IntArray

    @property
    def origin(self) -> Origin:
        return Origin(self.parked.tier, self.parked.slots, self.parked.checksums)


@dataclass(frozen=True, slots=True)
class Stowing:
    """The kernel worker copies the lease's blocks into `slots`."""

    slots: IntArray


@dataclass(frozen=True, slots=True)
class Fetching:
    """The kernel worker copies what is parked into `destination`, or (`restores`) the checkpoint."""

    destination: IntArray
    restores: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Of a block that was sealed under a name: what came before it, and where it lies."""

    parent_hash: bytes
    slot: int
    checksum: int
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True, eq=False)
class CopyMove:
    """As a Move, of copies that lie in one tier: each of them is moved or forgotten by itself."""

    move_id: int
    pool: str
    tenants: Sequence[int]
    hashes: Sequence[bytes]
    copies: Sequence[Copy]
    tier: Tier
    slots: IntArray

    @property
    def names(self) -> list[Name]:
        return [(self.pool, *name) for name in zip(self.tenants, self.hashes, strict=True)]

    @property
    def origin(self) -> Origin:
        slots = np.array([copy.slot for copy in self.copies], np.int32)
        checksums = np.array([copy.checksum for copy in self.copies], np.uint32)
        return Origin(self.copies[0].tier, slots, checksums)


@dataclass(frozen=True, slots=True, eq=False)
class Spill:
    """The kernel worker copies blocks of these names into `slots`; `generations` tell whether they stay."""

    spill_id: int
    pool: str
    tenants: Sequence[int]
    hashes: Sequence[bytes]
    parents: Sequence[bytes]
    blocks: IntArray
    generations: Checksums
    slots: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """The kernel worker copies slots into `blocks`, to be cached under these names, in sequence order."""

    promotion_id: int
    pool: str
    tenant: int
    hashes: Sequence[bytes]
    parents: Sequence[bytes]
    blocks: IntArray
    slots: IntArray
    checksums: Checksums

    @property
    def names(self) -> list[Name]:
        return [(self.pool, self.tenant, prefix_hash) for prefix_hash in self.hashes]
