"""The wire's messages as records: the field names of `-o json`, `-o yaml` and table headers."""

import time
from collections.abc import Iterable
from datetime import UTC
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from kvd.convert import spec_from_proto
from kvd.errors import KvdError
from kvd.limits import NULL_BLOCKS
from kvd.v1 import kvd_pb2 as pb

UNREACHABLE = "unreachable"  # kvctl's own word: the device did not answer

Record = dict[str, Any]

_POOL_COUNTS = (
    "blocks_free",
    "blocks_leased",
    "blocks_sealed",
    "blocks_cached",
    "blocks_quarantined",
    "blocks_reserved",
    "sink_blocks_locked",
    "leases",
    "compressions",
    "blocks_saved",
    "tokens_dropped",
    "populated_bytes",
    "total_bytes",
    "waiting_calls",
    "leases_suspended",
    "parked_bytes",
    "spilled_bytes",
    "blocks_copied",
    "blocks_copied_on_disk",
    "wanted_blocks",
    "blocks_pinned",
    "leases_shelved",
    "match_blocks_asked",
    "match_blocks_found",
)
_LEASE_FIELDS = (
    "lease_id",
    "pool",
    "session_id",
    "tenant",
    "state",
    "generation",
    "length",
    "position",
    "blocks",
    "sealed_blocks",
    "sink_blocks",
    "policy",
    "blocks_saved",
    "gave_blocks",
    "floor_tokens",
    "scratch",
    "shelf_key",
    "to_session",
)
_PIN_FIELDS = ("pin_id", "pool", "tenant", "session_id", "blocks")
_TIER_BYTES = ("host_tier_bytes", "host_tier_used_bytes", "disk_tier_bytes", "disk_tier_used_bytes")
_RECOVERY_COUNTS = ("records", "sessions", "leases", "lost_leases", "lost_pools")
_SESSION_FIELDS = ("session_id", "client_name", "tenant", "pid", "uid", "state", "leases", "blocks")


def _time(stamp: Timestamp) -> str | None:
    """RFC 3339 in UTC, to the millisecond."""
    if not stamp.seconds:
        return None
    moment = stamp.ToDatetime(UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _age_seconds(stamp: Timestamp) -> float | None:
    """By our clock; that of a daemon elsewhere may differ."""
    return round(max(0.0, time.time() - stamp.ToNanoseconds() / 1e9), 3) if stamp.seconds else None


def _seconds(message: Message, field: str) -> float | None:
    """A Duration to the millisecond; None if it is unset."""
    return round(getattr(message, field).ToNanoseconds() / 1e9, 3) if message.HasField(field) else None


def device_record(status: pb.GetStatusResponse) -> Record:
    return {
        "device": status.device,
        "kind": status.device_kind,
        "health": status.health,
        "health_detail": status.health_detail,
        "epoch": status.epoch,
        "version": status.version,
        "pid": status.pid,
        "kernel_pid": status.kernel_pid or None,
        "kernel_restarts": status.kernel_restarts,
        "lease_probe_age_seconds": _seconds(status, "lease_probe_age"),
        "kernel_probe_age_seconds": _seconds(status, "kernel_probe_age"),
        **_recovery(status.recovery),
        "start_time": _time(status.start_time),
        "uptime_seconds": _age_seconds(status.start_time),
        "sessions": status.sessions,
        "memory_bytes": status.memory_bytes,
        "memory_used_bytes": status.memory_used_bytes,
        **{name: getattr(status, name) for name in _TIER_BYTES},
    }


def _recovery(recovery: pb.Recovery) -> Record:
    """What was found at the daemon's start."""
    return {
        "recovery": recovery.state or None,
        "recovery_detail": recovery.detail,
        "recovery_seconds": _seconds(recovery, "duration"),
        **{f"recovery_{name}": getattr(recovery, name) for name in _RECOVERY_COUNTS},
    }


def unreachable_record(device: str, error: KvdError) -> Record:
    """A device that did not answer, in the fields of `device_record`; what is unknown is None."""
    unknown = dict.fromkeys(device_record(pb.GetStatusResponse()))
    return unknown | {"device": device, "health": UNREACHABLE, "health_detail": str(error)}


def spec_record(spec: pb.KVSpec) -> Record:
    return dict(spec_from_proto(spec).__dict__)


def pool_record(device: str, pool: pb.Pool) -> Record:
    """A pool's name, geometry and size."""
    return {
        "name": pool.name,
        "device": device,
        **spec_record(pool.spec),
        "block_bytes": pool.block_bytes,
        "blocks_total": pool.blocks_total,
        "total_bytes": pool.block_bytes * pool.blocks_total,
        "fingerprint": pool.fingerprint,
        "pool_id": pool.pool_id,
    }


def pool_status_record(device: str, status: pb.PoolStatus) -> Record:
    """`pool_record` and what its blocks do. The blocks_* of free, leased, sealed, cached,
    quarantined and null add up to blocks_total; reserved ones are among the free."""
    return {
        **pool_record(device, status.pool),
        "blocks_null": NULL_BLOCKS,
        **{name: getattr(status, name) for name in _POOL_COUNTS},
        "saved_bytes": status.blocks_saved * status.pool.block_bytes,
    }


def lease_record(device: str, lease: pb.LeaseInfo) -> Record:
    return {
        "device": device,
        **{name: getattr(lease, name) for name in _LEASE_FIELDS},
        "shelf_ttl_seconds": _seconds(lease, "shelf_ttl"),
        "create_time": _time(lease.create_time),
        "age_seconds": _age_seconds(lease.create_time),
    }


def pin_record(device: str, pin: pb.PinInfo) -> Record:
    """Of a match `ttl_seconds` are left; a pin has none."""
    return {
        "device": device,
        **{name: getattr(pin, name) for name in _PIN_FIELDS},
        "ttl_seconds": _seconds(pin, "ttl"),
    }


def session_record(device: str, session: pb.SessionInfo) -> Record:
    return {
        "device": device,
        **{name: getattr(session, name) for name in _SESSION_FIELDS},
        "create_time": _time(session.create_time),
        "age_seconds": _age_seconds(session.create_time),
        "idle_seconds": session.idle.ToNanoseconds() / 1e9,
    }


def run_records(runs: Iterable[pb.BlockRun]) -> list[Record]:
    return [{"start": run.start, "count": run.count} for run in runs]
