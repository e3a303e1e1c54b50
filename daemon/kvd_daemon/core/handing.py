"""Hand-off: a lease goes from its session to the shelf, and from there to the session that adopts it.

At every moment it has one owner: a session, or the shelf. To publish is the worker's word that it has stopped
writing, as a release is, so a lease that nobody adopts in time needs no quarantine.
"""

from dataclasses import replace

from kvd.errors import (
    InvalidArgumentError,
    LimitExceededError,
    OfferNotFoundError,
    ReceiverNotFoundError,
    ShelfKeyTakenError,
)
from kvd.limits import MAX_SHELF_KEY_CHARS, MAX_SHELVED_LEASES

from .ending import unshelve
from .lease import Lease, LeaseState, Shelved
from .limits import MAX_SHELF_TTL_NS
from .pool import Pool
from .registry import Registry, commit
from .results import Offer, Progress, Reclaimed
from .session import Session


def publish(registry: Registry, session: Session, progress: Progress, offer: Offer, now_ns: int) -> Lease:
    """The lease goes to the shelf, its length committed; or an error and no change."""
    _check(offer)
    lease = registry.standing(session, progress)
    if lease.scratch:
        raise InvalidArgumentError("a scratch lease holds queries of one call, nobody else can use them")
    if offer.to_session:
        _check_receiver(registry, session.tenant, offer.to_session, now_ns)
    place = lease.tenant, lease.pool, offer.key
    _make_room(registry, place, now_ns)
    commit(lease, progress)
    del session.leases[lease.lease_id]
    lease.session_id, lease.fate = "", LeaseState.SHELVED
    lease.shelved = Shelved(offer.key, offer.to_session, now_ns + offer.ttl_ns)
    lease.generation += 1
    registry.shelf.put(place, lease)
    registry.fences.show(lease)
    return lease


def _check(offer: Offer) -> None:
    if not 0 < len(offer.key) <= MAX_SHELF_KEY_CHARS:
        raise InvalidArgumentError(
            f"a key of {len(offer.key)} characters; 1 to {MAX_SHELF_KEY_CHARS} are possible"
        )
    if not 0 < offer.ttl_ns <= MAX_SHELF_TTL_NS:
        raise InvalidArgumentError(
            f"a lease to be shelved for {offer.ttl_ns / 1e9:g} s; more than 0 and at most "
            f"{MAX_SHELF_TTL_NS // 10**9} s are possible"
        )


def _check_receiver(registry: Registry, tenant: str, session_id: str, now_ns: int) -> None:
    """One answer for all, so that nobody learns of other tenants' sessions."""
    receiver = registry.sessions.get(session_id)
    if receiver is None or receiver.tenant != tenant or receiver.is_over(now_ns):
        raise ReceiverNotFoundError(
            f"no live session {session_id!r} of tenant {tenant} here; publish under a key instead",
            session_id=session_id,
        )


def _make_room(registry: Registry, place: tuple[str, str, str], now_ns: int) -> None:
    taken = registry.shelf.get(place)
    if taken is None and len(registry.shelf) >= MAX_SHELVED_LEASES:
        raise LimitExceededError(
            f"{MAX_SHELVED_LEASES} leases wait to be adopted, no more are possible; adopt some",
            limit=MAX_SHELVED_LEASES,
        )
    if taken is not None:
        if not is_due(taken, now_ns):
            raise ShelfKeyTakenError(
                f"lease {taken.lease_id} is published in pool {taken.pool} under {place[2]!r}; use another "
                "key, or adopt that first",
                lease_id=taken.lease_id,
            )
        unshelve(registry, taken)


def is_due(lease: Lease, now_ns: int) -> bool:
    """Whether nobody may adopt it any more."""
    return lease.shelved is not None and lease.shelved.expires_ns <= now_ns


def adopt(registry: Registry, session: Session, pool: Pool, key: str, now_ns: int) -> Lease:
    """From the shelf to that session, or an error and no change."""
    place = session.tenant, pool.name, key
    lease = registry.shelf.get(place)
    to_session = lease.shelved.to_session if lease is not None and lease.shelved is not None else ""
    if lease is None or is_due(lease, now_ns) or to_session not in ("", session.session_id):
        raise OfferNotFoundError(
            f"nothing to be adopted in pool {pool.name} under {key[:MAX_SHELF_KEY_CHARS]!r} (any more); "
            "wait for it, or prefill"
        )
    limit = registry.limits.leases_per_session
    if len(session.leases) >= limit:
        raise LimitExceededError(f"{limit} leases in one session are possible; release some", limit=limit)
    registry.shelf.take(place)
    lease.session_id, lease.fate, lease.shelved = session.session_id, LeaseState.ACTIVE, None
    lease.generation += 1
    session.leases[lease.lease_id] = lease
    registry.fences.show(lease)
    return lease


def expire_shelf(registry: Registry, now_ns: int) -> Reclaimed:
    """Leases that nobody adopted in time come back."""
    due = [lease for lease in registry.shelf.values() if is_due(lease, now_ns)]
    return Reclaimed(due, sum([unshelve(registry, lease) for lease in due]), [])


def postpone(registry: Registry, stood_ns: int) -> None:
    """Nobody could adopt for so long: leases wait so much longer."""
    for lease in registry.shelf.values():
        assert lease.shelved is not None, "a lease on the shelf"
        lease.shelved = replace(lease.shelved, expires_ns=lease.shelved.expires_ns + stood_ns)


def outlast(registry: Registry, until_ns: int) -> None:
    """Leases wait at least that long: those that adopt have to come back first."""
    for lease in registry.shelf.values():
        assert lease.shelved is not None, "a lease on the shelf"
        lease.shelved = replace(lease.shelved, expires_ns=max(lease.shelved.expires_ns, until_ns))
