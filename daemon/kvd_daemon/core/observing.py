"""Observation: the attention of new queries is added to a lease's running scores, which H2O keeps by."""

from kvd.errors import InvalidArgumentError

from .jobs import end_job, lend, refuse_scratch
from .lease import Lease, Observing
from .planning import check_queries, refuse_second_votes
from .registry import Registry, commit
from .results import ObservePlan, Progress, QueryShape
from .session import Session


def begin_observe(
    registry: Registry, session: Session, progress: Progress, queries: QueryShape
) -> ObservePlan:
    """Make the lease busy while the attention of its last tokens is added to the running scores."""
    lease = registry.standing(session, progress)
    refuse_scratch(lease)
    if lease.streams or lease.sealed_blocks:
        kind = "recycled" if lease.streams else "shared"
        raise InvalidArgumentError(f"running scores are kept by block, those of {kind} blocks cannot be")
    check_queries(registry, session, lease, queries)
    refuse_second_votes(lease, progress, queries)
    commit(lease, progress)
    lease.job = Observing(lend(registry, lease, queries))
    return ObservePlan(lease, lease.table[: lease.used_blocks], queries.tokens, lease.observed_length)


def finish_observe(registry: Registry, lease_id: int) -> Lease:
    """All slots in use have running scores now."""
    lease = registry.leases[lease_id]
    assert isinstance(lease.job, Observing), f"lease {lease_id} is not being observed"
    lease.observed_length = lease.length
    end_job(registry, lease, lease.job.scratch_lease_id)
    return lease
