"""What every job of the kernel worker has: a busy lease, perhaps lent queries, and an end."""

from kvd.errors import InvalidArgumentError

from .blocks import BlockState
from .ending import settle
from .free_runs import runs_of
from .lease import Compacting, Lease, LeaseState, Lending, Observing
from .parked import Tier
from .registry import Registry
from .results import QueryShape


def refuse_scratch(lease: Lease) -> None:
    if lease.scratch:
        raise InvalidArgumentError("a scratch lease holds queries, there is nothing to compress or observe")


def lend(registry: Registry, lease: Lease, queries: QueryShape | None) -> int | None:
    """The scratch lease is busy while its queries are read."""
    if queries is None or queries.scratch_lease_id is None:
        return None
    registry.leases[queries.scratch_lease_id].job = Lending(lease.lease_id)
    return queries.scratch_lease_id


def abort(registry: Registry, lease_id: int, lost: bool) -> Lease:
    """The job of a compression or observation failed. Lost: it had begun to change what the lease has.

    A compression loses the lease by that, an observation only the running scores: sums that some votes
    are missing from are worth nothing, so all tokens have to be observed again.
    """
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Compacting | Observing), f"lease {lease_id} has no job to abort"
    if isinstance(job, Compacting):
        if job.destination.size and not job.target.in_place:
            tenant = registry.tenants[lease.tenant]
            registry.pool_of(lease).give_back(runs_of(job.destination), BlockState.LEASED, tenant)
        registry.arenas[Tier.HOST].give(registry.pool_of(lease), job.slots)
        if job.target.adds_scores:
            lease.observed_length = 0
        if lost:
            lease.fate = LeaseState.LOST
    elif lost:
        lease.observed_length = 0
    end_job(registry, lease, job.scratch_lease_id)
    return lease


def end_job(registry: Registry, lease: Lease, scratch_lease_id: int | None) -> None:
    lease.job = None
    registry.fences.show(lease)
    settle(registry, lease)
    if scratch_lease_id is not None:
        scratch = registry.leases[scratch_lease_id]
        scratch.job = None
        settle(registry, scratch)
