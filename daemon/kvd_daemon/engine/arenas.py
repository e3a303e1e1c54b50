"""Where a tier's slots lie: a file for each pool that ever parked something there, without a name.

In memory for the host tier, in the folder for spilling for the disk tier. The descriptor store keeps it, as
`tier.POOL_ID` or `disk.POOL_ID`, so it outlives the daemon, and goes with kvd. Slots that are free again are
punched out, so that what is in use is what is parked.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd.errors import DeviceUnavailableError, KvdError
from kvd_daemon.core import Device, Pool, Tier
from kvd_daemon.core.free_runs import IntArray
from kvd_daemon.core.tiers import slot_bytes
from kvd_daemon.fd_store import DescriptorStore
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import Punch

RETRY_AFTER_NS = 10**9  # ns; until somebody has closed a descriptor, perhaps
RETRY_S = 1.0  # seconds until what could not be punched is tried again; a worker starts in about that time
LOG = logging.getLogger("kvd.tiers")

PREFIXES = {Tier.HOST: "tier", Tier.DISK: "disk"}


def arena_name(pool: Pool, tier: Tier) -> str:
    """Under which a pool's file of that tier outlives the daemon."""
    return f"{PREFIXES[tier]}.{pool.pool_id}"


@dataclass(frozen=True)
class Place:
    """Which tier, how its files are made (OSError), who punches them, which ones there are, by pool id.

    Those are the arenas' from now on.
    """

    tier: Tier
    make: Callable[[str], int]
    worker: KernelClient
    inherited: Mapping[str, int]


class Arenas:
    """Of one device and one tier."""

    def __init__(
        self,
        device: Device,
        store: DescriptorStore,
        place: Place,
        spawn: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
    ) -> None:
        self._device = device
        self._store = store
        self._place = place
        self._spawn = spawn
        self._fds = dict(place.inherited)
        self._freed: dict[str, set[int]] = {}
        self._begins = False  # a task that takes them has not begun yet
        self._failing: set[str] = set()  # pools whose last try failed
        self._retry_s = 0.0
        self._punching: set[asyncio.Task[None]] = set()
        self._slots = device.arenas[place.tier]
        self._slots.on_give(self._given)
        for pool in device.pools.values():
            if pool.pool_id in self._fds:  # what came free while there was no daemon
                size = os.fstat(self._fds[pool.pool_id]).st_size // slot_bytes(pool.spec)
                self._given(pool, np.arange(size, dtype=np.int32))

    @contextlib.contextmanager
    def lent(self, pool: Pool) -> Iterator[int]:
        """A descriptor of the pool's arena, whatever becomes of the pool. Raises DeviceUnavailableError."""
        if self._device.pools.get(pool.name) is not pool:
            raise DeviceUnavailableError(f"pool {pool.name} was dropped meanwhile")
        if pool.pool_id not in self._fds:
            self._fds[pool.pool_id] = self._made(pool)
        try:
            fd = os.dup(self._fds[pool.pool_id])
        except OSError as error:
            raise DeviceUnavailableError(
                f"nothing moves to or from the {self._place.tier} tier: {error.strerror}; retry in a second",
                retry_after_ns=RETRY_AFTER_NS,
            ) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _made(self, pool: Pool) -> int:
        name = arena_name(pool, self._place.tier)
        try:
            fd = self._place.make(name)
        except OSError as error:
            raise DeviceUnavailableError(
                f"no file for the {self._place.tier} tier: {error.strerror}"
            ) from error
        try:
            self._store.put(name, fd)
        except KvdError:
            os.close(fd)
            raise
        return fd

    def drop(self, pool: Pool) -> None:
        """The pool is no more."""
        fd = self._fds.pop(pool.pool_id, None)
        self._freed.pop(pool.name, None)
        self._failing.discard(pool.name)
        if fd is not None:
            self._store.drop(arena_name(pool, self._place.tier))
            os.close(fd)

    def _given(self, pool: Pool, slots: IntArray) -> None:
        self._freed.setdefault(pool.name, set()).update(slots.tolist())
        self._begin()

    def _begin(self) -> None:
        if not self._begins:
            self._begins = True
            task = self._spawn(self._punch())
            self._punching.add(task)
            task.add_done_callback(self._punching.discard)

    def tick(self) -> None:
        """Now and then: what could not be punched is tried again."""
        if self._freed and time.monotonic() >= self._retry_s:
            self._begin()

    async def punched(self) -> None:
        """What is free now has been punched: another worker than the one that punches may write there."""
        if self._punching:
            await asyncio.wait(self._punching)

    async def _punch(self) -> None:
        """What is taken again meanwhile is written after this: a worker does its jobs in their order."""
        await asyncio.sleep(0)  # until the change is over that gives slots back
        self._begins = False
        freed, self._freed = self._freed, {}
        for name, slots in freed.items():
            pool = self._device.pools.get(name)
            free = slots - self._slots.used_of(name)
            if pool is None or pool.pool_id not in self._fds or not free:
                continue
            try:
                with self.lent(pool) as fd:
                    job = Punch(slot_bytes(pool.spec), np.array(sorted(free), np.int32))
                    await self._place.worker.perform(job, fds=[fd])
                    self._failing.discard(name)
            except (KernelDiedError, KvdError) as error:
                self._not_punched(name, free, error)

    def _not_punched(self, name: str, free: set[int], error: Exception) -> None:
        """They go with the next ones, or after a while."""
        if name not in self._failing:
            LOG.warning("pool %s: %d free slots keep their memory for now: %s", name, len(free), error)
        self._failing.add(name)
        self._retry_s = time.monotonic() + RETRY_S
        if name in self._device.pools:
            self._freed.setdefault(name, set()).update(free)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
