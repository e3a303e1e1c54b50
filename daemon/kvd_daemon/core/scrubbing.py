"""Memory that changes tenant is scrubbed first, and a shared block that is to be written on is copied.

If any block of a call holds another tenant's bytes or has to be a copy, all leases of that call are busy
until the engine says `scrubbed`, or `scrub_failed`, which undoes the call.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .blocks import BlockState
from .ending import reclaim, settle
from .free_runs import NO_BLOCKS, IntArray, Run, runs_of
from .lease import BlockTable, Lease, Mark, Scrubbing, Standing
from .registry import Registry

NO_COPIES: Mapping[int, tuple[int, int]] = {}


def begin_scrub(
    leases: list[Lease],
    foreign: dict[int, IntArray],
    before: dict[int, Mark],
    copies: Mapping[int, tuple[int, int]] = NO_COPIES,
) -> list[Run]:
    """The runs to be zeroed. All `leases` of the call are busy until that and the copies are done.

    `foreign` has their new blocks with another tenant's bytes, `before` what an extended one was, `copies`
    from where to where a shared tail is copied.
    """
    for lease in leases:
        mark = before.get(lease.lease_id)
        dirty = foreign.get(lease.lease_id, NO_BLOCKS)
        standing = mark.standing() if mark is not None else None
        lease.job = Scrubbing(dirty, standing, copies.get(lease.lease_id))
    return runs_of(np.sort(np.concatenate([*foreign.values()]))) if foreign else []


def scrubbed(registry: Registry, lease_ids: Sequence[int]) -> None:
    """The blocks hold zeros, or their copies, now: the leases are free to use."""
    for lease, job in _scrubbing(registry, lease_ids):
        pool, tenant = registry.pool_of(lease), registry.tenants[lease.tenant]
        pool.blocks.cleaned(job.foreign, tenant)
        if job.copy is not None:
            pool.unshare(np.array(job.copy[:1], np.int32), tenant)
        lease.job = None
        settle(registry, lease)


def scrub_failed(registry: Registry, lease_ids: Sequence[int]) -> None:
    """The call is undone: new leases are dropped, extended ones are as they were."""
    for lease, job in _scrubbing(registry, lease_ids):
        lease.job = None
        if job.before is None:
            reclaim(registry, lease)
        else:
            _undo(registry, lease, job, job.before)
            registry.fences.show(lease)
            settle(registry, lease)


def _scrubbing(registry: Registry, lease_ids: Sequence[int]) -> list[tuple[Lease, Scrubbing]]:
    found = []
    for lease_id in lease_ids:
        lease = registry.leases.get(lease_id)
        assert lease is not None, f"lease {lease_id} ended while it was scrubbed"
        assert isinstance(lease.job, Scrubbing), f"lease {lease_id} was not being scrubbed"
        found.append((lease, lease.job))
    return found


def _undo(registry: Registry, lease: Lease, job: Scrubbing, before: Standing) -> None:
    pool = registry.pool_of(lease)
    added = lease.blocks.runs(before.table.size)
    if job.copy is not None:
        added = [*added, (job.copy[1], 1)]
    elif before.sealed_blocks is not None and before.sealed_blocks > lease.sealed_blocks:
        pool.freeze(lease.table[lease.sealed_blocks : before.sealed_blocks])
    if added:
        pool.give_back(added, BlockState.LEASED, registry.tenants[lease.tenant])
    if before.sealed_blocks is not None:
        lease.sealed_blocks = before.sealed_blocks
    lease.blocks = BlockTable(before.table)
    lease.generation, lease.length, lease.position = before.generation, before.length, before.position
