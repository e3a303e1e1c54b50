"""Who is who: pools, sessions, leases, tenants; and the checks every request passes first."""

from collections.abc import Iterable, Sequence, Sized

from kvd.errors import (
    InvalidArgumentError,
    KvdError,
    LeaseBusyError,
    LeaseExpiredError,
    LeaseLostError,
    LeaseNotFoundError,
    LeaseRestingError,
    LeaseRevokedError,
    LeaseSuspendedError,
    LimitExceededError,
    NotOwnerError,
    PoolNotFoundError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleGenerationError,
)
from kvd.limits import MAX_TOKENS_PER_LEASE

from .copied import Copies
from .fences import Fences
from .lease import Lease, LeaseState
from .limits import MAX_POSITION, MAX_TENANTS, Limits
from .parked import CopyMove, Move, Promotion, Spill, Tier
from .pins import Pin
from .pool import Pool
from .quotas import Quotas
from .results import Progress
from .session import Session, SessionState
from .shelf import Shelf
from .tiers import Arena


class Registry:
    """Everything by name. Tenants get an index each, for ever."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pools: dict[str, Pool] = {}
        self.sessions: dict[str, Session] = {}
        self.leases: dict[int, Lease] = {}
        self.tenants: dict[str, int] = {}
        self.quotas = Quotas()
        self.last_lease_id = 0
        self.pins: dict[int, Pin] = {}
        self.last_pin_id = 0
        self.shelf = Shelf()
        self.fences = Fences(limits.leases + 1)
        self.arenas = {tier: Arena(tier) for tier in Tier}
        self.moves: dict[int, Move | CopyMove] = {}
        self.last_move_id = 0
        self.copies = Copies()
        self.spills: dict[int, Spill] = {}
        self.promotions: dict[int, Promotion] = {}

    def pool(self, name: str) -> Pool:
        if name not in self.pools:
            raise PoolNotFoundError(f"no pool {name!r}; create it first")
        return self.pools[name]

    def pool_of(self, lease: Lease) -> Pool:
        return self.pools[lease.pool]

    def copy_moves(self) -> list[CopyMove]:
        """Those of copies, among the moves under way."""
        return [move for move in self.moves.values() if isinstance(move, CopyMove)]

    def drop_parked(self, lease: Lease) -> None:
        """What it has in slots is not wanted any more."""
        if lease.parked is not None:
            self.arenas[lease.parked.tier].give(self.pool_of(lease), lease.parked.slots)
            lease.parked = None
        self.drop_checkpoint(lease)

    def drop_checkpoint(self, lease: Lease) -> None:
        """It will not be restored any more."""
        if lease.checkpoint is not None:
            self.arenas[lease.checkpoint.tier].give(self.pool_of(lease), lease.checkpoint.slots)
            lease.checkpoint = None

    def forget_slots(self, pool: str) -> None:
        """The pool is no more; nothing is parked for it."""
        for arena in self.arenas.values():
            arena.forget(pool)

    def add_tenants(self, tenants: Sequence[str]) -> None:
        """Each gets an index from 1 on, unless it has one; all of them or none."""
        fresh = [tenant for tenant in tenants if tenant not in self.tenants]
        if len(self.tenants) + len(fresh) > MAX_TENANTS:
            raise LimitExceededError(f"more than {MAX_TENANTS} tenants; restart the daemon to forget some")
        for tenant in fresh:
            self.tenants[tenant] = len(self.tenants) + 1

    def known_session(self, session_id: str) -> Session:
        """Also an expired one."""
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError("unknown session; open a new one")
        return session

    def live_session(self, session_id: str, now_ns: int | None = None) -> Session:
        """One that has not expired, by its state and, if the time is told, by its TTL."""
        session = self.known_session(session_id)
        late = now_ns is not None and now_ns >= session.renewed_ns + session.ttl_ns
        if late or session.state is SessionState.EXPIRED:
            raise SessionExpiredError(
                f"session {session_id} was not renewed for {session.ttl_ns // 1_000_000} ms; open a new one, "
                "its leases are gone"
            )
        return session

    def owned(self, session: Session, lease_id: int) -> Lease:
        """A lease of that session in whatever state."""
        lease = self.leases.get(lease_id)
        if lease is None:
            raise LeaseNotFoundError(f"no lease {lease_id}; was it released?", lease_id=lease_id)
        if lease_id not in session.leases:
            raise NotOwnerError(f"lease {lease_id} belongs to another session", lease_id=lease_id)
        return lease

    def standing(self, session: Session, progress: Progress) -> Lease:
        """The active lease of that session which `progress` may be committed to."""
        lease = self.owned(session, progress.lease_id)
        refuse_unless_active(lease)
        if progress.generation != lease.generation:
            raise StaleGenerationError(
                f"lease {lease.lease_id} is at generation {lease.generation}, not {progress.generation}; "
                "its slots have moved: take the newest table",
                lease_id=lease.lease_id,
                generation=lease.generation,
            )
        check_progress(lease, progress)
        return lease

    def at_most(self, items: Sized, limit: int, what: str) -> None:
        if len(items) > limit:
            raise LimitExceededError(
                f"{len(items)} {what} in one call, {limit} allowed; split it", limit=limit
            )


def refuse_unless_active(lease: Lease) -> None:
    """Raises LeaseBusyError or the LeaseGoneError of the lease's fate."""
    if lease.state is not LeaseState.ACTIVE:
        raise refusal(lease, lease.state)


def refusal(lease: Lease, state: LeaseState) -> KvdError:
    """Why a lease in that state is of no use."""
    error, why = _REFUSALS[state]
    return error(f"lease {lease.lease_id} {why}", lease_id=lease.lease_id)


_REFUSALS: dict[LeaseState, tuple[type[KvdError], str]] = {
    LeaseState.COMPRESSING: (LeaseBusyError, "has a job under way; retry when it has answered"),
    LeaseState.LOST: (LeaseLostError, "lost its bytes with a kernel worker; release it and prefill again"),
    LeaseState.REVOKED: (LeaseRevokedError, "was revoked by an operator; stop writing and release it"),
    LeaseState.RESTING: (LeaseRestingError, "rests; wake it first"),
    LeaseState.SUSPENDED: (LeaseSuspendedError, "is suspended; resume it first"),
    LeaseState.EXPIRED: (LeaseExpiredError, "expired with its session; open a new session and lease again"),
}


def check_progress(lease: Lease, progress: Progress) -> None:
    """Raises InvalidArgumentError unless the worker can have got there from where the lease stands.

    Slots from `compressed_length` on have no explicit position, theirs follows from `position - length`.
    So once there are such slots, every further position has a slot too.
    """
    if not lease.length <= progress.length <= lease.capacity:
        raise InvalidArgumentError(
            f"{_words(progress)}; the length must be from {lease.length} (it never shrinks) to "
            f"{lease.capacity} (the table's capacity): extend first"
        )
    written, passed = progress.length - lease.length, progress.position - lease.position
    if not max(progress.length, lease.position) <= progress.position <= MAX_POSITION or passed < written:
        raise InvalidArgumentError(
            f"{_words(progress)}; the position must grow by the {written} tokens written"
        )
    if written and lease.sealed_blocks and lease.shares_tail:
        raise InvalidArgumentError(
            f"{_words(progress)}; its last block is shared since a fork, so nothing can be written there: "
            "extend first"
        )
    if passed > written and lease.length > explicit_slots(lease):
        raise InvalidArgumentError(
            f"{_words(progress)}; {written} tokens were written but {passed} positions passed"
        )


def _words(progress: Progress) -> str:
    return f"lease {progress.lease_id}: length={progress.length}, position={progress.position}"


def explicit_slots(lease: Lease) -> int:
    """Leading slots whose positions do not follow from `position - length`."""
    if lease.streams:
        return lease.sink_block_count * lease.block_size
    return lease.compressed_length


def commit(lease: Lease, progress: Progress) -> None:
    lease.length, lease.position = progress.length, progress.position


def distinct(lease_ids: Iterable[int]) -> None:
    """Raises InvalidArgumentError if a lease is named twice."""
    seen: set[int] = set()
    for lease_id in lease_ids:
        if lease_id in seen:
            raise InvalidArgumentError(f"lease {lease_id} is named twice in one call; name each once")
        seen.add(lease_id)


def check_tokens(length: int, tokens: int) -> None:
    """Raises for a negative number or more than a lease can hold."""
    if tokens < 0:
        raise InvalidArgumentError(f"tokens={tokens}; a number from 0 on is needed")
    if length + tokens > MAX_TOKENS_PER_LEASE:
        raise LimitExceededError(f"{length + tokens} tokens in one lease; {MAX_TOKENS_PER_LEASE} allowed")


def check_hashes(hashes: Sequence[bytes], hash_bytes: int) -> None:
    """Raises InvalidArgumentError for a hash of another size, or one named twice."""
    if any(len(prefix_hash) != hash_bytes for prefix_hash in hashes):
        raise InvalidArgumentError(f"a prefix hash is {hash_bytes} bytes, chained over all tokens before it")
    if len(set(hashes)) != len(hashes):
        raise InvalidArgumentError("a prefix hash is named twice; chained hashes differ at every block")
