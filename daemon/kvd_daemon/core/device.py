"""The state machine of one device: events in, decisions out.

Pure: no I/O, no clock, no randomness; time and ids are arguments. Every method either does all it says or
raises a KvdError and has changed nothing. What the daemon must do after a decision (zero blocks, run the
kernel worker, tell a worker) is in the answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvd.errors import (
    LimitExceededError,
    PoolInUseError,
)
from kvd.policy import Policy
from kvd.spec import KVSpec

from . import (
    compressing,
    creating,
    ending,
    forking,
    granting,
    handing,
    invariants,
    moving,
    observing,
    pinning,
    promoting,
    quotas,
    recovering,
    rehearsing,
    renewing,
    resting,
    scrubbing,
    sealing,
)
from .fences import Fences
from .lease import Lease
from .limits import Limits
from .pins import Pin
from .pool import Pool
from .quotas import Need, Quota, Quotas
from .recovering import Losses, Recovered
from .registry import Registry
from .results import (
    Change,
    Compressed,
    CompressPlan,
    Extended,
    Forked,
    Granted,
    LeaseWish,
    Matched,
    ObservePlan,
    Offer,
    Progress,
    QueryShape,
    Reclaimed,
    Revoked,
    Unchanged,
)
from .session import Session, SessionIdentity, SessionState
from .shelf import Shelf
from .tier_events import TierEvents


class Device(TierEvents):
    """Pools, sessions and leases of one device."""

    def __init__(self, memory_bytes: int, limits: Limits | None = None) -> None:
        self.memory_bytes = memory_bytes
        self.limits = limits or Limits()
        self._registry = Registry(self.limits)
        self.pools: dict[str, Pool] = self._registry.pools
        self.sessions: dict[str, Session] = self._registry.sessions
        self.leases: dict[int, Lease] = self._registry.leases
        self.fences: Fences = self._registry.fences
        self.quotas: Quotas = self._registry.quotas
        self.tenants: dict[str, int] = self._registry.tenants
        self.pins: dict[int, Pin] = self._registry.pins
        self.shelf: Shelf = self._registry.shelf

    @property
    def memory_used_bytes(self) -> int:
        """Bytes in pools. Their sidecars come on top, as far as they are written."""
        return sum(pool.spec.pool_bytes(pool.blocks_total) for pool in self.pools.values())

    def create_pool(self, name: str, spec: KVSpec, blocks: int, pool_id: str) -> tuple[Pool, bool]:
        """A pool of `blocks` and the null block, or the one of that name; and whether it is new.

        `blocks` 0 only looks the name up. Raises PoolMismatchError, PoolNotFoundError, DeviceFullError,
        LimitExceededError, InvalidArgumentError.
        """
        if name in self.pools:
            return creating.same_spec(self.pools[name], spec), False
        creating.check_new_pool(self._registry, name, spec, blocks, self.memory_bytes)
        pool = self.pools[name] = Pool(name, pool_id, spec, blocks, self._registry.quotas)
        pool.evict_by(self.limits.eviction)
        return pool, True

    def drop_pool(self, name: str, with_pins: bool = False) -> Pool:
        """Forget a pool without leases and, unless `with_pins`, without hard pins. Matches there end.

        Raises PoolNotFoundError, PoolInUseError.
        """
        pool = self._registry.pool(name)
        if pool.leases:
            raise PoolInUseError(f"pool {name} has {len(pool.leases)} leases; release them first")
        if not with_pins:
            pinning.check_unpinned(self._registry, name)
        for pin in [pin for pin in self.pins.values() if pin.pool == name]:
            pinning.drop(self._registry, pin)
        moving.forget_moves(self._registry, name)
        promoting.forget_pool(self._registry, name)
        self._registry.forget_slots(name)
        return self.pools.pop(name)

    def set_quotas(self, own: Mapping[str, Quota], default: Quota) -> None:
        """What tenants may hold from now on: those named, and all others. Nobody loses what was granted.

        Raises InvalidArgumentError if `default` guarantees blocks, LimitExceededError.
        """
        quotas.set_quotas(self._registry, own, default)

    def open_session(self, identity: SessionIdentity, ttl_ns: int, now_ns: int) -> Session:
        """A session that expires at `now_ns + ttl_ns` unless it is renewed. Raises LimitExceededError."""
        assert identity.session_id not in self.sessions, "session ids are unique"
        if len(self.sessions) >= self.limits.sessions:
            raise LimitExceededError(f"{self.limits.sessions} sessions are the limit; close one")
        self._registry.add_tenants([identity.tenant])
        session = self.sessions[identity.session_id] = Session(identity, ttl_ns, now_ns, now_ns)
        return session

    def renew(self, session_id: str, progress: Sequence[Progress], now_ns: int) -> Session:
        """It lives for another TTL, attached again if it was not, and leases stand where it says.

        Late words (of a lease that is gone, busy, moved or further already) are passed over. Raises
        SessionNotFoundError, SessionExpiredError, NotOwnerError, InvalidArgumentError.
        """
        session = self._registry.live_session(session_id, now_ns)
        renewing.renew(self._registry, session, progress, now_ns)
        return session

    def excuse(self, stood_ns: int) -> None:
        """Nobody could be heard for so long: sessions that have not expired by now live so much longer.

        So do soft pins, and leases that wait to be adopted.
        """
        pinning.postpone(self._registry, stood_ns)
        handing.postpone(self._registry, stood_ns)
        for session in self.sessions.values():
            if session.state is not SessionState.EXPIRED:
                session.renewed_ns += stood_ns

    def detach(self, session_id: str, now_ns: int) -> Session:
        """Its stream was lost but its process lives: leases stay until the TTL, or a renewal."""
        session = self._registry.live_session(session_id, now_ns)
        session.state = SessionState.DETACHED
        return session

    def close_session(self, session_id: str) -> Reclaimed:
        """The worker's own word that it has stopped writing: everything comes back."""
        return ending.end_session(self._registry, self._registry.known_session(session_id))

    def session_gone(self, session_id: str) -> Reclaimed:
        """Its process is proven gone: everything comes back, quarantined blocks too."""
        return ending.end_session(self._registry, self._registry.known_session(session_id))

    def expire(self, now_ns: int) -> list[Lease]:
        """Expire what is due; answers the leases of sessions that expired now, busy ones included."""
        return ending.expire(self._registry, now_ns)

    def lease(self, session_id: str, pool: str, wishes: Sequence[LeaseWish], now_ns: int) -> Granted:
        """New leases in one pool, all or none.

        Raises SessionNotFoundError, SessionExpiredError, PoolNotFoundError, PoolExhaustedError,
        LimitExceededError, PrefixNotFoundError, InvalidArgumentError.
        """
        session = self._registry.live_session(session_id, now_ns)
        return granting.grant(self._registry, session, self._registry.pool(pool), wishes, now_ns)

    def extend(self, session_id: str, items: Sequence[tuple[Progress, int]], now_ns: int) -> Extended:
        """Room for so many more tokens behind `progress.length` in each lease, all or none.

        Raises what `lease` does, the errors of a lease that is not there, not idle or not where the worker
        thinks.
        """
        return granting.extend(self._registry, self._registry.live_session(session_id, now_ns), items)

    def need_of_lease(
        self, session_id: str, pool: str, wishes: Sequence[LeaseWish], now_ns: int
    ) -> tuple[Pool, Need]:
        """What `lease` would take now; changes nothing. Raises what it does, except that blocks are short."""
        session, found = self._registry.live_session(session_id, now_ns), self._registry.pool(pool)
        return found, granting.need_of_lease(self._registry, session, found, wishes)

    def needs_of_extend(
        self, session_id: str, items: Sequence[tuple[Progress, int]], now_ns: int
    ) -> list[tuple[Pool, Need]]:
        """What `extend` would take now, by pool, as `need_of_lease`."""
        session = self._registry.live_session(session_id, now_ns)
        return granting.needs_of_extend(self._registry, session, items)

    def scrubbed(self, lease_ids: Sequence[int]) -> None:
        """The `scrub` runs of the call that made or grew these leases hold zeros, the copies are made."""
        scrubbing.scrubbed(self._registry, lease_ids)

    def scrub_failed(self, lease_ids: Sequence[int]) -> None:
        """They do not: the call that made or grew these leases is undone."""
        scrubbing.scrub_failed(self._registry, lease_ids)

    def release(self, session_id: str, lease_ids: Sequence[int]) -> Reclaimed:
        """End leases, also revoked, expired and lost ones; all or none. An expired session may, too.

        Raises SessionNotFoundError, LeaseNotFoundError, NotOwnerError, LeaseBusyError, InvalidArgumentError.
        """
        return ending.release(self._registry, self._registry.known_session(session_id), lease_ids)

    def release_blocks(self, session_id: str, progress: Progress, block_ids: Sequence[int]) -> Change:
        """Give back blocks that hold no token. Raises BlockNotHeldError, BlockInUseError too."""
        session = self._registry.live_session(session_id)
        return sealing.release_blocks(self._registry, session, progress, block_ids)

    def seal(self, session_id: str, progress: Progress, hashes: Sequence[bytes]) -> Change:
        """Make leading full blocks immutable and findable by their hashes, from the first block on."""
        session = self._registry.live_session(session_id)
        return sealing.seal(self._registry, session, progress, hashes)

    def leading(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> int:
        """How many leading ones of `hashes` `match` would find; changes nothing. Raises what it does."""
        session = self._registry.live_session(session_id)
        return len(pinning.leading(self._registry, session, self._registry.pool(pool), hashes))

    def need_of_match(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> tuple[Pool, Need]:
        """What `match` would take now, or `pin` if all are here; changes nothing. Raises as `match`."""
        session, found = self._registry.live_session(session_id), self._registry.pool(pool)
        return found, pinning.need(self._registry, session, found, hashes)

    def match(self, session_id: str, pool: str, hashes: Sequence[bytes], ttl_ns: int, now_ns: int) -> Matched:
        """Pin the longest leading run of `hashes` that is here, softly: until its TTL or its session's end.

        Nothing here: no pin. Raises SessionNotFoundError, SessionExpiredError, PoolNotFoundError,
        PoolExhaustedError, QuotaExceededError, LimitExceededError, InvalidArgumentError.
        """
        session = self._registry.live_session(session_id, now_ns)
        until_ns = pinning.end_of(ttl_ns, now_ns)
        return pinning.match(self._registry, session, self._registry.pool(pool), hashes, until_ns)

    def pin(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> Pin:
        """Pin all of `hashes` for the tenant until `unpin`, within its quota's `pin_blocks`.

        Raises what `match` does, and PrefixNotFoundError.
        """
        session = self._registry.live_session(session_id)
        return pinning.pin(self._registry, session, self._registry.pool(pool), hashes)

    def unpin(self, session_id: str, pin_id: int) -> Pin:
        """End a pin of the session's or of its tenant's. Raises PinNotFoundError."""
        session = self._registry.live_session(session_id)
        return pinning.drop(self._registry, pinning.owned(self._registry, session, pin_id))

    def drop_pin(self, pin_id: int) -> Pin:
        """An operator ends any pin. Raises PinNotFoundError."""
        return pinning.drop(self._registry, pinning.known(self._registry, pin_id))

    def expire_pins(self, now_ns: int) -> list[Pin]:
        """Soft pins past their TTL end."""
        return pinning.expire_pins(self._registry, now_ns)

    def fork(self, session_id: str, progress: Progress, count: int, now_ns: int) -> Forked:
        """`count` more leases that go on from where that one is, sharing its blocks until they write.

        Raises what `extend` does of a lease, LimitExceededError, InvalidArgumentError.
        """
        session = self._registry.live_session(session_id, now_ns)
        return forking.fork(self._registry, session, progress, count, now_ns)

    def publish(self, session_id: str, progress: Progress, offer: Offer, now_ns: int) -> Lease:
        """The worker's word that it has stopped writing: the lease waits for a session to adopt it.

        Until the offer's TTL; whatever becomes of the publisher. Raises what `extend` does of a lease,
        ShelfKeyTakenError, ReceiverNotFoundError, LimitExceededError, InvalidArgumentError.
        """
        session = self._registry.live_session(session_id, now_ns)
        return handing.publish(self._registry, session, progress, offer, now_ns)

    def adopt(self, session_id: str, pool: str, key: str, now_ns: int) -> Lease:
        """A published lease is that session's from now on, with all it had.

        Raises OfferNotFoundError, LimitExceededError, PoolNotFoundError.
        """
        session = self._registry.live_session(session_id, now_ns)
        return handing.adopt(self._registry, session, self._registry.pool(pool), key, now_ns)

    def expire_shelf(self, now_ns: int) -> Reclaimed:
        """Leases that nobody adopted in time come back."""
        return handing.expire_shelf(self._registry, now_ns)

    def begin_compress(
        self,
        session_id: str,
        progress: Progress,
        policy: Policy | None,
        queries: QueryShape | None,
        now_ns: int,
        park: bool = False,
    ) -> CompressPlan | Unchanged:
        """Plan to prune a lease by `policy`, or its own. The lease is busy until finished or aborted.

        `park`: what it holds goes into slots before, unless there is a checkpoint already; see
        `begin_restore`. Raises what `extend` does, CompressionRefusedError, and what `begin_suspend` does.
        """
        session = self._registry.live_session(session_id, now_ns)
        return compressing.begin_compress(self._registry, session, progress, policy, queries, park)

    def rest(self, session_id: str, progress: Progress, floor: int | None) -> Lease:
        """The worker leaves the lease alone; it may be pruned to `floor` tokens (0: not; None: as leased).

        Raises the errors of a lease that is not there, not idle or not where the worker thinks.
        """
        return resting.rest(self._registry, self._registry.live_session(session_id), progress, floor)

    def wake(self, session_id: str, lease_id: int) -> Lease:
        """The worker's again, as it is by now. Raises what `rest` does; LeaseBusyError while it is pruned."""
        return resting.wake(self._registry, self._registry.live_session(session_id), lease_id)

    def gift(self, lease_id: int) -> resting.Gift:
        """What `begin_press` to its floor would give, of a resting lease that can give blocks."""
        return resting.gift(self._registry, self.leases[lease_id])

    def begin_press(self, lease_id: int, policy: Policy) -> CompressPlan | Unchanged:
        """As `begin_compress`, of a resting lease that can give blocks, for others who need them."""
        return resting.begin_press(self._registry, lease_id, policy)

    def finish_compress(
        self, lease_id: int, kept: int | Sequence[int], checksums: Sequence[int] = ()
    ) -> Compressed:
        """The job is done: `kept` tokens, or by block the kept indices into the plan's source.

        `checksums` of the plan's slots. Raises InvalidArgumentError, and the lease stays busy, if that is not
        what was planned.
        """
        return compressing.finish_compress(self._registry, lease_id, kept, checksums)

    def begin_observe(
        self, session_id: str, progress: Progress, queries: QueryShape, now_ns: int
    ) -> ObservePlan:
        """Plan to add the attention of the last tokens' queries to the lease's running scores."""
        session = self._registry.live_session(session_id, now_ns)
        return observing.begin_observe(self._registry, session, progress, queries)

    def finish_observe(self, lease_id: int) -> Lease:
        """The job is done: every slot in use has a running score."""
        return observing.finish_observe(self._registry, lease_id)

    def abort_compress(self, lease_id: int, lost: bool, checksums: Sequence[int] = ()) -> Lease:
        """The job (compression or observation) failed. Not lost: the lease is as it was. Lost: it is gone,
        unless it was parked before (`checksums` of its slots): then it is suspended."""
        return compressing.abort(self._registry, lease_id, lost, checksums)

    def revoke(self, lease_id: int) -> Revoked:
        """Take a lease away, a busy one as soon as its job has ended.

        Raises LeaseNotFoundError, the fate it has already or will have, LeaseBusyError if it only waits for
        its job to go with its session.
        """
        return ending.revoke(self._registry, lease_id)

    def recover(self, now_ns: int, grace_ns: int, losses: Losses) -> Recovered:
        """Another daemon takes over: jobs are undone or lost, what `losses` names ends or is no more.

        All other sessions are detached, with max(TTL, grace) to come back. Raises SessionNotFoundError,
        PoolNotFoundError.
        """
        return recovering.recover(self._registry, now_ns, grace_ns, losses)

    def configure(self, memory_bytes: int, limits: Limits) -> None:
        """What the operator lets it have from now on; what was granted stays.

        How many leases there may ever be stays too: workers have mapped a fence for each.
        """
        self.memory_bytes = max(memory_bytes, self.memory_used_bytes)
        self.limits = self._registry.limits = replace(limits, leases=self.limits.leases)
        for pool in self.pools.values():
            pool.evict_by(limits.eviction)

    def rehearse(self, now_ns: int) -> None:
        """Walk the way of a lease, up to its grant. Nothing changes, so no journal has to know of it."""
        rehearsing.rehearse(self._registry, now_ns)

    def check(self) -> None:
        """Recount everything that is derived. Raises InvariantError naming what is wrong: a bug."""
        invariants.check(self._registry, self.memory_bytes)
