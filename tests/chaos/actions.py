"""What an inference worker does with its leases, one method each. Whatever comes back from somewhere has its
bytes looked at there and then.

A call that breaks off may have been carried out. Before each of those that put a lease away (on the shelf,
to rest, into a tier) the sequence says so; what fetches it settles which it was.
"""

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import kvd_client
from kvd.errors import (
    ClosedError,
    ExhaustedError,
    InvalidArgumentError,
    LeaseBusyError,
    LeaseSuspendedError,
    PrefixNotFoundError,
    StaleGenerationError,
)

from .pattern import SPEC, Text, hashes, write, wrong_bytes

SHARED_TEXTS = 6  # texts that several workers begin with
MAX_LEASES = 12
MAX_PINS = 2
MAX_PINNED = 3  # blocks of a pin
SHELF_S = 600.0  # longer than all faults together
MIN_PRUNED = 100  # tokens; 30 % of fewer do not hold sinks and window
FLOOR = 40  # tokens of a resting lease that stay
FETCHED = 0.3  # of the times that one which was put away is looked at
BEGUN = 0.1  # of all other times
WAIT_S = 0.2  # in line for blocks, while resting leases are asked for some
POLICIES = (
    kvd_client.Dense(),
    kvd_client.SnapKV(window=8, kernel=5, keep=0.3),
    kvd_client.Dual(sinks=4, window=8, keep=0.3),
    kvd_client.KeyDiff(recent=8, keep=0.3),
    kvd_client.Span(window=8, kernel=5, keep=0.3, granularity="block"),
    kvd_client.Streaming(sinks=4, window=40),
)


@dataclass(eq=False)
class Sequence:
    """A lease and the text in it.

    `fetch` brings it back from where it was put, and `where` says where that is. Empty: it is in use.
    """

    lease: kvd_client.Lease
    text: Text
    where: str = ""
    has_checkpoint: bool = False

    @property
    def known_state(self) -> str:
        """What the daemon must say of it; empty while a call that broke off leaves that open."""
        if self.lease.handle.unanswered is not None:
            return ""
        if self.where == "suspended":
            return "suspended" if self.lease.handle.is_suspended else ""
        return "" if self.where else "active"

    @property
    def streams(self) -> bool:
        return isinstance(self.lease.policy, kvd_client.Streaming)


@dataclass
class Report:
    """What happened to this worker; all of `unexcused` must stay empty."""

    actions: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    unexcused: list[str] = field(default_factory=list)
    wrong_bytes: int = 0
    checked_bytes: int = 0


class Actions:
    """Of one worker."""

    def __init__(self, pool: kvd_client.Pool, chance: random.Random, number: int) -> None:
        self.pool = pool
        self.sequences: list[Sequence] = []
        self.current: Sequence | None = None  # the one an error is about
        self.report = Report()
        self.doing = ""
        self._pins: list[int] = []
        self._random = chance
        self._next_text = 1000 * (number + 1)
        self._weights: dict[Callable[[Sequence], None], int] = {
            self.grow: 8,
            self.prune: 4,
            self.restore: 2,
            self.forget: 1,
            self.share: 2,
            self.trim: 1,
            self.look: 2,
            self.end: 3,
            self.fork: 3,
            self.publish: 2,
            self.rest: 2,
            self.suspend: 2,
            self.pin: 1,
        }

    def act(self) -> None:
        """One of them, at random. Raises what kvd answers; `doing` it was then, about `current`."""
        chosen = self._random.choice(self.sequences) if self.sequences else None
        if chosen is not None and chosen.where and self._random.random() < FETCHED:
            return self._do(self.fetch, chosen)
        if chosen is None or chosen.where or self._random.random() < BEGUN:
            return self.begin()
        action = self._random.choices(list(self._weights), list(self._weights.values()))[0]
        self._do(action, chosen)

    def _do(self, action: Callable[[Sequence], None], sequence: Sequence) -> None:
        self.current, self.doing = sequence, action.__name__
        action(sequence)

    # In the pool.

    def begin(self) -> None:
        self.current, self.doing = None, "begin"
        if len(self.sequences) >= MAX_LEASES:
            return self.end(self.sequences[0])
        policy = self._random.choice(POLICIES)
        streams = isinstance(policy, kvd_client.Streaming)
        shares = self._random.random() < 0.4 and not streams
        text = self._random.randrange(SHARED_TEXTS) if shares else self._next_text
        self._next_text += not shares
        self.current = Sequence(self._leased(policy, text, shares), Text(text))
        self.sequences.append(self.current)
        self.look(self.current)
        self.grow(self.current)

    def _leased(self, policy: kvd_client.Policy, text: int, shares: bool) -> kvd_client.Lease:
        """By hashes, by a match, which also finds what is in a tier, or on its own."""
        tokens, wait = self._random.randrange(200), self._random.choice((0.0, WAIT_S))
        floor = 0 if isinstance(policy, kvd_client.Streaming) else self._random.choice((0, FLOOR))
        prefix = hashes(text, self._random.randrange(1, 4)) if shares else []
        if prefix and self._random.random() < 0.6:
            with self.pool.match(prefix) as match:
                return self.pool.lease(tokens=tokens, policy=policy, prefix=match, wait=wait, floor=floor)
        with contextlib.suppress(PrefixNotFoundError):
            return self.pool.lease(tokens=tokens, policy=policy, prefix=prefix, wait=wait, floor=floor)
        return self.pool.lease(tokens=tokens, policy=policy, wait=wait, floor=floor)

    def grow(self, sequence: Sequence) -> None:
        lease, tokens = sequence.lease, self._random.randrange(1, 60)
        first_position = lease.position  # extend() passes over what a streaming lease has no slots for
        slots = lease.extend(tokens, wait=self._random.choice((0.0, WAIT_S)))
        write(lease, slots, sequence.text, first_position)
        lease.commit(tokens)

    def prune(self, sequence: Sequence) -> None:
        lease, policy = sequence.lease, sequence.lease.policy
        wanted = lease.compress_wanted
        if wanted:
            policy = kvd_client.KeyDiff(recent=8, keep=kvd_client.Keep(tokens=wanted))
        elif lease.length < MIN_PRUNED or isinstance(policy, kvd_client.Dense):
            return
        shape = (SPEC.layers, 8, 4, SPEC.head_dim_k)
        queries = np.random.default_rng(self._random.randrange(1 << 30)).normal(size=shape)
        parks = self._random.random() < 0.4
        given = queries.astype(np.float32) if policy.needs_queries else None
        try:
            report = lease.compress(policy if wanted else None, queries=given, park=parks)
        except LeaseSuspendedError:  # the kernel worker died with it; what was parked is whole
            sequence.where = "suspended"
            return
        sequence.has_checkpoint |= parks and not report.unchanged

    def share(self, sequence: Sequence) -> None:
        lease = sequence.lease
        blocks = lease.length // SPEC.block_size
        whole = lease.compressed_length == 0 and lease.position == lease.length and not sequence.streams
        if whole and not sequence.text.branches and blocks > lease.sealed_blocks:
            lease.seal(hashes(sequence.text.number, blocks))

    def pin(self, sequence: Sequence) -> None:
        """Some prefix that everybody uses; the last one but two may go."""
        while len(self._pins) >= MAX_PINS:
            self.pool.unpin(self._pins.pop(0))
        text, blocks = self._random.randrange(SHARED_TEXTS), self._random.randrange(1, MAX_PINNED + 1)
        self._pins.append(self.pool.pin(hashes(text, blocks)))

    def fork(self, sequence: Sequence) -> None:
        """The child goes on with a text of its own: both are looked at from now on."""
        if len(self.sequences) >= MAX_LEASES or sequence.streams:
            return
        for child in sequence.lease.fork(self._random.randrange(1, 3)):
            text = sequence.text.forked(child.position, self._next_text)
            self._next_text += 1
            self.sequences.append(Sequence(child, text))

    def trim(self, sequence: Sequence) -> None:
        if not sequence.streams:
            sequence.lease.trim()

    def look(self, sequence: Sequence) -> None:
        try:
            wrong, seen = wrong_bytes(sequence.lease, sequence.text)
        except StaleGenerationError:  # a call that broke off had moved them: now they are known
            wrong, seen = wrong_bytes(sequence.lease, sequence.text)
        self.report.checked_bytes += seen
        if wrong:
            self.report.wrong_bytes += wrong
            self.report.unexcused.append(f"{wrong} wrong bytes in {sequence.lease} (text {sequence.text})")

    def end(self, sequence: Sequence) -> None:
        sequence.lease.release()
        self.sequences.remove(sequence)

    # Away, and back.

    def publish(self, sequence: Sequence) -> None:
        """To whoever has the key, which is this worker again."""
        sequence.where = f"shelf: {os.getpid()} {sequence.lease.lease_id}"
        self.fetch(sequence)

    def rest(self, sequence: Sequence) -> None:
        """It may be pruned meanwhile, without a word."""
        sequence.where = "resting"
        sequence.lease.rest()

    def suspend(self, sequence: Sequence) -> None:
        sequence.where = "suspended"
        try:
            sequence.lease.suspend()
        except (ExhaustedError, LeaseBusyError):
            sequence.where = ""
            raise

    def fetch(self, sequence: Sequence) -> None:
        lease, where = sequence.lease, sequence.where
        if where == "resting":
            lease.wake()
        elif where == "suspended":
            self._resume(lease)
        else:
            with contextlib.suppress(ClosedError):  # it is published by now
                lease.publish(where, ttl=SHELF_S)
            sequence.lease = self.pool.adopt(where)
        sequence.where = ""
        self.look(sequence)

    def _resume(self, lease: kvd_client.Lease) -> None:
        try:
            lease.resume(wait=self._random.choice((0.0, WAIT_S)))
        except InvalidArgumentError:  # its suspend() broke off, and was refused when it was repeated
            if lease.handle.is_suspended:
                raise

    def restore(self, sequence: Sequence) -> None:
        """What was computed since the compression is gone; the text goes on there as it did before."""
        if sequence.has_checkpoint:
            sequence.lease.restore()
            sequence.has_checkpoint = False
            self.look(sequence)

    def forget(self, sequence: Sequence) -> None:
        """What it was before the compression is wanted no more."""
        sequence.lease.drop_checkpoint()
        sequence.has_checkpoint = False

    # For whoever audits.

    def settle(self) -> None:
        """Calls that broke off are repeated: what they took is known, or given back."""
        self.current, self.doing = None, "settle"
        self.pool.lease().release()

    def inspect(self, sequence: Sequence) -> None:
        """See all its bytes, if it is not to stay suspended; where it is is known afterwards."""
        if sequence.where == "suspended" and self._random.random() < 0.5:
            return self._do(self.check, sequence)
        if sequence.where:
            return self._do(self.fetch, sequence)
        if sequence.lease.handle.unanswered is not None:
            self._do(self.trim, sequence)
        self._do(self.look, sequence)

    def check(self, sequence: Sequence) -> None:
        """It is where it was put, not gone."""
        with contextlib.suppress(LeaseSuspendedError):
            sequence.lease.check()
