"""What becomes of a device when the daemon that held it died and another one took over.

Jobs died with it, some processes and some pools' memory may have gone too. Nobody is asked anything that
only the dead daemon knew: a job that may have moved bytes in place has lost its lease.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import handing, pinning
from .copies import drop_copies
from .ending import end_session, unshelve
from .fetching import abort_fetch, lose_parked
from .jobs import abort
from .lease import LIVE, BlockTable, Compacting, Lease, LeaseState, Observing, Scrubbing
from .moving import forget_moves
from .parked import Fetching, Stowing, Tier
from .pool import Pool
from .promoting import forget_pool
from .registry import Registry
from .scrubbing import scrub_failed
from .session import Session, SessionState
from .suspending import abort_suspend


@dataclass(frozen=True)
class Losses:
    """Pools whose memory is gone, sessions whose processes are, pools whose slots are (of host, of disk)."""

    pools: Sequence[str] = ()
    sessions: Sequence[str] = ()
    arenas: Sequence[str] = ()
    disks: Sequence[str] = ()


@dataclass(frozen=True)
class Recovered:
    """Sessions and leases that are back; leases lost with memory or with a job; pools that are no more."""

    sessions: list[Session]
    leases: list[Lease]
    lost_leases: list[Lease]
    lost_pools: list[Pool]


BACK = (*LIVE, LeaseState.SHELVED)


def recover(registry: Registry, now_ns: int, grace_ns: int, losses: Losses) -> Recovered:
    """Undo what was under way, end and lose what is gone; everybody else gets a grace time to come back."""
    lost = _end_jobs(registry)
    for session_id in losses.sessions:
        end_session(registry, registry.known_session(session_id))
    forget_moves(registry)
    forget_pool(registry)
    for tier, gone in ((Tier.HOST, losses.arenas), (Tier.DISK, losses.disks)):
        drop_copies(registry, tier, gone)
        lost += _lose_slots(registry, tier, gone)
    pools = [registry.pool(name) for name in losses.pools]
    for pool in pools:
        lost += _lose(registry, pool)
    pinning.outlast(registry, now_ns + grace_ns)
    handing.outlast(registry, now_ns + grace_ns)
    for session in registry.sessions.values():
        if session.state is not SessionState.EXPIRED:
            session.state = SessionState.DETACHED
            session.renewed_ns = now_ns + max(0, grace_ns - session.ttl_ns)
    back = [lease for lease in registry.leases.values() if lease.state in BACK]
    still_known = [lease for lease in lost if lease.lease_id in registry.leases]
    return Recovered(list(registry.sessions.values()), back, still_known, pools)


def _end_jobs(registry: Registry) -> list[Lease]:
    """No lease is busy afterwards. Answers those that are lost by that."""
    scrubbed = [lease.lease_id for lease in registry.leases.values() if isinstance(lease.job, Scrubbing)]
    scrub_failed(registry, scrubbed)
    lost = []
    for lease in list(registry.leases.values()):
        if isinstance(lease.job, Observing):
            abort(registry, lease.lease_id, lost=True)
        elif isinstance(lease.job, Compacting):
            in_place = lease.job.target.in_place
            abort(registry, lease.lease_id, lost=in_place)
            lost += [lease] * in_place
        elif isinstance(lease.job, Stowing):
            abort_suspend(registry, lease.lease_id)
        elif isinstance(lease.job, Fetching):
            abort_fetch(registry, lease.lease_id, lost=False)
    return lost


def _lose_slots(registry: Registry, tier: Tier, pools: Sequence[str]) -> list[Lease]:
    """What those pools had there is gone. Answers the leases that are lost by that."""
    gone = []
    for lease in [lease for lease in registry.leases.values() if lease.pool in pools]:
        checkpoint, parked = lease.checkpoint, lease.parked
        if checkpoint is not None and checkpoint.tier is tier:
            registry.drop_checkpoint(lease)
        if parked is not None and parked.tier is tier and parked.slots.size:
            lose_parked(registry, lease)
            gone.append(lease)
    return gone


def _lose(registry: Registry, pool: Pool) -> list[Lease]:
    """The pool is no more. Its leases hold nothing; until they are released they say why."""
    forget_pool(registry, pool.name)
    leases = [registry.leases[lease_id] for lease_id in sorted(pool.leases)]
    lost = [lease for lease in leases if lease.fate in LIVE]
    for lease in leases:
        registry.drop_parked(lease)
        lease.blocks = BlockTable(np.zeros(0, np.int32))
        lease.length = lease.sealed_blocks = lease.compressed_length = lease.observed_length = 0
        if lease.fate in LIVE:
            lease.fate = LeaseState.LOST
        if lease.fate is LeaseState.SHELVED:  # whoever adopts is told that it is not there
            unshelve(registry, lease)
            continue
        registry.fences.show(lease)
    for pin in [pin for pin in registry.pins.values() if pin.pool == pool.name]:
        pinning.forget(registry, pin)
    for tenant, held in pool.holdings.held.items():
        registry.quotas.count(tenant, -held)
    del registry.pools[pool.name]
    registry.forget_slots(pool.name)
    return lost
