"""Suspend: a lease's blocks are copied into slots of the host tier and then go back to the pool.

Until the copy is done the lease is as it was, and so it stays if that fails. Shared blocks are copied too:
whoever shares them may let them go.
"""

from collections.abc import Sequence

import numpy as np

from kvd.errors import InvalidArgumentError, QuotaExceededError

from .blocks import BlockState
from .copies import take_slots
from .free_runs import NO_BLOCKS, IntArray
from .jobs import end_job
from .lease import BlockTable, Lease, LeaseState
from .parked import Parked, Stowing, Tier
from .pool import Pool
from .quotas import UNLIMITED
from .registry import Registry, commit
from .results import Progress, StowPlan
from .session import Session


def begin_suspend(registry: Registry, session: Session, progress: Progress) -> StowPlan:
    """Take slots, make the lease busy."""
    lease = registry.standing(session, progress)
    if lease.scratch:
        raise InvalidArgumentError("a scratch lease holds queries of one call; release it instead")
    source = stowed_blocks(lease, progress.length)
    slots = parking_slots(registry, lease, source.size)
    commit(lease, progress)
    lease.job = Stowing(slots)
    return StowPlan(lease, source, slots)


def parking_slots(registry: Registry, lease: Lease, count: int) -> IntArray:
    """Slots for so many of the lease's blocks. Raises QuotaExceededError, TierFullError."""
    limit = registry.quotas.of(registry.tenants[lease.tenant]).max_parked_blocks
    if limit != UNLIMITED:  # counting costs as much as there are leases
        mates = [other for other in registry.leases.values() if other.tenant == lease.tenant]
        parked = sum([other.parked_blocks for other in mates])
        if parked + count > limit:
            raise QuotaExceededError(
                f"{count} blocks to be parked by tenant {lease.tenant}, which may park {limit} and has "
                f"parked {parked}; resume or release suspended leases, drop checkpoints, or have "
                "max_parked_blocks of the tenant raised in kvd.toml",
                tenant=lease.tenant,
                wanted_blocks=count,
                parked_blocks=parked,
                max_parked_blocks=limit,
            )
    return take_slots(registry, Tier.HOST, registry.pool_of(lease), count)


def stowed_blocks(lease: Lease, length: int) -> IntArray:
    """Blocks that hold tokens, and all of a streaming lease, whose table is as long for ever."""
    return lease.table if lease.streams else lease.table[: -(-length // lease.block_size)]


def finish_suspend(registry: Registry, lease_id: int, checksums: Sequence[int]) -> Lease:
    """The bytes are in the slots: all blocks go back."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Stowing), f"lease {lease_id} is not being suspended"
    lease.parked = parked_of(lease, job.slots, checksums)
    empty_table(registry, registry.pool_of(lease), lease)
    lease.fate = LeaseState.SUSPENDED
    lease.generation += 1
    end_job(registry, lease, None)
    return lease


def parked_of(lease: Lease, slots: IntArray, checksums: Sequence[int]) -> Parked:
    """As the lease stands now. Raises InvalidArgumentError if there is no checksum for each slot."""
    if len(checksums) != slots.size:
        raise InvalidArgumentError(f"{len(checksums)} checksums of {slots.size} slots")
    standing = lease.length, lease.position, lease.compressed_length, lease.observed_length
    return Parked(Tier.HOST, slots, np.array(checksums, np.uint32), *standing)


def empty_table(registry: Registry, pool: Pool, lease: Lease) -> None:
    """Own blocks become free, shared ones lose a holder."""
    tenant = registry.tenants[lease.tenant]
    if lease.sealed_blocks:
        pool.unshare(lease.sealed, tenant)
    if own := lease.blocks.runs(lease.sealed_blocks) if lease.sealed_blocks < len(lease.blocks) else []:
        pool.give_back(own, BlockState.LEASED, tenant)
    lease.blocks, lease.sealed_blocks = BlockTable(NO_BLOCKS), 0


def abort_suspend(registry: Registry, lease_id: int) -> Lease:
    """The copy failed: the lease is as it was."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Stowing), f"lease {lease_id} is not being suspended"
    registry.arenas[Tier.HOST].give(registry.pool_of(lease), job.slots)
    end_job(registry, lease, None)
    return lease
