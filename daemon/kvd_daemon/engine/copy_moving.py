"""Copies of cached blocks go on to disk when host memory is short, and come back for who asks for them.

Only who wants what lies on disk waits for it, and not for long: it can be computed again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvd.errors import KvdError
from kvd_daemon.core import Tier
from kvd_daemon.core.parked import CopyMove, Name
from kvd_daemon.core.tiers import slot_bytes
from kvd_daemon.journal import RecordingDevice

from .moving import Moving

HIGH_WATER = 0.9  # of the host tier's bytes; beyond that copies leave, so that others find room at once
MOVED_BYTES = 64 << 20  # in one job; a disk's tenth of a second, for which what comes back may have to wait
ROOM_S = 1.0  # seconds to wait for copies that leave; after that they are dropped for what needs their slots
PAUSE_S = 1.0  # after nothing could leave
LOG = logging.getLogger("kvd.tiers")


class CopyMoving:
    """Of one device."""

    def __init__(
        self,
        device: RecordingDevice,
        moving: Moving,
        spawn: "Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]",
    ) -> None:
        self._device = device
        self._moving = moving
        self._spawn = spawn
        self._relief: asyncio.Task[None] | None = None
        self._wanted_bytes = 0  # that somebody needs in the host tier right now
        self._pause_until_s = 0.0
        self._coming: dict[Name, asyncio.Task[bool]] = {}

    def tick(self) -> None:
        """Now and then: host memory keeps some room."""
        if time.monotonic() >= self._pause_until_s:
            self._relieve()

    def _short_bytes(self) -> int:
        """Of the room that host memory should have."""
        host = self._device.arenas[Tier.HOST]
        return max(self._wanted_bytes, int((1 - HIGH_WATER) * host.budget_bytes)) - host.free_bytes

    def _relieve(self) -> "asyncio.Task[None] | None":
        """What makes room, as long as there is something to do."""
        if self._relief is not None and not self._relief.done():
            return self._relief
        has_disk = self._moving.is_possible and self._device.arenas[Tier.DISK].budget_bytes > 0
        self._relief = self._spawn(self._leave()) if has_disk and self._has_more() else None
        return self._relief

    def _has_more(self) -> bool:
        return self._short_bytes() > 0 and self._device.demotable()

    async def _leave(self) -> None:
        try:
            while self._has_more():
                async with self._moving.leaving:
                    move = self._device.begin_demotion(min(MOVED_BYTES, self._short_bytes()))
                    if move is None:
                        self._pause_until_s = time.monotonic() + PAUSE_S
                        break
                    await self._moving.left(move)
        except KvdError as error:
            self._pause_until_s = time.monotonic() + PAUSE_S
            LOG.info("copies of cached blocks stay in the host tier: %s", error)
        finally:
            self._wanted_bytes = 0

    async def room_for(self, wanted_bytes: int, patience_s: float | None = ROOM_S) -> None:
        """Copies have left host memory for what needs so many bytes, as far as there is time and a disk."""
        if self._device.arenas[Tier.HOST].free_bytes < wanted_bytes:
            self._wanted_bytes = max(self._wanted_bytes, wanted_bytes)
            if relief := self._relieve():
                await asyncio.wait([relief], timeout=patience_s)
            else:
                self._wanted_bytes = 0

    async def recalled(self, session_id: str, pool: str, hashes: Sequence[bytes]) -> bool:
        """Whether some of a prefix came to host memory from disk. Raises as `match`."""
        wanted = self._device.recallable(session_id, pool, hashes)
        if not wanted or not self._moving.is_possible:
            return False
        if wanted[0] not in self._coming:
            size = slot_bytes(self._device.pools[pool].spec)
            await self.room_for(min(len(wanted) * size, max(size, MOVED_BYTES)), patience_s=None)
        if wanted[0] not in self._coming:
            move = self._device.begin_recall(session_id, pool, hashes, MOVED_BYTES)
            if move is None:
                return False
            self._bring(move)
        coming = self._coming.get(wanted[0])
        return coming is not None and await asyncio.shield(coming)

    def _bring(self, move: CopyMove) -> None:
        """Once for all who wait for it, whoever leaves."""
        task = self._spawn(self._brought(move))
        self._coming |= dict.fromkeys(move.names, task)
        task.add_done_callback(self._ended)

    def _ended(self, ended: "asyncio.Task[bool]") -> None:
        self._coming = {name: task for name, task in self._coming.items() if task is not ended}

    async def _brought(self, move: CopyMove) -> bool:
        """Damaged ones are no more; the others, if that fails, are where they were."""
        try:
            if not await self._moving.moved(move):
                LOG.warning("pool %s: copies of cached blocks were damaged on disk", move.pool)
        except KvdError as error:
            LOG.info("pool %s: a prefix stays on disk: %s", move.pool, error)
            return False
        return True
