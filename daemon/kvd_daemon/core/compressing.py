"""Compression as the core sees it: begin, then finish or abort.

Between the two the lease is busy and keeps its table, so nothing is lost if the job fails.
"""

from collections.abc import Sequence

import numpy as np

from kvd.errors import InvalidArgumentError
from kvd.policy import H2O, Policy, Streaming

from .blocks import BlockState
from .free_runs import NO_BLOCKS, IntArray, ids_of, runs_of
from .jobs import abort as abort_job
from .jobs import end_job, lend, refuse_scratch
from .lease import BlockTable, Compacting, Lease, LeaseState, Target
from .planning import check_queries, choose
from .pool import Pool
from .registry import Registry, commit
from .results import Compressed, CompressPlan, Progress, QueryShape, Unchanged
from .session import Session
from .suspending import empty_table, parked_of, parking_slots


def begin_compress(
    registry: Registry,
    session: Session,
    progress: Progress,
    policy: Policy | None,
    queries: QueryShape | None,
    park: bool,
) -> CompressPlan | Unchanged:
    """Decide, take the destination and slots for a checkpoint, make the lease busy."""
    lease = registry.standing(session, progress)
    refuse_scratch(lease)
    policy = lease.policy if policy is None else policy
    if queries is not None:
        check_queries(registry, session, lease, queries)
    if lease.streams:
        if not isinstance(policy, Streaming):
            raise InvalidArgumentError("a streaming lease prunes itself; lease with another policy instead")
        target = None
    else:
        target = choose(registry, lease, policy, progress, queries)
    parks = park and target is not None and lease.checkpoint is None
    slots = NO_BLOCKS
    if parks:
        count = registry.pool_of(lease).spec.blocks_for(progress.length)
        slots = parking_slots(registry, lease, count)
    commit(lease, progress)
    if target is None:
        return Unchanged(lease)
    return begin(registry, lease, target, queries, slots)


def begin(
    registry: Registry,
    lease: Lease,
    target: Target,
    queries: QueryShape | None,
    slots: IntArray = NO_BLOCKS,
) -> CompressPlan:
    """What was decided begins."""
    destination, foreign = _take_destination(registry, lease, target)
    lease.job = Compacting(target, destination, lend(registry, lease, queries), slots)
    registry.fences.show(lease)
    return CompressPlan(
        lease=lease,
        policy=target.policy,
        source=lease.table[: lease.used_blocks],
        destination=destination,
        in_place=target.in_place,
        by_block=target.by_block,
        target_tokens=target.tokens,
        window=target.window,
        scrub=runs_of(np.sort(foreign)),
        slots=slots,
    )


def _take_destination(registry: Registry, lease: Lease, target: Target) -> tuple[IntArray, IntArray]:
    """Where the kept tokens go, and which of those blocks hold another tenant's bytes."""
    if target.by_block:
        return NO_BLOCKS, NO_BLOCKS
    if target.in_place:
        return lease.table[: target.destination_blocks], NO_BLOCKS
    runs, foreign = registry.pool_of(lease).grant(target.destination_blocks, registry.tenants[lease.tenant])
    return ids_of(runs), foreign


def finish_compress(
    registry: Registry, lease_id: int, kept: int | Sequence[int], checksums: Sequence[int]
) -> Compressed:
    """The kernel worker is done: swap the table, free what is left over, count."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Compacting), f"lease {lease_id} is not being compressed"
    pool = registry.pool_of(lease)
    before, blocks_before = lease.length, len(lease.blocks)
    checkpoint = parked_of(lease, job.slots, checksums) if job.slots.size else lease.checkpoint
    if job.target.by_block:
        _keep_blocks(registry, lease, _checked_indices(lease, job, kept))
    else:
        if kept != job.target.tokens:
            raise InvalidArgumentError(f"{kept} tokens kept, {job.target.tokens} were to be")
        _keep_tokens(registry, pool, lease, job)
    lease.compressed_length = lease.length
    lease.observed_length = lease.length if isinstance(job.target.policy, H2O) else 0
    lease.generation += 1
    lease.checkpoint = checkpoint
    saved = blocks_before - len(lease.blocks)
    lease.blocks_saved += saved
    if lease.fate is LeaseState.RESTING:
        lease.gave_blocks += saved
    pool.totals.compressions += 1
    pool.totals.blocks_saved += saved
    pool.totals.tokens_dropped += before - lease.length
    result = Compressed(
        lease,
        before,
        lease.length,
        blocks_before,
        len(lease.blocks),
        not (job.target.in_place or job.target.by_block),
    )
    end_job(registry, lease, job.scratch_lease_id)
    return result


def abort(registry: Registry, lease_id: int, lost: bool, checksums: Sequence[int]) -> Lease:
    """See jobs.abort. A lease whose bytes are lost, but were all copied into slots before, is suspended.

    Its generation stays: that is how its worker, which hears of it by an error, resumes it.
    """
    lease = registry.leases[lease_id]
    job = lease.job
    if not (lost and isinstance(job, Compacting) and job.slots.size and checksums):
        return abort_job(registry, lease_id, lost)
    lease.parked = parked_of(lease, job.slots, checksums)
    empty_table(registry, registry.pool_of(lease), lease)
    lease.fate = LeaseState.SUSPENDED
    end_job(registry, lease, job.scratch_lease_id)
    return lease


def _keep_tokens(registry: Registry, pool: Pool, lease: Lease, job: Compacting) -> None:
    if job.target.in_place:
        pool.blocks.reassign(runs_of(job.destination))
        leaving = lease.blocks.runs(job.destination.size)
        pool.give_back(leaving, BlockState.LEASED, registry.tenants[lease.tenant])
    else:
        pool.blocks.cleaned(job.destination, registry.tenants[lease.tenant])
        _let_go(registry, lease, np.ones(len(lease.blocks), bool))
    lease.blocks = BlockTable(job.destination)
    lease.length = job.target.tokens


def _keep_blocks(registry: Registry, lease: Lease, kept: IntArray) -> None:
    leaving = np.ones(len(lease.blocks), bool)
    leaving[kept] = False
    table, sealed_kept = lease.table[kept], int(np.count_nonzero(kept < lease.sealed_blocks))
    lacking = lease.used_blocks * lease.block_size - lease.length
    _let_go(registry, lease, leaving)
    lease.blocks, lease.sealed_blocks = BlockTable(table), sealed_kept
    lease.length = kept.size * lease.block_size - lacking


def _let_go(registry: Registry, lease: Lease, leaving: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
    """Own blocks become free, shared ones lose a holder. The caller sets the new table."""
    pool, tenant = registry.pool_of(lease), registry.tenants[lease.tenant]
    sealed = lease.sealed[leaving[: lease.sealed_blocks]]
    own = lease.writable[leaving[lease.sealed_blocks :]]
    if sealed.size:
        pool.unshare(sealed, tenant)
    if own.size:
        pool.give_back(runs_of(own), BlockState.LEASED, tenant)
    lease.sealed_blocks = 0


def _checked_indices(lease: Lease, job: Compacting, kept: int | Sequence[int]) -> IntArray:
    """Raises InvalidArgumentError unless they ascend, are as many as planned, and hold sinks and window."""
    assert not isinstance(kept, int), "by block, the kept block indices are told"
    indices = np.array(kept, np.int32)
    wanted = job.target.tokens // lease.block_size
    if indices.size != wanted or (np.diff(indices) <= 0).any():
        raise InvalidArgumentError(f"{indices.size} kept blocks; {wanted} in ascending order were to be")
    if indices[0] < 0 or indices[-1] >= lease.used_blocks:
        raise InvalidArgumentError(f"kept blocks must be from 0 to {lease.used_blocks - 1}")
    sinks = np.arange(-(-job.target.policy.sinks // lease.block_size))
    window = np.arange((lease.length - job.target.window) // lease.block_size, lease.used_blocks)
    if not np.isin(np.concatenate((sinks, window)), indices).all():
        raise InvalidArgumentError("the blocks of the sinks and of the window must be among the kept ones")
    return indices
