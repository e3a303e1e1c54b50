"""Messages out: from the core's and the engine's values."""

from collections import Counter
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from kvd.convert import spec_to_proto
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.core import UNLIMITED, Change, Lease, Pin, Pool, Session, Tier
from kvd_daemon.core.lease import LeaseState, Shelved
from kvd_daemon.engine.compressions import Outcome
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.inheritance import Recovery
from kvd_daemon.engine.sharing import LookedUp


def duration(ns: int) -> Duration:
    seconds, nanos = divmod(ns, 10**9)
    return Duration(seconds=seconds, nanos=nanos)


def timestamp(unix_ns: int) -> Timestamp:
    seconds, nanos = divmod(unix_ns, 10**9)
    return Timestamp(seconds=seconds, nanos=nanos)


def age(seconds: float | None) -> Duration | None:
    """Unset where there is none."""
    return None if seconds is None else duration(int(seconds * 1e9))


def show_lease(change: Change, state: pb.LeaseState) -> None:
    """Fill `state`, in its place: to be put into a reply later it would be copied."""
    lease = change.lease
    state.lease_id = lease.lease_id
    state.generation = lease.generation
    state.kept_blocks = change.kept_blocks
    for first, count in lease.blocks.runs(change.kept_blocks):
        state.appended.add(start=first, count=count)
    state.length = lease.length
    state.position = lease.position
    state.fence_slot = lease.fence_slot
    if lease.compressed_length:
        state.compressed_length = lease.compressed_length
    if lease.sealed_blocks:
        state.sealed_blocks = lease.sealed_blocks
    if change.skip_after:
        state.skip_after = change.skip_after


def pool_view(pool: Pool) -> pb.Pool:
    return pb.Pool(
        name=pool.name,
        spec=spec_to_proto(pool.spec),
        fingerprint=pool.spec.fingerprint(),
        blocks_total=pool.blocks_total,
        block_bytes=pool.spec.block_bytes,
        pool_id=pool.pool_id,
    )


def pool_status(engine: Engine, pool: Pool) -> pb.PoolStatus:
    counts = pool.counts
    waiting_calls, wanted_blocks = engine.admission.waiting_in(pool.name)
    leases = [lease for lease in map(engine.device.leases.__getitem__, pool.leases) if not lease.scratch]
    looked_up = engine.sharing.looked_up.get(pool.name, LookedUp())
    pinned = [pin.blocks for pin in engine.device.pins.values() if pin.pool == pool.name]
    return pb.PoolStatus(
        pool=pool_view(pool),
        blocks_free=counts.free,
        blocks_leased=counts.leased,
        blocks_sealed=counts.sealed,
        blocks_cached=counts.cached,
        blocks_quarantined=counts.quarantined,
        blocks_reserved=pool.blocks_reserved,
        sink_blocks_locked=sum(lease.sink_blocks for lease in leases),
        leases=len(leases),
        compressions=pool.totals.compressions,
        blocks_saved=pool.totals.blocks_saved,
        tokens_dropped=pool.totals.tokens_dropped,
        populated_bytes=engine.pools.populated_bytes(pool),
        total_bytes=pool.spec.pool_bytes(pool.blocks_total),
        waiting_calls=waiting_calls,
        wanted_blocks=wanted_blocks,
        leases_shelved=sum(lease.shelved is not None for lease in leases),
        leases_suspended=sum(lease.fate is LeaseState.SUSPENDED for lease in leases),
        parked_bytes=engine.parking.parked_bytes(pool),
        spilled_bytes=engine.parking.spilled_bytes(pool),
        blocks_copied=sum(engine.device.copied_blocks(tier, pool.name) for tier in Tier),
        blocks_copied_on_disk=engine.device.copied_blocks(Tier.DISK, pool.name),
        match_blocks_asked=looked_up.asked,
        match_blocks_found=looked_up.found,
        blocks_pinned=np.unique(np.concatenate(pinned)).size if pinned else 0,
    )


def tenant_infos(engine: Engine) -> list[pb.TenantInfo]:
    """All tenants that have a quota of their own, a session, a lease or a pin, by name."""
    device, quotas = engine.device, engine.device.quotas
    sessions = Counter(session.tenant for session in device.sessions.values())
    leases = Counter(lease.tenant for lease in device.leases.values())
    parked: Counter[str] = Counter()
    for lease in device.leases.values():
        parked[lease.tenant] += lease.parked_blocks
    pinned: Counter[str] = Counter()
    for pin in device.pins.values():
        pinned[pin.tenant] += pin.blocks.size if pin.is_hard else 0
    named = {tenant for tenant, index in device.tenants.items() if index in quotas.own}
    infos = []
    for tenant in sorted({*named, *sessions, *leases, *pinned}):
        index = device.tenants[tenant]
        quota = quotas.of(index)
        infos.append(
            pb.TenantInfo(
                tenant=tenant,
                guaranteed_blocks=quota.guaranteed_blocks,
                max_blocks=_limit(quota.max_blocks),
                pin_blocks=quota.pin_blocks,
                blocks=quotas.held.get(index, 0),
                sessions=sessions[tenant],
                leases=leases[tenant],
                waiting_calls=engine.admission.waiting_calls_of(tenant),
                pinned_blocks=pinned[tenant],
                max_parked_blocks=_limit(quota.max_parked_blocks),
                parked_blocks=parked[tenant],
            )
        )
    return infos


def _limit(blocks: int) -> int:
    """On the wire 0 is no limit."""
    return 0 if blocks == UNLIMITED else blocks


def lease_info(engine: Engine, lease: Lease, now_ns: int) -> pb.LeaseInfo:
    return pb.LeaseInfo(
        lease_id=lease.lease_id,
        pool=lease.pool,
        session_id=lease.session_id,
        tenant=lease.tenant,
        state=lease.state.value,
        generation=lease.generation,
        length=lease.length,
        position=lease.position,
        blocks=len(lease.blocks),
        sealed_blocks=lease.sealed_blocks,
        sink_blocks=lease.sink_blocks,
        policy=str(lease.policy),
        blocks_saved=lease.blocks_saved,
        floor_tokens=lease.resting_floor if lease.fate is LeaseState.RESTING else lease.floor,
        gave_blocks=lease.gave_blocks,
        create_time=timestamp(engine.wall_ns(lease.created_ns)),
        scratch=lease.scratch,
        **_shelf_fields(lease.shelved, now_ns),
    )


def _shelf_fields(shelved: Shelved | None, now_ns: int) -> dict[str, Any]:
    if shelved is None:
        return {}
    left = duration(max(0, shelved.expires_ns - now_ns))
    return {"shelf_key": shelved.key, "to_session": shelved.to_session, "shelf_ttl": left}


def pin_info(pin: Pin, now_ns: int) -> pb.PinInfo:
    return pb.PinInfo(
        pin_id=pin.pin_id,
        pool=pin.pool,
        tenant=pin.tenant,
        session_id=pin.session_id,
        blocks=pin.blocks.size,
        ttl=None if pin.expires_ns is None else duration(max(0, pin.expires_ns - now_ns)),
    )


def session_info(engine: Engine, session: Session, now_ns: int) -> pb.SessionInfo:
    return pb.SessionInfo(
        session_id=session.session_id,
        client_name=session.identity.client_name,
        tenant=session.tenant,
        pid=session.identity.pid,
        uid=session.identity.uid,
        state=session.state.value,
        leases=len(session.leases),
        blocks=sum(len(lease.blocks) for lease in session.leases.values()),
        create_time=timestamp(engine.wall_ns(session.opened_ns)),
        idle=duration(max(0, now_ns - session.renewed_ns)),
    )


def recovery_view(recovery: Recovery) -> pb.Recovery:
    return pb.Recovery(
        state=recovery.state,
        detail=recovery.detail,
        records=recovery.records,
        sessions=recovery.sessions,
        leases=recovery.leases,
        lost_leases=recovery.lost_leases,
        lost_pools=recovery.lost_pools,
        duration=duration(recovery.duration_ns),
    )


def report(outcome: Outcome) -> pb.CompressionReport:
    done = outcome.compressed
    if done is None:
        length, blocks = outcome.lease.length, len(outcome.lease.blocks)
        return pb.CompressionReport(
            tokens_before=length,
            tokens_kept=length,
            blocks_before=blocks,
            blocks_after=blocks,
            unchanged=True,
        )
    return pb.CompressionReport(
        tokens_before=done.tokens_before,
        tokens_kept=done.tokens_kept,
        blocks_before=done.blocks_before,
        blocks_after=done.blocks_after,
        mass_retained=outcome.mass_retained.tolist(),
        out_of_place=done.out_of_place,
        kernel_time=duration(outcome.kernel_ns),
    )
