"""Blocks for those who wait: resting leases are pruned to their floors, those that give most first.

One lease at a time, and only if all of them together could serve a call that is first in line. What it lacks
is counted anew before each lease: blocks may have come from elsewhere.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvd.errors import KvdError
from kvd.policy import DEFAULT_SINKS, Keep, KeyDiff, Policy
from kvd_daemon.core import Device, Gift, Lease, can_give

from .admission import Admission, Shortage
from .compressions import Compressions
from .sessions import OpenSession

RECENT = 32  # tokens that are kept because they are the last ones, if the floor has room for them
LOG = logging.getLogger("kvd.pressing")

Holders = Callable[[str, str, str], Iterable[OpenSession]]
"""Sessions that could give blocks of a pool to a tenant; of one tenant only, if the third name is one."""


class Pressing:
    """Of one device. `spawn` starts a task that lives as long as it takes."""

    def __init__(
        self,
        device: Device,
        compressions: Compressions,
        admission: Admission,
        holders: Holders,
        spawn: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
    ) -> None:
        self._device = device
        self._compressions = compressions
        self._admission = admission
        self._holders = holders
        self._spawn = spawn
        self._under_way: asyncio.Task[None] | None = None
        self._jobs: dict[int, asyncio.Event] = {}

    def relieve(self) -> None:
        """Calls wait: what would help them is pruned, unless that is under way."""
        if (self._under_way is None or self._under_way.done()) and self._next(set()) is not None:
            self._under_way = self._spawn(self._prune())

    async def _prune(self) -> None:
        barren: set[int] = set()
        while (lease := self._next(barren)) is not None:
            if not await self._pruned(lease):
                barren.add(lease.lease_id)

    def _next(self, barren: set[int]) -> Lease | None:
        """The lease to be pruned now, none of those that could not be."""
        for tenant, shortages in self._admission.shortages():
            helping = [self._helping(tenant, shortage, barren) for shortage in shortages]
            if helping and all(helping):
                return helping[0][0]
        return None

    def _helping(self, tenant: str, shortage: Shortage, barren: set[int]) -> list[Lease]:
        """Leases that together give what that tenant's call lacks, in the order to prune them; or none."""
        helping: list[Lease] = []
        given = 0
        for pool in [shortage.pool] if shortage.pool else list(self._device.pools):
            for lease, blocks in self._giving(pool, tenant, "" if shortage.pool else tenant):
                if lease.lease_id not in barren:
                    helping.append(lease)
                    given += blocks
        return helping if given >= shortage.blocks else []

    def _giving(self, pool_name: str, tenant: str, of: str) -> list[tuple[Lease, int]]:
        """Resting leases of that pool, those that can give at once first, and what each gives to `tenant`.

        What another tenant gives back within its guarantee stays its own.
        """
        pool = self._device.pools[pool_name]
        room, holdings = pool.usable, pool.holdings  # the scratch reserve too, for as long as it takes
        giving: list[tuple[Lease, int]] = []
        given: Counter[int] = Counter()
        for lease, gift in self._gifts(pool_name, tenant, of, room):
            owner, blocks = self._device.tenants[lease.tenant], gift.blocks
            if lease.tenant != tenant:
                blocks = min(blocks, holdings.held.get(owner, 0) - holdings.promised_to(owner) - given[owner])
            if blocks > 0 and gift.meanwhile <= room - holdings.kept_from(owner):
                giving.append((lease, blocks))
                given[owner] += blocks
                room += gift.blocks
        return giving

    def _gifts(self, pool: str, tenant: str, of: str, room: int) -> list[tuple[Lease, Gift]]:
        leases = [
            lease
            for opened in self._holders(pool, tenant, of)
            for lease in opened.session.leases.values()
            if lease.pool == pool and can_give(lease)
        ]
        gifts = [(lease, self._device.gift(lease.lease_id)) for lease in leases]
        return sorted(gifts, key=lambda each: (each[1].meanwhile > room, -each[1].blocks))

    async def _pruned(self, lease: Lease) -> bool:
        """Whether it was; others are asked if it could not be."""
        ended = self._jobs[lease.lease_id] = asyncio.Event()
        try:
            await self._compressions.press(lease.lease_id, policy_for(lease))
        except KvdError as error:
            LOG.info("lease %d gives no blocks: %s", lease.lease_id, error)
            return False
        finally:
            del self._jobs[lease.lease_id]
            ended.set()
        return True

    async def settled(self, lease_id: int) -> None:
        """Wait until the lease is not being pruned (any more)."""
        ended = self._jobs.get(lease_id)
        if ended is not None:
            await ended.wait()


def policy_for(lease: Lease) -> Policy:
    """What needs nothing of its worker: the keys alone decide. The floor has room for the policy's sinks."""
    floor = lease.resting_floor
    sinks = min(max(DEFAULT_SINKS, lease.policy.sinks), floor)
    return KeyDiff(recent=min(RECENT, floor - sinks), keep=Keep(tokens=floor), sinks=sinks)
