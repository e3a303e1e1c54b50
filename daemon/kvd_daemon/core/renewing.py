"""A renewal: a sign of life, and where the worker's leases stand."""

from collections.abc import Sequence

from kvd.errors import NotOwnerError

from .lease import Lease, LeaseState
from .registry import Registry, check_progress, commit
from .results import Progress
from .session import Session, SessionState


def renew(registry: Registry, session: Session, progress: Sequence[Progress], now_ns: int) -> None:
    """Commit what is news, pass over what is late: the stream is not ordered with the other calls."""
    registry.at_most(progress, registry.limits.leases_per_session, "leases")
    news: dict[int, tuple[Lease, Progress]] = {}
    for word in progress:
        lease = registry.leases.get(word.lease_id)
        if lease is None:
            continue
        if word.lease_id not in session.leases:
            raise NotOwnerError(f"lease {word.lease_id} belongs to another session", lease_id=word.lease_id)
        if not _is_late(lease, word):
            check_progress(lease, word)
            news[lease.lease_id] = lease, word
    for lease, word in news.values():
        commit(lease, word)
    session.renewed_ns = now_ns
    session.state = SessionState.ACTIVE


def _is_late(lease: Lease, word: Progress) -> bool:
    if lease.state is not LeaseState.ACTIVE or word.generation != lease.generation:
        return True
    return word.length < lease.length or word.position < lease.position
