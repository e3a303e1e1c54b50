"""Resume: blocks for a suspended lease, into which its bytes are copied from their slots.

Until that is done the lease is as it was, and so it stays if there is no kernel worker. Slots whose bytes are
damaged or gone lose the lease: it is told so, and never gets those bytes.
"""

from kvd.errors import InvalidArgumentError, StaleGenerationError

from . import quotas
from .blocks import BlockState
from .free_runs import ids_of, runs_of
from .jobs import end_job
from .lease import BlockTable, Lease, LeaseState
from .parked import Fetching, Parked
from .pool import Pool
from .quotas import Need
from .registry import Registry, refuse_unless_active
from .results import FetchPlan
from .session import Session


def suspended(registry: Registry, session: Session, lease_id: int, generation: int) -> Lease:
    """The session's suspended lease. Raises what it is instead."""
    lease = registry.owned(session, lease_id)
    if lease.job is not None or lease.fate is not LeaseState.SUSPENDED:
        refuse_unless_active(lease)
        raise InvalidArgumentError(f"lease {lease_id} is not suspended; there is nothing to resume")
    if generation != lease.generation:
        raise StaleGenerationError(
            f"lease {lease_id} is at generation {lease.generation}, not {generation}; it was suspended again",
            lease_id=lease_id,
            generation=lease.generation,
        )
    return lease


def needs_of(registry: Registry, lease: Lease) -> list[tuple[Pool, Need]]:
    """What a resume would take."""
    assert lease.parked is not None, "a suspended lease"
    return [(registry.pool_of(lease), Need(ordinary=lease.parked.slots.size))]


def begin_resume(registry: Registry, session: Session, lease_id: int, generation: int) -> FetchPlan:
    """Take blocks, make the lease busy."""
    lease = suspended(registry, session, lease_id, generation)
    assert lease.parked is not None, "a suspended lease"
    return _begin(registry, session, lease, lease.parked)


def _begin(registry: Registry, session: Session, lease: Lease, parked: Parked) -> FetchPlan:
    pool, count = registry.pool_of(lease), parked.slots.size
    quotas.require(registry, session.tenant, [(pool, Need(ordinary=count))])
    runs, _ = pool.grant(count, registry.tenants[lease.tenant])  # all of them are written over
    lease.job = Fetching(ids_of(runs))
    return FetchPlan(lease, parked, lease.job.destination)


def finish_fetch(registry: Registry, lease_id: int) -> Lease:
    """The bytes are in the blocks: they are the lease's table, the slots are free."""
    lease = registry.leases[lease_id]
    job, parked = lease.job, lease.parked
    assert isinstance(job, Fetching), f"lease {lease_id} is not being resumed"
    assert parked is not None, "a suspended lease"
    pool = registry.pool_of(lease)
    pool.blocks.cleaned(job.destination, registry.tenants[lease.tenant])
    registry.arenas[parked.tier].give(pool, parked.slots)
    lease.blocks, lease.parked = BlockTable(job.destination), None
    lease.fate = LeaseState.ACTIVE
    lease.generation += 1
    end_job(registry, lease, None)
    return lease


def abort_fetch(registry: Registry, lease_id: int, lost: bool) -> Lease:
    """Not lost: still suspended. Lost: what the slots held is gone, and so is the lease."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Fetching), f"lease {lease_id} is not being resumed"
    if job.destination.size:
        tenant = registry.tenants[lease.tenant]
        registry.pool_of(lease).give_back(runs_of(job.destination), BlockState.LEASED, tenant)
    if lost:
        lose_parked(registry, lease)
    end_job(registry, lease, None)
    return lease


def lose_parked(registry: Registry, lease: Lease) -> None:
    """What was in the slots of a suspended lease is gone."""
    registry.drop_parked(lease)
    lease.length = lease.compressed_length = lease.observed_length = 0
    lease.fate = LeaseState.LOST
