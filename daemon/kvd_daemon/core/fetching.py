"""Resume and restore: blocks for what is parked, into which its bytes are copied from their slots.

A suspended lease comes back. One that was compressed goes back to the checkpoint made before: it gives its
blocks for those. Until the copy is done the lease is as it was, and so it stays if there is no kernel worker.
Slots whose bytes are damaged lose the suspended lease, or the checkpoint: nobody ever gets those bytes.
"""

import numpy as np

from kvd.errors import InvalidArgumentError, LeaseBusyError, StaleGenerationError

from . import quotas
from .blocks import BlockState
from .free_runs import ids_of, runs_of
from .jobs import end_job
from .lease import BlockTable, Lease, LeaseState
from .parked import Fetching, Parked, Tier
from .pool import Pool
from .quotas import Need
from .registry import Registry, commit, refuse_unless_active
from .results import Fetched, FetchPlan, Progress
from .session import Session
from .suspending import empty_table


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


def needs_of(registry: Registry, lease: Lease, parked: Parked | None) -> list[tuple[Pool, Need]]:
    """What fetching that would take; the lease gives back the blocks that it has alone."""
    assert parked is not None, "there is what would be fetched"
    pool = registry.pool_of(lease)
    shared = int(np.count_nonzero(pool.blocks.holders[lease.sealed] > 1)) if lease.sealed_blocks else 0
    return [(pool, Need(ordinary=parked.slots.size, returned=len(lease.blocks) - shared))]


def begin_resume(registry: Registry, session: Session, lease_id: int, generation: int) -> FetchPlan:
    """Take blocks, make the lease busy."""
    lease = suspended(registry, session, lease_id, generation)
    assert lease.parked is not None, "a suspended lease"
    _require(registry, session, lease, lease.parked)
    return _begin(registry, lease, lease.parked, restores=False)


def restorable(registry: Registry, session: Session, progress: Progress) -> tuple[Lease, Parked]:
    """A lease where the worker says, and its checkpoint. Raises InvalidArgumentError if it has none."""
    lease = registry.standing(session, progress)
    if lease.checkpoint is None:
        raise InvalidArgumentError(
            f"lease {lease.lease_id} has no checkpoint to go back to; compress(park=True) makes one, "
            "which its forks do not have"
        )
    return lease, lease.checkpoint


def begin_restore(registry: Registry, session: Session, progress: Progress) -> FetchPlan:
    """As `begin_resume`, of a lease that is there and has a checkpoint."""
    lease, checkpoint = restorable(registry, session, progress)
    _require(registry, session, lease, checkpoint)
    commit(lease, progress)
    return _begin(registry, lease, checkpoint, restores=True)


def drop_checkpoint(registry: Registry, session: Session, lease_id: int) -> Lease:
    """Of a lease that is active or suspended."""
    lease = registry.owned(session, lease_id)
    if lease.state is not LeaseState.SUSPENDED:
        refuse_unless_active(lease)
    registry.drop_checkpoint(lease)
    return lease


def _require(registry: Registry, session: Session, lease: Lease, parked: Parked) -> None:
    """Raises LeaseBusyError, or that there is no room."""
    if parked.tier is not Tier.HOST:
        raise LeaseBusyError(f"what is parked of lease {lease.lease_id} is on disk; ask again")
    quotas.require(registry, session.tenant, needs_of(registry, lease, parked))


def _begin(registry: Registry, lease: Lease, parked: Parked, restores: bool) -> FetchPlan:
    """Of a lease for which there is room."""
    tenant = registry.tenants[lease.tenant]
    runs, _ = registry.pool_of(lease).grant(parked.slots.size, tenant)  # all of them are written over
    destination = ids_of(runs)
    lease.job = Fetching(destination, restores)
    return FetchPlan(lease, parked, destination)


def finish_fetch(registry: Registry, lease_id: int) -> Fetched:
    """The bytes are in the blocks: they are the lease's table, the slots are free."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Fetching), f"nothing is fetched for lease {lease_id}"
    parked, dropped_tokens = lease.checkpoint if job.restores else lease.parked, 0
    assert parked is not None, "there is what is fetched"
    pool = registry.pool_of(lease)
    pool.blocks.cleaned(job.destination, registry.tenants[lease.tenant])
    registry.arenas[parked.tier].give(pool, parked.slots)
    if job.restores:
        dropped_tokens, lease.checkpoint = lease.position - parked.position, None
        empty_table(registry, pool, lease)
    else:
        lease.fate, lease.parked = LeaseState.ACTIVE, None
    lease.blocks = BlockTable(job.destination)
    lease.length, lease.position = parked.length, parked.position
    lease.compressed_length, lease.observed_length = parked.compressed_length, parked.observed_length
    lease.generation += 1
    end_job(registry, lease, None)
    return Fetched(lease, dropped_tokens)


def abort_fetch(registry: Registry, lease_id: int, lost: bool) -> Lease:
    """Not lost: as before. Lost: what the slots held is gone, and so is a suspended lease."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Fetching), f"nothing is fetched for lease {lease_id}"
    if job.destination.size:
        tenant = registry.tenants[lease.tenant]
        registry.pool_of(lease).give_back(runs_of(job.destination), BlockState.LEASED, tenant)
    if lost and job.restores:
        registry.drop_checkpoint(lease)
    elif lost:
        lose_parked(registry, lease)
    end_job(registry, lease, None)
    return lease


def lose_parked(registry: Registry, lease: Lease) -> None:
    """What was in the slots of a suspended lease is gone."""
    registry.drop_parked(lease)
    lease.length = lease.compressed_length = lease.observed_length = 0
    lease.fate = LeaseState.LOST
