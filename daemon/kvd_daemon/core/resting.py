"""Resting leases: their worker has promised to leave them alone, so that the daemon may shrink them.

Between two turns of a chat nobody reads a lease. While it rests it can be compressed by a policy that needs
no queries, down to the floor that its worker has set, and its blocks go to whoever waits for some.
"""

from typing import NamedTuple

import numpy as np

from kvd.errors import InvalidArgumentError
from kvd.policy import Policy

from .compressing import begin
from .jobs import refuse_scratch
from .lease import Lease, LeaseState, with_sinks
from .planning import choose
from .registry import Registry, check_tokens, commit, refuse_unless_active
from .results import CompressPlan, Progress, Unchanged
from .session import Session


def rest(registry: Registry, session: Session, progress: Progress, floor: int | None) -> Lease:
    """It rests from now on. `floor` tokens and the sinks are left at least, 0: all; None: as leased."""
    check_tokens(0, floor or 0)
    lease = registry.standing(session, progress)
    refuse_scratch(lease)
    commit(lease, progress)
    lease.resting_floor = lease.floor if floor is None else with_sinks(floor, lease.policy)
    lease.fate = LeaseState.RESTING
    registry.fences.show(lease)
    return lease


def wake(registry: Registry, session: Session, lease_id: int) -> Lease:
    """Its worker's again, as it is by now; one that does not rest stays as it is."""
    lease = registry.owned(session, lease_id)
    if lease.job is None and lease.fate is LeaseState.RESTING:
        lease.fate, lease.resting_floor = LeaseState.ACTIVE, 0
        registry.fences.show(lease)
    refuse_unless_active(lease)
    return lease


def can_give(lease: Lease) -> bool:
    """Whether it rests with more tokens than it has to keep."""
    resting = lease.fate is LeaseState.RESTING and lease.job is None
    return resting and not lease.streams and 0 < lease.resting_floor < lease.length


def could_be_compressible(lease: Lease) -> bool:
    """Whether its worker wants it pruned when blocks are short, and there may be something to prune.

    As far as its blocks tell: its worker may have filled them and not said so yet.
    """
    return not lease.streams and 0 < lease.floor < lease.capacity


class Gift(NamedTuple):
    """What pruning a resting lease gives, in blocks, and how many have to be free until that is done."""

    blocks: int
    meanwhile: int


def gift(registry: Registry, lease: Lease) -> Gift:
    """Of a lease that can give. Shared blocks stay as they are, so one that has some needs others."""
    assert can_give(lease), f"lease {lease.lease_id} does not rest, or has nothing to give"
    pool = registry.pool_of(lease)
    shared = int(np.count_nonzero(pool.blocks.holders[lease.sealed] > 1)) if lease.sealed_blocks else 0
    kept = pool.spec.blocks_for(lease.resting_floor)
    return Gift(max(0, len(lease.blocks) - shared - kept), kept if lease.sealed_blocks else 0)


def begin_press(registry: Registry, lease_id: int, policy: Policy) -> CompressPlan | Unchanged:
    """Plan to prune a resting lease; nobody's queries vote. Busy until finished or aborted, as ever."""
    lease = registry.leases[lease_id]
    assert can_give(lease), f"lease {lease_id} does not rest, or has nothing to give"
    if policy.needs_queries:
        raise InvalidArgumentError(f"{policy} needs queries, and a lease that rests has none")
    where = Progress(lease_id, lease.generation, lease.length, lease.position)
    target = choose(registry, lease, policy, where, None)
    return Unchanged(lease) if target is None else begin(registry, lease, target, None)
