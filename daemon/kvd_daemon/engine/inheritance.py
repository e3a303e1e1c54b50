"""What a daemon takes over from the one before it: its journal tells what there was, descriptors are what is.

A pool whose memory nobody has kept is lost. A session whose process nobody has kept is over: the descriptor
is kept before there is the session, and as long. Everything else goes on.
"""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvd_daemon.core import Limits, Losses, Pool, Recovered, Tier
from kvd_daemon.device.fence_memory import FenceMemory
from kvd_daemon.device.protocol import DeviceMemory
from kvd_daemon.fd_store import DescriptorStore
from kvd_daemon.journal import CallKinds, Found, Opened, RecordingDevice, open_journal
from kvd_daemon.processes import has_exited

from .arenas import arena_name
from .pools import descriptors_of
from .sessions import descriptor_of

FENCE = "fence"  # the name under which the fences' memory outlives the daemon
GRACE_NS = 5_000_000_000  # ns; workers look every 200 ms for a daemon, but they may have to wait for a core
LOG = logging.getLogger("kvd.inheritance")


@dataclass(frozen=True)
class Recovery:
    """What was found, for operators. Counts are of what is back, and of what is not."""

    state: str
    detail: str = ""
    records: int = 0
    sessions: int = 0
    leases: int = 0
    lost_leases: int = 0
    lost_pools: int = 0
    duration_ns: int = 0


@dataclass(frozen=True)
class Inheritance:
    """State, memory and processes as they are now. `pidfds` by session id; files of tiers by pool id."""

    device: RecordingDevice
    store: DescriptorStore
    fences: FenceMemory
    recovery: Recovery
    pidfds: dict[str, int] = field(default_factory=dict)
    arenas: dict[Tier, dict[str, int]] = field(default_factory=lambda: {tier: {} for tier in Tier})


def open_state(
    journal: Path,
    memory_bytes: int,
    store: DescriptorStore,
    calls: CallKinds | None = None,
    limits: Limits | None = None,
) -> Opened:
    """The device as its journal tells; a new one without a journal where nobody would keep its memory.

    `calls` are told there by their bytes. Raises UnavailableError if there is no room for a journal.
    """
    if store.survives:
        return open_journal(journal, memory_bytes, limits or Limits(), calls=calls)
    return Opened(RecordingDevice(memory_bytes, limits), Found("volatile"))


def inherit(opened: Opened, memory: DeviceMemory, store: DescriptorStore) -> Inheritance:
    """Adopt what is still there, and let the device know what is not. Raises DeviceFullError."""
    began_ns, device, fds = time.monotonic_ns(), opened.device, store.take_all()
    stand_ins = _stand_ins(device, fds)
    fds |= stand_ins
    lost = [pool.name for pool in device.pools.values() if not _adopted(pool, memory, fds)]
    gone = [session_id for session_id in device.sessions if not _lives(session_id, fds)]
    recovered = Recovered([], [], [], [])
    if opened.found.state == "recovered":
        bare = [
            [pool.name for pool in device.pools.values() if arena_name(pool, tier) not in fds]
            for tier in (Tier.HOST, Tier.DISK)
        ]
        recovered = device.recover(time.monotonic_ns(), GRACE_NS, Losses(lost, gone, *bare))
    fences = _fences(opened, store, fds)
    for name, pidfd in stand_ins.items():
        store.put(name, pidfd)
    pidfds = {session_id: fds[descriptor_of(session_id)] for session_id in device.sessions}
    spent_ns = opened.found.duration_ns + time.monotonic_ns() - began_ns
    arenas = {tier: _arenas(device, tier, fds) for tier in Tier}
    recovery = _told(opened.found, recovered, spent_ns)
    LOG.info("%s", recovery)
    return Inheritance(device, store, fences, recovery, pidfds, arenas)


def _arenas(device: RecordingDevice, tier: Tier, fds: Mapping[str, int]) -> dict[str, int]:
    names = {pool.pool_id: arena_name(pool, tier) for pool in device.pools.values()}
    return {pool_id: fds[name] for pool_id, name in names.items() if name in fds}


def _adopted(pool: Pool, memory: DeviceMemory, fds: Mapping[str, int]) -> bool:
    bytes_name, sidecar_name = descriptors_of(pool)
    if bytes_name not in fds or sidecar_name not in fds:
        return False
    sizes = pool.spec.pool_bytes(pool.blocks_total), pool.spec.sidecar_bytes(pool.blocks_total)
    return memory.adopt(pool.pool_id, *sizes, (fds[bytes_name], fds[sidecar_name]))


def _stand_ins(device: RecordingDevice, fds: Mapping[str, int]) -> dict[str, int]:
    """For pidfds that were not kept, for lack of descriptors: whoever has the process's number now.

    Perhaps another process; then blocks stay where they are for longer than they had to. Taking its session
    for gone would give them away while it may still write.
    """
    opened = {}
    for session in device.sessions.values():
        name, pid = descriptor_of(session.session_id), session.identity.pid
        if name not in fds and pid > 0:
            with contextlib.suppress(OSError):  # there is no such process: it is gone
                opened[name] = os.pidfd_open(pid)
    return opened


def _lives(session_id: str, fds: Mapping[str, int]) -> bool:
    pidfd = fds.get(descriptor_of(session_id))
    return pidfd is not None and not has_exited(pidfd)


def _fences(opened: Opened, store: DescriptorStore, fds: Mapping[str, int]) -> FenceMemory:
    """Those that workers have mapped, if it is their leases that go on; else new ones, and theirs are down.

    From here on the store has what this daemon uses, and nothing else.
    """
    device, kept = opened.device, fds.get(FENCE)
    word_count = device.limits.leases + 1
    in_use = {descriptor_of(session_id) for session_id in device.sessions}
    for pool in device.pools.values():
        in_use.update((*descriptors_of(pool), *(arena_name(pool, tier) for tier in Tier)))
    if kept is not None and opened.found.state == "recovered":
        store.keep(in_use | {FENCE})
        fences = FenceMemory(kept, word_count)
        device.fences.move_to(fences.words)
        return fences
    if kept is not None:
        old = FenceMemory(os.dup(kept), word_count)
        old.lower_all()
        old.close()
    store.keep(in_use)
    fences = FenceMemory.create(word_count)
    device.fences.move_to(fences.words)
    store.put(FENCE, fences.fd)
    return fences


def _told(found: Found, recovered: Recovered, duration_ns: int) -> Recovery:
    return Recovery(
        state=found.state,
        detail=found.detail,
        records=found.records,
        sessions=len(recovered.sessions),
        leases=len(recovered.leases),
        lost_leases=len(recovered.lost_leases),
        lost_pools=len(recovered.lost_pools),
        duration_ns=duration_ns,
    )
