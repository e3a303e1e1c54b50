"""Compression and observation as the core sees them: begin, then finish or abort.

Between the two the lease is busy and keeps its table, so nothing is lost if the job fails.
"""

from collections.abc import Sequence

import numpy as np

from kvd.errors import InvalidArgumentError
from kvd.policy import H2O, Policy, Streaming

from .blocks import BlockState
from .ending import settle
from .free_runs import IntArray, runs_of
from .lease import BlockTable, Compacting, Lease, LeaseState, Lending, Observing
from .planning import Target, check_queries, choose
from .pool import Pool
from .registry import Registry, commit
from .results import Compressed, CompressPlan, ObservePlan, Progress, QueryShape, Unchanged
from .session import Session

NO_BLOCKS = np.zeros(0, np.int32)


def begin_compress(
    registry: Registry,
    session: Session,
    progress: Progress,
    policy: Policy | None,
    queries: QueryShape | None,
) -> CompressPlan | Unchanged:
    """Decide, take the destination, make the lease busy."""
    lease = registry.standing(session, progress)
    _refuse_scratch(lease)
    policy = lease.policy if policy is None else policy
    if queries is not None:
        check_queries(registry, session, lease, queries)
    if lease.streams:
        if not isinstance(policy, Streaming):
            raise InvalidArgumentError("a streaming lease prunes itself; lease with another policy instead")
        target = None
    else:
        target = choose(registry.pool_of(lease), lease, policy, progress, queries)
    commit(lease, progress)
    if target is None:
        return Unchanged(lease)
    return _begin(registry, lease, target, _lend(registry, lease, queries))


def _refuse_scratch(lease: Lease) -> None:
    if lease.scratch:
        raise InvalidArgumentError("a scratch lease holds queries, there is nothing to compress or observe")


def _lend(registry: Registry, lease: Lease, queries: QueryShape | None) -> int | None:
    """The scratch lease is busy while its queries are read."""
    if queries is None or queries.scratch_lease_id is None:
        return None
    registry.leases[queries.scratch_lease_id].job = Lending(lease.lease_id)
    return queries.scratch_lease_id


def _begin(registry: Registry, lease: Lease, target: Target, scratch_lease_id: int | None) -> CompressPlan:
    pool = registry.pool_of(lease)
    source, foreign = lease.table[: lease.used_blocks], NO_BLOCKS
    if target.in_place:
        destination = source[: target.destination_blocks]
    elif target.by_block:
        destination = NO_BLOCKS
    else:
        destination, foreign = pool.grant(target.destination_blocks, registry.tenants[lease.tenant])
    lease.job = Compacting(
        destination=destination,
        in_place=target.in_place,
        by_block=target.by_block,
        policy=target.policy,
        target_tokens=target.tokens,
        window=target.window,
        scratch_lease_id=scratch_lease_id,
    )
    return CompressPlan(
        lease=lease,
        policy=target.policy,
        source=source,
        destination=destination,
        in_place=target.in_place,
        by_block=target.by_block,
        target_tokens=target.tokens,
        window=target.window,
        scrub=runs_of(np.sort(foreign)),
    )


def finish_compress(registry: Registry, lease_id: int, kept: int | Sequence[int]) -> Compressed:
    """The kernel worker is done: swap the table, free what is left over, count."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Compacting), f"lease {lease_id} is not being compressed"
    pool = registry.pool_of(lease)
    before, blocks_before = lease.length, len(lease.blocks)
    if job.by_block:
        _keep_blocks(pool, lease, _checked_indices(lease, job, kept))
    else:
        if kept != job.target_tokens:
            raise InvalidArgumentError(f"{kept} tokens kept, {job.target_tokens} were to be")
        _keep_tokens(registry, pool, lease, job)
    lease.compressed_length = lease.length
    lease.observed_length = lease.length if isinstance(job.policy, H2O) else 0
    lease.generation += 1
    saved = blocks_before - len(lease.blocks)
    lease.blocks_saved += saved
    pool.totals.compressions += 1
    pool.totals.blocks_saved += saved
    pool.totals.tokens_dropped += before - lease.length
    result = Compressed(
        lease, before, lease.length, blocks_before, len(lease.blocks), not (job.in_place or job.by_block)
    )
    _end_job(registry, lease, job.scratch_lease_id)
    return result


def _keep_tokens(registry: Registry, pool: Pool, lease: Lease, job: Compacting) -> None:
    if job.in_place:
        pool.blocks.reassign(job.destination)
        pool.give_back(lease.table[job.destination.size :], BlockState.LEASED)
    else:
        pool.blocks.cleaned(job.destination, registry.tenants[lease.tenant])
        _let_go(pool, lease, np.ones(len(lease.blocks), bool))
    lease.blocks = BlockTable(job.destination)
    lease.length = job.target_tokens


def _keep_blocks(pool: Pool, lease: Lease, kept: IntArray) -> None:
    leaving = np.ones(len(lease.blocks), bool)
    leaving[kept] = False
    table, sealed_kept = lease.table[kept], int(np.count_nonzero(kept < lease.sealed_blocks))
    lacking = lease.used_blocks * lease.block_size - lease.length
    _let_go(pool, lease, leaving)
    lease.blocks, lease.sealed_blocks = BlockTable(table), sealed_kept
    lease.length = kept.size * lease.block_size - lacking


def _let_go(pool: Pool, lease: Lease, leaving: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
    """Own blocks become free, shared ones lose a holder. The caller sets the new table."""
    sealed = lease.sealed[leaving[: lease.sealed_blocks]]
    own = lease.writable[leaving[lease.sealed_blocks :]]
    if sealed.size:
        pool.unshare(sealed)
    if own.size:
        pool.give_back(own, BlockState.LEASED)
    lease.sealed_blocks = 0


def _checked_indices(lease: Lease, job: Compacting, kept: int | Sequence[int]) -> IntArray:
    """Raises InvalidArgumentError unless they ascend, are as many as planned, and hold sinks and window."""
    assert not isinstance(kept, int), "by block, the kept block indices are told"
    indices = np.array(kept, np.int32)
    wanted = job.target_tokens // lease.block_size
    if indices.size != wanted or (np.diff(indices) <= 0).any():
        raise InvalidArgumentError(f"{indices.size} kept blocks; {wanted} in ascending order were to be")
    if indices[0] < 0 or indices[-1] >= lease.used_blocks:
        raise InvalidArgumentError(f"kept blocks must be from 0 to {lease.used_blocks - 1}")
    sinks = np.arange(-(-job.policy.sinks // lease.block_size))
    window = np.arange((lease.length - job.window) // lease.block_size, lease.used_blocks)
    if not np.isin(np.concatenate((sinks, window)), indices).all():
        raise InvalidArgumentError("the blocks of the sinks and of the window must be among the kept ones")
    return indices


def begin_observe(
    registry: Registry, session: Session, progress: Progress, queries: QueryShape
) -> ObservePlan:
    """Make the lease busy while the attention of its last tokens is added to the running scores."""
    lease = registry.standing(session, progress)
    _refuse_scratch(lease)
    if lease.streams or lease.sealed_blocks:
        kind = "recycled" if lease.streams else "shared"
        raise InvalidArgumentError(f"running scores are kept by block, those of {kind} blocks cannot be")
    check_queries(registry, session, lease, queries)
    unobserved = progress.length - lease.observed_length
    if queries.tokens > unobserved:
        raise InvalidArgumentError(
            f"queries of {queries.tokens} tokens, but only the last {unobserved} were not observed yet; "
            "none may vote twice"
        )
    commit(lease, progress)
    lease.job = Observing(_lend(registry, lease, queries))
    return ObservePlan(lease, lease.table[: lease.used_blocks], queries.tokens, lease.observed_length)


def finish_observe(registry: Registry, lease_id: int) -> Lease:
    """All slots in use have running scores now."""
    lease = registry.leases[lease_id]
    assert isinstance(lease.job, Observing), f"lease {lease_id} is not being observed"
    lease.observed_length = lease.length
    _end_job(registry, lease, lease.job.scratch_lease_id)
    return lease


def abort_compress(registry: Registry, lease_id: int, lost: bool) -> Lease:
    """The job of a compression or observation failed. Lost: the lease's bytes were already moving."""
    lease = registry.leases[lease_id]
    job = lease.job
    assert isinstance(job, Compacting | Observing), f"lease {lease_id} has no job to abort"
    if isinstance(job, Compacting) and not job.in_place and job.destination.size:
        registry.pool_of(lease).give_back(job.destination, BlockState.LEASED)
    if lost:
        lease.fate = LeaseState.LOST
    _end_job(registry, lease, job.scratch_lease_id)
    return lease


def _end_job(registry: Registry, lease: Lease, scratch_lease_id: int | None) -> None:
    lease.job = None
    settle(registry, lease)
    if scratch_lease_id is not None:
        scratch = registry.leases[scratch_lease_id]
        scratch.job = None
        settle(registry, scratch)
