"""One sequence's right to blocks."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from kvd.policy import Policy, Streaming

from .free_runs import NO_BLOCKS, IntArray, Run, ids_of, runs_of
from .parked import Fetching, Parked, Stowing, Tier

FENCE_GENERATION_BITS = 24  # bits of a fence's word; the lease's id has the other 40


class LeaseState(StrEnum):
    """COMPRESSING is busy with any job: compressing, observing, being scrubbed, lending its queries.

    SHELVED has no session: it was published and waits to be adopted. RESTING is left alone by its worker.
    SUSPENDED has no blocks: what they held is parked.
    """

    ACTIVE = "active"
    COMPRESSING = "compressing"
    LOST = "lost"
    REVOKED = "revoked"
    EXPIRED = "expired"
    SHELVED = "shelved"
    RESTING = "resting"
    SUSPENDED = "suspended"


LIVE = (LeaseState.ACTIVE, LeaseState.RESTING, LeaseState.SUSPENDED)
"""What a lease is that its worker can go on with, one way or another."""


def with_sinks(floor: int, policy: Policy) -> int:
    """A floor that keeps the policy's sinks; 0, not to be pruned, stays 0."""
    return max(floor, policy.sinks) if floor else 0


class Ending(StrEnum):
    """What happens to a busy lease as soon as its job has ended."""

    EXPIRE = "expire"
    REVOKE = "revoke"
    RECLAIM = "reclaim"


class BlockTable:
    """Block ids in slot order, as maximal runs: of those most leases have a few, however long they are.

    Appending costs what is appended. The ids are laid out whenever somebody asks for them, in any thread: the
    runs are copied at once, and a run is appended at once.
    """

    __slots__ = ("_count", "_runs")

    def __init__(self, ids: IntArray) -> None:
        self._count = ids.size
        runs = chain.from_iterable(runs_of(ids)) if ids.size else ()
        self._runs = array("i", runs)  # first, count, first, count, ...

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> IntArray:
        """Read-only; stays as it is when the table grows."""
        ids = ids_of(self.runs())
        ids.flags.writeable = False
        return ids

    def packed(self) -> bytes:
        """The runs as int32: first block and number of blocks of each."""
        return self._runs.tobytes()

    def runs(self, first_entry: int = 0) -> list[Run]:
        """The blocks from table entry `first_entry` on, as maximal runs in slot order."""
        if not first_entry:
            flat = self._runs[:]
            return list(zip(flat[::2], flat[1::2], strict=True))
        flat, left = self._runs, self._count - first_entry
        tail: list[Run] = []
        for index in range(len(flat) - 2, -1, -2):
            if left <= 0:
                break
            first, count = flat[index], flat[index + 1]
            taken = min(left, count)
            tail.append((first + count - taken, taken))
            left -= taken
        tail.reverse()
        return tail

    def append(self, runs: list[Run]) -> None:
        flat = self._runs
        for first, count in runs:
            if flat and flat[-2] + flat[-1] == first:
                flat[-1] += count
            else:
                flat.extend((first, count))
            self._count += count


@dataclass(frozen=True, slots=True)
class Scrubbing:
    """New blocks are being zeroed, then a shared one is copied into one of them: from where, to where.

    If that fails the lease becomes `before` again, or is dropped.
    """

    foreign: IntArray
    before: "Standing | None"
    copy: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """A lease before an extend, to go back to. `sealed_blocks` None: as many as it has."""

    table: IntArray
    generation: int
    length: int
    position: int
    sealed_blocks: int | None = None


class Mark(NamedTuple):
    """The same, noted without laying out the table: it is the first `block_count` entries of `blocks`."""

    blocks: BlockTable
    block_count: int
    generation: int
    length: int
    position: int
    sealed_blocks: int

    def standing(self) -> Standing:
        """Before anything but `append` changes `blocks`."""
        table = self.blocks.ids[: self.block_count]
        return Standing(table, self.generation, self.length, self.position, self.sealed_blocks)


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
    """The kernel worker compresses the lease into `destination`; `slots` get a checkpoint before."""

    target: Target
    destination: IntArray
    scratch_lease_id: int | None
    slots: IntArray = field(default_factory=lambda: NO_BLOCKS)


@dataclass(frozen=True, slots=True)
class Observing:
    """The kernel worker adds to the lease's running scores."""

    scratch_lease_id: int | None


@dataclass(frozen=True, slots=True)
class Lending:
    """A scratch lease whose queries a job reads."""

    borrower_lease_id: int


@dataclass(frozen=True, slots=True)
class Shelved:
    """Under which key it waits to be adopted, by whom (any session of the tenant if empty), until when."""

    key: str
    to_session: str
    expires_ns: int


Job = Scrubbing | Compacting | Observing | Lending | Stowing | Fetching


@dataclass(eq=False, slots=True)
class Lease:
    """Slots below `length` are in use; `position` is the next token's true position.

    Slots below `compressed_length` have explicit positions, those below `observed_length` running
    scores. The first `sealed_blocks` table entries are shared and immutable; the last of them may be half
    full, of a fork: see `shares_tail`.
    When blocks are short, it may be pruned to `floor` tokens (0: not at all), while it rests to
    `resting_floor`; `gave_blocks` are what it gave then.
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
    shelved: Shelved | None = None
    floor: int = 0
    resting_floor: int = 0
    gave_blocks: int = 0
    parked: Parked | None = None
    checkpoint: Parked | None = None

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
    def shares_tail(self) -> bool:
        """Whether the block that the next token belongs into is shared: it has to be replaced first."""
        return self.sealed_blocks * self.block_size > self.length

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

    def slots(self) -> list[tuple[Tier, IntArray]]:
        """What it has in tiers, and what a job under way has for it."""
        kept = [each for each in (self.parked, self.checkpoint) if each is not None]
        found = [(each.tier, each.slots) for each in kept]
        if isinstance(self.job, Stowing | Compacting):
            found.append((Tier.HOST, self.job.slots))
        return found

    @property
    def parked_blocks(self) -> int:
        """Blocks that take slots of tiers."""
        return sum([slots.size for _, slots in self.slots()])

    @property
    def streams(self) -> bool:
        return isinstance(self.policy, Streaming)
