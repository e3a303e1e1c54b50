"""Blocks for those who wait: resting leases are pruned to their floors, those that give most first."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvd.errors import KvdError
from kvd.policy import DEFAULT_SINKS, Keep, KeyDiff, Policy
from kvd_daemon.core import Device, Lease, can_give

from .compressions import Compressions
from .sessions import OpenSession

RECENT = 32  # tokens that are kept because they are the last ones, if the floor has room for them
LOG = logging.getLogger("kvd.pressing")


class Pressing:
    """Of one device; one lease of a pool at a time. `spawn` starts a task that lives as long as it takes."""

    def __init__(
        self,
        device: Device,
        compressions: Compressions,
        spawn: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
    ) -> None:
        self._device = device
        self._compressions = compressions
        self._spawn = spawn
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[int, asyncio.Event] = {}

    def relieve(self, pool: str, wanted_blocks: int, holders: Iterable[OpenSession]) -> None:
        """Have resting leases of `holders` give so many blocks of `pool`, or what they have to give."""
        if pool in self._under_way:
            return
        leases = [
            lease
            for opened in holders
            for lease in opened.session.leases.values()
            if lease.pool == pool and can_give(lease)
        ]
        if leases:
            leases.sort(key=_gives_at_most, reverse=True)
            work = self._prune([lease.lease_id for lease in leases], wanted_blocks)
            task = self._under_way[pool] = self._spawn(work)
            task.add_done_callback(lambda done: self._under_way.pop(pool, None))

    async def _prune(self, lease_ids: list[int], wanted_blocks: int) -> None:
        for lease_id in lease_ids:
            lease = self._device.leases.get(lease_id)
            if wanted_blocks > 0 and lease is not None and can_give(lease):
                wanted_blocks -= await self._pruned(lease)

    async def _pruned(self, lease: Lease) -> int:
        """How many blocks it gave: none if it could not be pruned, others are asked then."""
        had, ended = len(lease.blocks), asyncio.Event()
        self._jobs[lease.lease_id] = ended
        try:
            await self._compressions.press(lease.lease_id, policy_for(lease))
        except KvdError as error:
            LOG.info("lease %d gives no blocks: %s", lease.lease_id, error)
            return 0
        finally:
            del self._jobs[lease.lease_id]
            ended.set()
        return had - len(lease.blocks)

    async def settled(self, lease_id: int) -> None:
        """Wait until the lease is not being pruned (any more)."""
        ended = self._jobs.get(lease_id)
        if ended is not None:
            await ended.wait()


def policy_for(lease: Lease) -> Policy:
    """What needs nothing of its worker: the keys alone decide."""
    sinks = min(max(DEFAULT_SINKS, lease.policy.sinks), lease.floor)
    recent = min(RECENT, lease.floor - sinks)
    return KeyDiff(recent=recent, keep=Keep(tokens=lease.floor), sinks=sinks)


def _gives_at_most(lease: Lease) -> int:
    return len(lease.blocks) - -(-lease.floor // lease.block_size)
