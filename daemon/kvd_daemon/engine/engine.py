"""One device: the core with its memory, its sessions, its kernel worker, and what runs in the background."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvd.errors import KvdError
from kvd_daemon.access.gate import Gate, Guarding
from kvd_daemon.core import InvariantError, LeaseState
from kvd_daemon.device.protocol import DeviceMemory
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.kernel.client import KernelClient
from kvd_daemon.kernel.link import WorkerCommand
from kvd_daemon.settings import Settings

from .admission import Admission
from .background import Background
from .caching import Caching
from .call_limits import CallLimits
from .compressions import Compressions
from .events import Draining, Ended
from .exhaustion import Exhaustion
from .handing import Handing
from .health import Health
from .inheritance import Inheritance
from .leases import Leases
from .parking import Parking
from .pools import Backing, Pools
from .pressing import Pressing
from .probing import Probing
from .requests import Requests
from .revocations import Revocations
from .sessions import Sessions
from .sharing import Sharing
from .stopping import Stopping
from .tiers import Tiers

EPOCH_BYTES = 8  # random id of this incarnation
MIN_TICK_S = 0.02  # seconds between two looks at the clock for expired sessions
TICKS_PER_TTL = 20  # an expired session is fenced within 5 % of its TTL
MAX_TICK_S = 1.0  # seconds; what has no event of its own, a TTL that passed, is seen this late at most
IDLE_BEFORE_CHECK_S = 0.5  # without a call for this long, the invariants are checked; probes come each second
CHECK_INTERVAL_S = 10.0  # at most this often
DRAIN_POLL_S = 0.02  # seconds between two looks at the leases that a drain waits for
HELD = (
    LeaseState.ACTIVE,
    LeaseState.COMPRESSING,
    LeaseState.SHELVED,
    LeaseState.RESTING,
    LeaseState.SUSPENDED,
)
LOG = logging.getLogger("kvd.engine")


@dataclass(frozen=True)
class DeviceSettings:
    """What the engine is told about its device."""

    name: str
    memory_bytes: int
    session_ttl_ns: int
    guarding: Guarding = field(default_factory=Guarding)
    spill_dir: str = ""


class Engine:
    """Everything the RPC services and the attach socket need, by part."""

    def __init__(
        self,
        settings: DeviceSettings,
        memory: DeviceMemory,
        worker: WorkerCommand,
        inheritance: Inheritance,
    ) -> None:
        self.settings = settings
        self.descriptors = inheritance.store
        self.fences = inheritance.fences
        self.recovery = inheritance.recovery
        self.stopping = Stopping()
        self.epoch = secrets.token_hex(EPOCH_BYTES)
        self.pid = os.getpid()
        self.started_ns = time.time_ns()
        self.health = Health()
        self.device = inheritance.device
        self.requests = Requests(self.device)
        self.passing_requests = Requests(RecordingDevice(0))
        """Of operators, for what ends with this daemon."""
        self._kernel = KernelClient(worker, lambda: self.health.kernel(self._kernel.trouble))
        self.probing = Probing(self.device, self.health)
        self.gate = Gate(settings.guarding, settings.name)
        self.sessions = Sessions(self.device, settings.session_ttl_ns, self.descriptors, self.gate)
        for session_id, pidfd in inheritance.pidfds.items():
            self.sessions.adopt(self.device.sessions[session_id], pidfd)
        self._background = Background(self.health)
        tiers = self._tiers = Tiers(inheritance, self._kernel, worker, settings.spill_dir, self._background)
        backing = Backing(memory, self.descriptors, tiers.arenas.values())
        self.pools = Pools(self.device, backing, self._kernel, self.spawn)
        exhaustion = Exhaustion(self.device, self.sessions)
        self.admission = Admission(self.device, exhaustion)
        self.call_limits = CallLimits(self.device, self.gate)
        self.revocations = Revocations(self.device, self.sessions)
        self.leases = Leases(self.device, self._kernel, self.admission, self.revocations)
        self.handing = Handing(self.device, self.gate, self.sessions)
        self.sharing = Sharing(self.device, self.gate, self.admission)
        copying, spilling = tiers.copying, tiers.spilling
        self.spilling = spilling
        self.caching = Caching(self.device, copying, tiers.copies, self.sharing, self.spawn)
        self.compressions = Compressions(
            self.device, self._kernel, exhaustion, self.revocations, copying, spilling
        )
        self.pressing = Pressing(
            self.device, self.compressions, self.admission, exhaustion.holders, self.spawn
        )
        self.admission.on_waiting(self.pressing.relieve)
        self.parking = Parking(self.device, copying, self.admission, self.revocations, spilling)
        self._reload_listeners: list[Callable[[Settings], None]] = []
        self._last_call_s = time.monotonic()

    @property
    def kernel(self) -> KernelClient:
        """The kernel worker, for those who want to know how it does."""
        return self._kernel

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run `work` to its end whoever stops waiting for it."""
        return self._background.spawn(work)

    def called(self) -> None:
        """A call arrives: invariants are checked when there is time."""
        self._last_call_s = time.monotonic()

    def wall_ns(self, monotonic_ns: int) -> int:
        """Unix time of a moment of this process."""
        return time.time_ns() - (time.monotonic_ns() - monotonic_ns)

    async def run(self) -> None:
        """The background work, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._kernel.run())
            if self._tiers.disk_worker is not None:
                group.create_task(self._tiers.disk_worker.run())
            group.create_task(self._expire())
            group.create_task(self._check_when_idle())
            group.create_task(self.probing.watch())

    async def _expire(self) -> None:
        tick_s = self.settings.session_ttl_ns / 1e9 / TICKS_PER_TTL
        while True:
            await asyncio.sleep(min(max(tick_s, MIN_TICK_S), MAX_TICK_S))
            self.sessions.expire()
            self.sharing.tick()
            self.handing.tick()
            self.caching.tick()
            self._tiers.tick()
            self.admission.tick()

    async def _check_when_idle(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            while time.monotonic() - self._last_call_s < IDLE_BEFORE_CHECK_S:
                await asyncio.sleep(IDLE_BEFORE_CHECK_S)
            try:
                self.device.check()
            except InvariantError as error:
                self.health.find(f"an invariant does not hold: {error}")

    def on_reload(self, listener: Callable[[Settings], None]) -> None:
        """`listener` is called with the settings whenever the operator had kvd.toml read again (SIGHUP).

        Take from them what can change while the daemon runs, e.g. in main.py, once the parts exist:
        `engine.on_reload(lambda settings: admission.set_quotas(settings.tenants))`. The values were checked
        by `Settings` already; a file they name may still be bad: raise a KvdError then, having changed
        nothing. It is logged, and the other listeners are called all the same.
        """
        self._reload_listeners.append(listener)

    def reload(self, settings: Settings) -> None:
        """Every listener gets the settings."""
        for listener in self._reload_listeners:
            try:
                listener(settings)
            except KvdError as error:
                LOG.error("a part of the new settings is not taken: %s", error)

    def drain(self) -> None:
        """No new leases; whoever holds a stream is told, and nobody waits for blocks any longer."""
        self.health.drain()
        self.admission.close()
        self.sessions.tell_all(Draining())

    def resume(self) -> None:
        """Leases again, after `drain`."""
        self.health.resume()
        self.admission.open()

    def held_leases(self) -> int:
        """Leases somebody can still use, or adopt."""
        return sum(lease.state in HELD for lease in self.device.leases.values())

    async def drained(self, patience_s: float) -> None:
        """Until no lease is held, `patience_s` has passed, or somebody cannot wait."""
        hurried = asyncio.create_task(self.stopping.hurried())
        deadline = time.monotonic() + patience_s
        while self.held_leases() and not hurried.done() and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait([hurried], timeout=min(DRAIN_POLL_S, left_s))
        hurried.cancel()

    def end_streams(self) -> None:
        """Whoever holds a stream gets its last word."""
        self.sessions.tell_all(Ended())

    def close(self) -> None:
        """Nothing stays behind."""
        self.sessions.close()
        self.pools.close()
        self._tiers.close()
        self.fences.close()
        self.gate.close()
