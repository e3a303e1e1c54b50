"""One sequence's right to blocks."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvd.policy import Policy, Streaming

from .free_runs import IntArray

FENCE_GENERATION_BITS = 24  # bits of a fence's word; the lease's id has the other 40
FIRST_CAPACITY = 4  # blocks; most leases begin with a prompt of some blocks


class LeaseState(StrEnum):
    """COMPRESSING is busy with any job: compressing, observing, being scrubbed, lending its queries."""

    ACTIVE = "active"
    COMPRESSING = "compressing"
    LOST = "lost"
    REVOKED = "revoked"
    EXPIRED = "expired"


class Ending(StrEnum):
    """What happens to a busy lease as soon as its job has ended."""

    EXPIRE = "expire"
    RECLAIM = "reclaim"


class BlockTable:
    """Block ids in slot order. Appending costs what is appended; a view taken before stays as it was."""

    __slots__ = ("_count", "_ids")

    def __init__(self, ids: IntArray) -> None:
        self._ids = ids  # perhaps shared with others: never written, since appending finds no room
        self._count = ids.size

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> IntArray:
        """A read-only view."""
        view = self._ids[: self._count]
        view.flags.writeable = False
        return view

    def append(self, ids: IntArray) -> None:
        if ids.size == 0:
            return
        count = self._count + ids.size
        if count > self._ids.size:
            grown = np.empty(max(count, 2 * self._count, FIRST_CAPACITY), np.int32)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : count] = ids
        self._count = count


@dataclass(frozen=True, slots=True)
class Scrubbing:
    """New blocks are being zeroed. If that fails the lease becomes `before` again, or is dropped."""

    foreign: IntArray
    before: "Standing | None"


@dataclass(frozen=True, slots=True)
class Standing:
    """A lease before an extend, to go back to."""

    table: IntArray
    generation: int
    length: int
    position: int


@dataclass(frozen=True, slots=True)
class Target:
    """How many tokens a compression keeps, and where: elsewhere, in place, or as they are, by block.

    The last `window` are kept whatever the votes say. `adds_scores`: queries are observed on the way.
    """

    policy: Policy
    tokens: int
    window: int
    destination_blocks: int
    by_block: bool
    in_place: bool
    adds_scores: bool


@dataclass(frozen=True, slots=True)
class Compacting:
    """The kernel worker compresses the lease into `destination`."""

    target: Target
    destination: IntArray
    scratch_lease_id: int | None


@dataclass(frozen=True, slots=True)
class Observing:
    """The kernel worker adds to the lease's running scores."""

    scratch_lease_id: int | None


@dataclass(frozen=True, slots=True)
class Lending:
    """A scratch lease whose queries a job reads."""

    borrower_lease_id: int


Job = Scrubbing | Compacting | Observing | Lending


@dataclass(eq=False)
class Lease:
    """Slots below `length` are in use; `position` is the next token's true position.

    Slots below `compressed_length` have explicit positions, those below `observed_length` running
    scores. The first `sealed_blocks` table entries are shared and immutable.
    """

    lease_id: int
    pool: str
    session_id: str
    tenant: str
    policy: Policy
    scratch: bool
    block_size: int
    created_ns: int
    blocks: BlockTable
    length: int = 0
    position: int = 0
    sealed_blocks: int = 0
    compressed_length: int = 0
    observed_length: int = 0
    generation: int = 1
    blocks_saved: int = 0
    fate: LeaseState = LeaseState.ACTIVE
    job: Job | None = None
    ending: Ending | None = None
    fence_slot: int = 0

    @property
    def state(self) -> LeaseState:
        return LeaseState.COMPRESSING if self.job is not None else self.fate

    @property
    def fence(self) -> int:
        """What its fence shows: 0, or by which id and generation its table may be used."""
        moving = isinstance(self.job, Compacting) and self.job.target.in_place
        if moving or self.ending is not None or self.fate is not LeaseState.ACTIVE:
            return 0
        return self.lease_id << FENCE_GENERATION_BITS | self.generation & (1 << FENCE_GENERATION_BITS) - 1

    @property
    def table(self) -> IntArray:
        """Block ids in slot order, read-only."""
        return self.blocks.ids

    @property
    def writable(self) -> IntArray:
        """Table entries that are this lease's alone."""
        return self.table[self.sealed_blocks :]

    @property
    def sealed(self) -> IntArray:
        return self.table[: self.sealed_blocks]

    @property
    def capacity(self) -> int:
        """Slots of the table."""
        return len(self.blocks) * self.block_size

    @property
    def used_blocks(self) -> int:
        """Table entries that hold tokens."""
        return -(-self.length // self.block_size)

    @property
    def sink_block_count(self) -> int:
        """Table entries for sink tokens, written or not."""
        return -(-self.policy.sinks // self.block_size)

    @property
    def sink_blocks(self) -> int:
        """Table entries in use that hold sink tokens."""
        return min(self.sink_block_count, self.used_blocks)

    @property
    def streams(self) -> bool:
        return isinstance(self.policy, Streaming)
