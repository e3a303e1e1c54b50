"""Cached blocks have copies in the host tier before they are evicted, and come back for who asks for them."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kvd.errors import ExhaustedError, KvdError, UnavailableError
from kvd_daemon.core import Pool, Tier
from kvd_daemon.core.blocks import BlockState
from kvd_daemon.core.parked import Promotion
from kvd_daemon.core.tiers import slot_bytes
from kvd_daemon.journal import RecordingDevice

from .copy_moving import CopyMoving
from .copying import Copying
from .sessions import OpenSession
from .sharing import Sharing
from .undoing import undone_unless_done

FREE_SHARE = 4  # of a pool: when less than a quarter of it is free, cached blocks will be evicted soon
SPILLED_AT_ONCE = 256  # blocks; some ten milliseconds between two jobs that somebody waits for
RECALL_S = 5.0  # seconds a match waits for a disk at most; then it is as quick to compute
PAUSE_S = 1.0  # after nothing was left to copy; each look costs a sort of the cached blocks
LOG = logging.getLogger("kvd.tiers")


class Caching:
    """Of one device."""

    def __init__(
        self,
        device: RecordingDevice,
        copying: Copying,
        copies: CopyMoving,
        sharing: Sharing,
        spawn: "Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]",
    ) -> None:
        self._device = device
        self._copying = copying
        self._copies = copies
        self._sharing = sharing
        self._spawn = spawn
        self._spilling: asyncio.Task[None] | None = None
        self._promoting: WeakKeyDictionary[Pool, asyncio.Lock] = WeakKeyDictionary()
        self._pause_until = 0.0

    def tick(self) -> None:
        """Now and then: what will be evicted soon is copied, and the oldest copies go on to disk."""
        self._copies.tick()
        idle = self._spilling is None or self._spilling.done()
        if idle and time.monotonic() >= self._pause_until and self._device.arenas[Tier.HOST].budget_bytes:
            pressed = [pool.name for pool in self._device.pools.values() if _is_pressed(pool)]
            if pressed:
                self._spilling = self._spawn(self._spill(pressed))

    async def _spill(self, pools: Sequence[str]) -> None:
        for name in pools:
            try:
                while name in self._device.pools and await self._spilled_some(name):
                    pass
            except KvdError as error:
                LOG.warning("pool %s: cached blocks are not copied for now: %s", name, error)
        self._pause_until = time.monotonic() + PAUSE_S

    async def _spilled_some(self, name: str) -> bool:
        """Whether there may be more. What changes nothing is in no journal."""
        wanted = self._device.uncopied(name, SPILLED_AT_ONCE)
        await self._copies.room_for(wanted * slot_bytes(self._device.pools[name].spec))
        if name not in self._device.pools or not self._device.copyable(name):
            return False
        spill = self._device.begin_spill(name, SPILLED_AT_ONCE)
        if spill is None:
            return False
        with undone_unless_done(lambda _: self._device.abort_spill(spill.spill_id)):
            checksums = await self._copying.stow(name, spill.blocks, spill.slots)
        return self._device.finish_spill(spill.spill_id, checksums.tolist()) > 0

    async def promoted(
        self, opened: OpenSession, pool: str, hashes: Sequence[bytes], patience_s: float
    ) -> None:
        """What can be brought back of that prefix is cached again, if there is room. Raises as `match`.

        What is damaged is not there, nor what a disk has not given within that time or RECALL_S: whoever asks
        computes it again.
        """
        if not self._device.copies or not hashes:
            return
        self._sharing.require(opened, pool)
        deadline_s, left_s = time.monotonic() + patience_s, RECALL_S
        while await asyncio.shield(self._spawn(self._promote(opened, pool, hashes))):
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(min(left_s, deadline_s - began_s)):
                    came = await self._copies.recalled(opened.session_id, pool, hashes)
            except TimeoutError:
                LOG.info("pool %s: a prefix on disk is not waited for any longer", pool)
                return
            if not came:
                return
            left_s -= time.monotonic() - began_s

    async def _promote(self, opened: OpenSession, pool: str, hashes: Sequence[bytes]) -> bool:
        """What is in host memory, whoever leaves. Whether there is room for more."""
        if not self._device.missing(opened.session_id, pool, hashes):
            return True
        async with self._promoting.setdefault(self._device.pools[pool], asyncio.Lock()):
            if not self._device.missing(opened.session_id, pool, hashes):
                return True  # somebody else wanted the same
            try:
                await self._fetch(self._sharing.begin_promotion(opened, pool, hashes))
            except (ExhaustedError, UnavailableError) as error:
                LOG.info("pool %s: a prefix stays in the host tier: %s", pool, error)
                return False
            return True

    async def _fetch(self, promotion: Promotion | None) -> None:
        if promotion is None:
            return
        with undone_unless_done(lambda _: self._device.abort_promotion(promotion.promotion_id)):
            damaged = await self._copying.fetch(
                promotion.pool, promotion.slots, promotion.blocks, promotion.checksums
            )
        self._device.finish_promotion(promotion.promotion_id, damaged)


def _is_pressed(pool: Pool) -> bool:
    cached = pool.blocks.count(BlockState.CACHED)
    return cached > 0 and pool.free_runs.count * FREE_SHARE < pool.blocks_total
