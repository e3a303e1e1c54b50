"""Memory that changes tenant is scrubbed first.

If any block of a call holds another tenant's bytes, all leases of that call are busy until the engine says
`scrubbed`, or `scrub_failed`, which undoes the call.
"""

from collections.abc import Sequence

import numpy as np

from .blocks import BlockState
from .ending import reclaim, settle
from .free_runs import NO_BLOCKS, IntArray, Run, runs_of
from .lease import BlockTable, Lease, Mark, Scrubbing, Standing
from .registry import Registry


def begin_scrub(leases: list[Lease], foreign: dict[int, IntArray], before: dict[int, Mark]) -> list[Run]:
    """The runs to be zeroed. All `leases` of the call are busy until then.

    `foreign` has their new blocks with another tenant's bytes, `before` what an extended one was.
    """
    for lease in leases:
        mark = before.get(lease.lease_id)
        dirty = foreign.get(lease.lease_id, NO_BLOCKS)
        lease.job = Scrubbing(dirty, mark.standing() if mark is not None else None)
    return runs_of(np.sort(np.concatenate([*foreign.values()])))


def scrubbed(registry: Registry, lease_ids: Sequence[int]) -> None:
    """The blocks hold zeros now: the leases are free to use."""
    for lease, job in _scrubbing(registry, lease_ids):
        registry.pool_of(lease).blocks.cleaned(job.foreign, registry.tenants[lease.tenant])
        lease.job = None
        settle(registry, lease)


def scrub_failed(registry: Registry, lease_ids: Sequence[int]) -> None:
    """The call is undone: new leases are dropped, extended ones are as they were."""
    for lease, job in _scrubbing(registry, lease_ids):
        lease.job = None
        if job.before is None:
            reclaim(registry, lease)
        else:
            _undo(registry, lease, job.before)
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


def _undo(registry: Registry, lease: Lease, before: Standing) -> None:
    if added := lease.blocks.runs(before.table.size):
        registry.pool_of(lease).give_back(added, BlockState.LEASED, registry.tenants[lease.tenant])
    lease.blocks = BlockTable(before.table)
    lease.generation, lease.length, lease.position = before.generation, before.length, before.position
