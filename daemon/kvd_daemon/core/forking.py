"""Fork: several leases go on from one, sharing all it has, until each writes.

Shared blocks are sealed without a name: nobody finds them, and when their last holder is gone they are free.
The last one is shared too, half full as it may be. Who extends then, diverges: another block takes its place
and is filled with a copy before the call answers; the last holder takes it back as it is.
"""

import numpy as np

from kvd.errors import InvalidArgumentError, LimitExceededError

from .free_runs import Run, ids_of
from .lease import BlockTable, Lease
from .pool import Pool
from .registry import Registry, commit
from .results import Forked, Progress
from .session import Session


def fork(registry: Registry, session: Session, progress: Progress, count: int, now_ns: int) -> Forked:
    """`count` more leases with all tokens of that one, or an error and none. No byte is copied."""
    _check_count(registry, session, count)
    lease = registry.standing(session, progress)
    if lease.scratch or lease.streams:
        kind = "scratch" if lease.scratch else "streaming"
        raise InvalidArgumentError(f"blocks of a {kind} lease are written again, they cannot be shared")
    commit(lease, progress)
    pool, used = registry.pool_of(lease), lease.used_blocks
    pool.freeze(lease.table[lease.sealed_blocks : used])
    lease.sealed_blocks = used
    return Forked(lease, [_child(registry, session, lease, now_ns) for _ in range(count)])


def _check_count(registry: Registry, session: Session, count: int) -> None:
    limits = registry.limits
    if not 1 <= count <= limits.items_per_call:
        raise InvalidArgumentError(f"{count} forks; 1 to {limits.items_per_call} in one call are possible")
    registry.fences.require(count)
    leases = len(session.leases) + count
    if leases > limits.leases_per_session:
        raise LimitExceededError(
            f"{leases} leases in one session, {limits.leases_per_session} allowed; release some",
            limit=limits.leases_per_session,
        )


def _child(registry: Registry, session: Session, parent: Lease, now_ns: int) -> Lease:
    pool, shared = registry.pool_of(parent), parent.sealed
    pool.share(shared, registry.tenants[parent.tenant])
    registry.last_lease_id += 1
    lease = Lease(
        lease_id=registry.last_lease_id,
        pool=parent.pool,
        session_id=session.session_id,
        tenant=parent.tenant,
        policy=parent.policy,
        scratch=False,
        block_size=parent.block_size,
        created_ns=now_ns,
        blocks=BlockTable(shared),
        length=parent.length,
        position=parent.position,
        sealed_blocks=shared.size,
        compressed_length=parent.compressed_length,
        observed_length=parent.observed_length,
        fence_slot=registry.fences.take(),
        floor=parent.floor,
    )
    registry.fences.show(lease)
    registry.leases[lease.lease_id] = session.leases[lease.lease_id] = lease
    pool.leases.add(lease.lease_id)
    return lease


def needs_copy(pool: Pool, lease: Lease) -> bool:
    """Whether others have the shared tail too, so that a lease that writes there needs a block of its own."""
    return bool(pool.blocks.holders[lease.sealed[-1]] > 1)


def take_back(pool: Pool, lease: Lease) -> None:
    """Nobody else has the tail any more: it is written on as it is."""
    pool.thaw(lease.sealed[-1:])
    lease.sealed_blocks -= 1


def diverge(pool: Pool, lease: Lease, runs: list[Run]) -> tuple[int, int]:
    """The first of these new blocks takes the tail's place, the others follow; answers what to copy where.

    The tail keeps its holder until that is done.
    """
    table, new, at = lease.table, ids_of(runs), lease.sealed_blocks - 1
    lease.blocks = BlockTable(np.concatenate((table[:at], new[:1], table[at + 1 :], new[1:])))
    lease.sealed_blocks = at
    lease.generation += 1
    return int(table[at]), int(new[0])


def shares_scores(pool: Pool, lease: Lease) -> bool:
    """Whether scores of this lease's blocks may be those of others' too, so that it must not write any.

    Blocks shared by name have none. Those of a fork have them if it had, also where a lease has started anew
    since and has kept the blocks, which only a compression does.
    """
    if not lease.sealed_blocks or not (lease.observed_length or lease.compressed_length):
        return False
    return not all(pool.prefixes.has_name(block_id) for block_id in lease.sealed.tolist())
