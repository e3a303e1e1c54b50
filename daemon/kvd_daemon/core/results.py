"""What the core is asked with and what it answers. Plain values; the engine acts on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.policy import Dense, Policy

from .free_runs import IntArray, Run
from .lease import Lease
from .parked import Parked
from .pins import Pin


@dataclass(slots=True)  # not frozen, nor is LeaseWish: making a frozen one takes as long as ten checks
class Progress:
    """A worker's word on how far a lease is filled: slots in use, and the next token's true position."""

    lease_id: int
    generation: int
    length: int
    position: int


@dataclass(slots=True)
class LeaseWish:
    """One sequence to be: room for `tokens` (a shared prefix included).

    A soft pin of `pin_id` becomes the lease's prefix; `prefix_hashes` are its hashes then, or none. The lease
    may be pruned to `floor` tokens when blocks are short (0: not at all).
    """

    tokens: int
    policy: Policy = field(default_factory=Dense)
    prefix_hashes: Sequence[bytes] = ()
    scratch: bool = False
    pin_id: int = 0
    floor: int = 0


@dataclass(frozen=True)
class Offer:
    """How a lease is published: under which key, for how long, for which session alone ("": for any)."""

    key: str
    ttl_ns: int
    to_session: str = ""


@dataclass(frozen=True)
class QueryShape:
    """The queries of a lease's last `tokens` tokens, in the blocks of a scratch lease.

    With `scratch_lease_id` the scratch lease is busy as long as the job that reads it.
    """

    tokens: int
    query_heads: int
    scratch_lease_id: int | None = None


class Change(NamedTuple):
    """A lease whose table changed behind its first `kept_blocks` entries.

    Of the tokens an extend was asked for, the first `skip_after` have slots, then
    `lease.position - progress.position` have none, the others have slots again, from slot
    `lease.length` on.
    """

    lease: Lease
    kept_blocks: int
    skip_after: int = 0


class Matched(NamedTuple):
    """So many leading hashes were found; a pin holds their blocks, if there are any."""

    pin: Pin | None
    found: int


class Granted(NamedTuple):
    """New leases in the order of the wishes. With `scrub` runs they are busy until `scrubbed`."""

    leases: list[Lease]
    scrub: list[Run]


class Extended(NamedTuple):
    """Grown leases in the order of the items. With `scrub` runs or `copies` they are busy until `scrubbed`.

    Copies are of blocks, from where to where, after the scrub.
    """

    leases: list[Change]
    scrub: list[Run]
    copies: Sequence[tuple[int, int]] = ()


class Forked(NamedTuple):
    """A lease that shares all it has now, and those it shares it with."""

    parent: Lease
    children: list[Lease]


@dataclass(frozen=True)
class Unchanged:
    """The lease has no more tokens than its policy keeps."""

    lease: Lease


@dataclass(frozen=True)
class CompressPlan:
    """One job for the kernel worker. The lease is busy until `finish_compress` or `abort_compress`.

    `source` are the blocks in use, in table order. `destination` gets the kept tokens: other blocks, or the
    leading ones of `source` when `in_place`, or none when `by_block` (whole blocks leave the table).
    `window` last tokens and the policy's sinks are always kept. `scrub` runs are part of `destination`
    and hold another tenant's bytes: zero them first. If there are `slots` (of the host tier, one for each of
    `source`), copy `source` there before anything else.
    """

    lease: Lease
    policy: Policy
    source: IntArray
    destination: IntArray
    in_place: bool
    by_block: bool
    target_tokens: int
    window: int
    scrub: list[Run]
    slots: IntArray


@dataclass(frozen=True)
class ObservePlan:
    """One job for the kernel worker: add attention of the last `tokens` tokens' queries to the scores.

    Slots from `observed_length` on have no score yet. Busy until `finish_observe` or `abort_compress`.
    """

    lease: Lease
    source: IntArray
    tokens: int
    observed_length: int


@dataclass(frozen=True)
class StowPlan:
    """One job for the kernel worker: copy blocks `source` into `slots` of the host tier, one each.

    The lease is busy until `finish_suspend` or `abort_suspend`.
    """

    lease: Lease
    source: IntArray
    slots: IntArray


@dataclass(frozen=True)
class FetchPlan:
    """One job for the kernel worker: copy what is parked into blocks `destination`, one for each slot.

    `parked` is a suspended lease's bytes, or the checkpoint that it goes back to.

    The lease is busy until `finish_fetch` or `abort_fetch`.
    """

    lease: Lease
    parked: Parked
    destination: IntArray


class Fetched(NamedTuple):
    """A lease that is back, or back at its checkpoint: so many newer tokens it has lost by that."""

    lease: Lease
    dropped_tokens: int


@dataclass(frozen=True)
class Compressed:
    """What a compression did. `lease` may be gone by now if its session ended meanwhile."""

    lease: Lease
    tokens_before: int
    tokens_kept: int
    blocks_before: int
    blocks_after: int
    out_of_place: bool


class Reclaimed(NamedTuple):
    """Leases that ended and the blocks they gave back; `deferred` ones end with their running job."""

    leases: list[Lease]
    block_count: int
    deferred: list[Lease]


@dataclass(frozen=True)
class Revoked:
    """A lease taken away, and how many of its blocks wait for the proof that nobody writes to them.

    `deferred`: a job is under way; the lease is taken away, and its blocks wait, as soon as that has ended.
    """

    lease: Lease
    quarantined_count: int
    deferred: bool
