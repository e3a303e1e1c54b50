"""The host tier's memory: a memory file for each pool that ever parked something.

It is kept by the descriptor store as `tier.POOL_ID`, so it outlives the daemon. Slots that are free again are
punched out, so that what is in use is what is parked.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import numpy as np

from kvd.errors import DeviceUnavailableError, KvdError
from kvd_daemon.core import Device, Pool, Tier
from kvd_daemon.core.free_runs import IntArray
from kvd_daemon.core.tiers import slot_bytes
from kvd_daemon.fd_store import DescriptorStore
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import Punch

LOG = logging.getLogger("kvd.tiers")


def arena_name(pool: Pool) -> str:
    """Under which a pool's arena outlives the daemon."""
    return f"tier.{pool.pool_id}"


class Arenas:
    """Of one device. `inherited` are those of the daemon before, by pool id; they are this object's now."""

    def __init__(
        self,
        device: Device,
        kernel: KernelClient,
        store: DescriptorStore,
        inherited: Mapping[str, int],
        spawn: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
    ) -> None:
        self._device = device
        self._kernel = kernel
        self._store = store
        self._spawn = spawn
        self._fds = dict(inherited)
        self._freed: dict[str, set[int]] = {}
        device.arenas[Tier.HOST].on_give(self._given)
        for pool in device.pools.values():
            if pool.pool_id in self._fds:  # what came free while there was no daemon
                size = os.fstat(self._fds[pool.pool_id]).st_size // slot_bytes(pool.spec)
                self._given(pool, np.arange(size, dtype=np.int32))

    @contextlib.contextmanager
    def lent(self, pool: Pool) -> Iterator[int]:
        """A descriptor of the pool's arena, whatever becomes of the pool. Raises DeviceUnavailableError."""
        if pool.pool_id not in self._fds:
            self._fds[pool.pool_id] = self._made(pool)
        fd = os.dup(self._fds[pool.pool_id])
        try:
            yield fd
        finally:
            os.close(fd)

    def _made(self, pool: Pool) -> int:
        try:
            fd = os.memfd_create(f"kvd-{arena_name(pool)}", os.MFD_CLOEXEC)
        except OSError as error:
            raise DeviceUnavailableError(f"no memory file for the host tier: {error.strerror}") from error
        try:
            self._store.put(arena_name(pool), fd)
        except KvdError:
            os.close(fd)
            raise
        return fd

    def drop(self, pool: Pool) -> None:
        """The pool is no more."""
        fd = self._fds.pop(pool.pool_id, None)
        self._freed.pop(pool.name, None)
        if fd is not None:
            self._store.drop(arena_name(pool))
            os.close(fd)

    def _given(self, pool: Pool, slots: IntArray) -> None:
        if not self._freed:
            self._spawn(self._punch())
        self._freed.setdefault(pool.name, set()).update(slots.tolist())

    async def _punch(self) -> None:
        """What is taken again meanwhile is written after this: jobs of callers are done in their order."""
        await asyncio.sleep(0)  # until the change is over that gives slots back
        freed, self._freed = self._freed, {}
        for name, slots in freed.items():
            pool = self._device.pools.get(name)
            free = slots - self._device.arenas[Tier.HOST].used_of(name)
            if pool is None or pool.pool_id not in self._fds or not free:
                continue
            try:
                with self.lent(pool) as fd:
                    job = Punch(slot_bytes(pool.spec), np.array(sorted(free), np.int32))
                    await self._kernel.perform(job, fds=[fd])
            except (KernelDiedError, KvdError) as error:
                LOG.warning("pool %s: %d free slots keep their memory for now: %s", name, len(free), error)
                self._freed.setdefault(name, set()).update(free)  # goes with the next ones

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
