"""How leases and sessions end: released, reclaimed, expired, revoked; at once or when their job has ended.

A TTL is not a fence: an expired or revoked lease's writable blocks are quarantined until its worker releases
them or its process is proven gone. What it only shares goes back at once, since it cannot write there.
"""

from collections.abc import Sequence

from kvd.errors import LeaseBusyError, LeaseNotFoundError

from . import pinning
from .blocks import BlockState
from .lease import BlockTable, Ending, Lease, LeaseState
from .registry import Registry, distinct, refusal, refuse_unless_active
from .results import Reclaimed, Revoked
from .session import Session, SessionState

QUARANTINED_FATES = (LeaseState.REVOKED, LeaseState.EXPIRED)
FATES = {Ending.REVOKE: LeaseState.REVOKED, Ending.EXPIRE: LeaseState.EXPIRED}
"""What a lease becomes by its ending; a reclaimed one is forgotten."""


def release(registry: Registry, session: Session, lease_ids: Sequence[int]) -> Reclaimed:
    """The worker's own word that it has stopped writing; all or none."""
    registry.at_most(lease_ids, registry.limits.items_per_call, "leases")
    distinct(lease_ids)
    leases = [registry.owned(session, lease_id) for lease_id in lease_ids]
    for lease in leases:
        if lease.job is not None:
            raise LeaseBusyError(
                f"lease {lease.lease_id} has a job under way; release it when it has answered"
            )
    return Reclaimed(leases, sum([reclaim(registry, lease) for lease in leases]), [])


def end_session(registry: Registry, session: Session) -> Reclaimed:
    """Forget the session; its leases end now, busy ones as soon as their job has ended.

    Its pins end too, and what waits for it alone to be adopted: its publisher has given it away.
    """
    _drop_promises(registry, session)
    del registry.sessions[session.session_id]
    leases = list(session.leases.values())
    busy = [lease for lease in leases if lease.job is not None]
    for lease in busy:
        lease.ending = Ending.RECLAIM
        registry.fences.show(lease)
    idle = [lease for lease in leases if lease.job is None]
    return Reclaimed(idle, sum(reclaim(registry, lease) for lease in idle), busy)


def expire(registry: Registry, now_ns: int) -> list[Lease]:
    """Sessions past their TTL expire, and so do their leases, busy ones when their job has ended."""
    expired: list[Lease] = []
    for session in registry.sessions.values():
        if session.state is SessionState.EXPIRED or not session.is_over(now_ns):
            continue
        session.state = SessionState.EXPIRED
        _drop_promises(registry, session)
        for lease in session.leases.values():
            lease.ending = lease.ending or Ending.EXPIRE
            registry.fences.show(lease)
            settle(registry, lease)
            expired.append(lease)
    return expired


def _drop_promises(registry: Registry, session: Session) -> None:
    for pin in list(session.pins.values()):
        pinning.drop(registry, pin)
    for lease in list(registry.shelf.values()):
        if lease.shelved is not None and lease.shelved.to_session == session.session_id:
            unshelve(registry, lease)


def revoke(registry: Registry, lease_id: int) -> Revoked:
    """Take a lease away from its worker: now, or as soon as its job has ended."""
    lease = registry.leases.get(lease_id)
    if lease is None:
        raise LeaseNotFoundError(f"no lease {lease_id}; list the leases", lease_id=lease_id)
    if lease.job is not None:
        return _revoke_later(registry, lease)
    if lease.fate is LeaseState.SHELVED:  # nobody writes to it
        unshelve(registry, lease)
        return Revoked(lease, 0, deferred=False)
    if lease.fate not in (LeaseState.RESTING, LeaseState.SUSPENDED):
        refuse_unless_active(lease)
    _fence(registry, lease, LeaseState.REVOKED)
    return Revoked(lease, len(lease.blocks), deferred=False)


def _revoke_later(registry: Registry, lease: Lease) -> Revoked:
    if lease.ending is not None:
        raise refusal(lease, FATES.get(lease.ending, lease.state))
    lease.ending = Ending.REVOKE
    registry.fences.show(lease)
    return Revoked(lease, 0, deferred=True)


def settle(registry: Registry, lease: Lease) -> None:
    """Let an idle lease meet the end that waited for its job."""
    if lease.job is not None:
        return
    if lease.ending is Ending.RECLAIM:
        reclaim(registry, lease)
    elif lease.ending is not None:
        fate, lease.ending = FATES[lease.ending], None
        if lease.fate is not LeaseState.REVOKED:
            _fence(registry, lease, fate)


def unshelve(registry: Registry, lease: Lease) -> int:
    """A published lease comes back instead of being adopted; answers how many blocks it held."""
    assert lease.shelved is not None, "a lease on the shelf"
    registry.shelf.take((lease.tenant, lease.pool, lease.shelved.key))
    return reclaim(registry, lease)


def reclaim(registry: Registry, lease: Lease) -> int:
    """Give back all blocks of an idle lease and forget it; answers how many it held."""
    assert lease.job is None, "a job still uses the blocks"
    held = len(lease.blocks)
    source = BlockState.QUARANTINED if lease.fate in QUARANTINED_FATES else BlockState.LEASED
    _drop(registry, lease, lease.sealed_blocks)
    registry.drop_parked(lease)
    if lease.blocks:
        registry.pool_of(lease).give_back(lease.blocks.runs(), source, registry.tenants[lease.tenant])
    del registry.leases[lease.lease_id]
    registry.fences.give(lease.fence_slot)
    pool = registry.pools.get(lease.pool)
    if pool is not None:  # it may have been lost, see recovering.py
        pool.leases.discard(lease.lease_id)
    session = registry.sessions.get(lease.session_id)
    if session is not None:
        session.leases.pop(lease.lease_id)
    return held


def _fence(registry: Registry, lease: Lease, fate: LeaseState) -> None:
    """Share nothing any more, park nothing; quarantine what the worker may still write to."""
    _drop(registry, lease, lease.sealed_blocks)
    registry.drop_parked(lease)
    if lease.blocks:
        registry.pool_of(lease).quarantine(lease.blocks.runs())
    lease.fate = fate
    registry.fences.show(lease)


def _drop(registry: Registry, lease: Lease, sealed_count: int) -> None:
    """The first `sealed_count` shared blocks leave the table."""
    if sealed_count:
        tenant = registry.tenants[lease.tenant]
        registry.pool_of(lease).unshare(lease.table[:sealed_count], tenant)
        lease.blocks = BlockTable(lease.table[sealed_count:])
        lease.sealed_blocks -= sealed_count
