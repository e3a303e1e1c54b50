"""Resting leases: their worker has promised to leave them alone, so that the daemon may shrink them.

Between two turns of a chat nobody reads a lease. While it rests it can be compressed by a policy that needs
no queries, down to the floor that its worker has set, and its blocks go to whoever waits for some.
"""

from kvd.errors import InvalidArgumentError
from kvd.policy import Policy

from .compressing import begin
from .jobs import refuse_scratch
from .lease import Lease, LeaseState
from .planning import choose
from .registry import Registry, check_tokens, commit, refuse_unless_active
from .results import CompressPlan, Progress, Unchanged
from .session import Session


def rest(registry: Registry, session: Session, progress: Progress, floor: int | None) -> Lease:
    """It rests from now on. `floor` tokens are left at least, 0: all of them; None: as it was leased."""
    check_tokens(0, floor or 0)
    lease = registry.standing(session, progress)
    refuse_scratch(lease)
    commit(lease, progress)
    if floor is not None:
        lease.floor = floor
    lease.fate = LeaseState.RESTING
    registry.fences.show(lease)
    return lease


def wake(registry: Registry, session: Session, lease_id: int) -> Lease:
    """Its worker's again, as it is by now; one that does not rest stays as it is."""
    lease = registry.owned(session, lease_id)
    if lease.job is None and lease.fate is LeaseState.RESTING:
        lease.fate = LeaseState.ACTIVE
        registry.fences.show(lease)
    refuse_unless_active(lease)
    return lease


def can_give(lease: Lease) -> bool:
    """Whether it rests with more tokens than it has to keep."""
    resting = lease.fate is LeaseState.RESTING and lease.job is None
    return resting and is_compressible(lease)


def is_compressible(lease: Lease) -> bool:
    """Whether its worker wants it pruned when blocks are short, and there is something to prune."""
    return could_be_compressible(lease) and lease.floor < lease.length


def could_be_compressible(lease: Lease) -> bool:
    """The same as far as its blocks tell: its worker may have filled them and not said so yet."""
    return not lease.streams and 0 < lease.floor < lease.capacity


def begin_press(registry: Registry, lease_id: int, policy: Policy) -> CompressPlan | Unchanged:
    """Plan to prune a resting lease; nobody's queries vote. Busy until finished or aborted, as ever."""
    lease = registry.leases[lease_id]
    assert can_give(lease), f"lease {lease_id} does not rest, or has nothing to give"
    if policy.needs_queries:
        raise InvalidArgumentError(f"{policy} needs queries, and a lease that rests has none")
    where = Progress(lease_id, lease.generation, lease.length, lease.position)
    target = choose(registry, lease, policy, where, None)
    return Unchanged(lease) if target is None else begin(registry, lease, target, None)
