"""The disk tier: what was parked longest goes there when host memory is short, and back when it is wanted.

Everything here waits for a disk, and nobody waits for it but who wants back what lies there.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from kvd.errors import (
    CheckpointLostError,
    KernelWorkerUnavailableError,
    KvdError,
    LeaseLostError,
    TierFullError,
)
from kvd_daemon.core import LeaseState, Pool, Tier
from kvd_daemon.core.moving import parcel
from kvd_daemon.core.parked import Fetching
from kvd_daemon.core.tiers import RETRY_AFTER_NS, slot_bytes
from kvd_daemon.journal import RecordingDevice

from .copy_moving import CopyMoving
from .moving import Moving
from .parcel_line import Parcel, ParcelLine

HIGH_WATER = 0.9  # of the host tier's bytes; beyond that the oldest parcels go to disk
RESERVE = 3  # parcels, of the largest one's size: the next, and what may have to leave for one to come back
ROOM_S = 5.0  # seconds to wait for slots that others are about to give back; a parcel moves in less
PAUSE_S = 0.02  # between two looks whether they did
LOG = logging.getLogger("kvd.tiers")


class Spilling:
    """Of one device."""

    def __init__(
        self,
        device: RecordingDevice,
        moving: Moving,
        copies: CopyMoving,
        spawn: "Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]",
    ) -> None:
        self._device = device
        self._moving = moving
        self._copies = copies
        self._spawn = spawn
        self._line = ParcelLine(device)
        self._wanted: Counter[Parcel] = Counter()
        self._coming: dict[Parcel, asyncio.Task[None]] = {}
        self._leaving: dict[Parcel, int] = {}  # moves to disk under way

    def parked(self, lease_id: int, is_checkpoint: bool) -> None:
        """That is the newest parcel."""
        if not self._moving.is_possible:
            return
        self._line.put((lease_id, is_checkpoint))
        if self._is_high():
            self._spawn(self._relieve())

    async def _relieve(self) -> None:
        await self._demote_while(self._is_high)

    def _is_high(self) -> bool:
        return self._parked_bytes() > HIGH_WATER * self._device.arenas[Tier.HOST].budget_bytes

    def _parked_bytes(self) -> int:
        """Copies of cached blocks make room by themselves."""
        return self._device.arenas[Tier.HOST].used_bytes - self._device.copied_bytes(Tier.HOST)

    async def room_for(self, session_id: str, lease_id: int, is_checkpoint: bool = False) -> None:
        """The host tier has room for all that lease has in blocks, when this returns and until others run.

        Where a lease cannot be parked anyway, or nothing can go to disk, the core says so. Raises
        TierFullError.
        """
        lease = self._device.leases.get(lease_id)
        if lease is None or lease.session_id != session_id or lease.state is not LeaseState.ACTIVE:
            return
        if not (is_checkpoint and lease.checkpoint is not None):
            await self._room(self._device.pools[lease.pool], len(lease.blocks), comes_back=False)

    async def _room(self, pool: Pool, slots: int, comes_back: bool) -> None:
        """Waits while others are on their way. What comes back may use up both reserves."""
        wanted, deadline_s = slots * slot_bytes(pool.spec), time.monotonic() + ROOM_S

        def is_short() -> bool:
            kept = 0 if comes_back else self._kept_bytes(wanted)
            return self._parked_bytes() + wanted + kept > self._device.arenas[Tier.HOST].budget_bytes

        if not self._moving.is_possible or wanted > self._device.arenas[Tier.HOST].budget_bytes:
            return
        await self._copies.room_for(wanted)
        while is_short():
            helped = await self._demote_while(is_short, reserve=not comes_back)
            if not is_short():
                return
            if not (helped or self._is_any_under_way()) or time.monotonic() > deadline_s:
                raise self._full(wanted)
            await asyncio.sleep(PAUSE_S)

    def _kept_bytes(self, wanted: int) -> int:
        """Of the host tier: what is on disk can come back through them though nothing more goes there."""
        kept = max((size for tier, size in self._sizes() if tier is Tier.DISK), default=0)
        fits = wanted + kept <= self._device.arenas[Tier.HOST].budget_bytes
        return kept if fits or self._moving.trouble else 0

    def _is_any_under_way(self) -> bool:
        """Whether slots of the host tier are taken by what comes or goes right now."""
        lying = sum(self._size(place) for place in self._line if self._may_leave(place))
        return self._moving.leaving.locked() or self._parked_bytes() > lying

    def _full(self, wanted: int) -> TierFullError:
        host = self._device.arenas[Tier.HOST]
        free = max(0, host.budget_bytes - self._parked_bytes())
        why = self._moving.trouble or "the disk tier (--spill-size) takes no more, or others were faster"
        return TierFullError(
            f"{wanted} bytes wanted of the host tier, {free} of {host.budget_bytes} free, some of them kept "
            f"for what comes back from disk; {why}; resume or release a suspended lease, make room on disk, "
            "or start kvd with a larger --host-tier",
            retry_after_ns=RETRY_AFTER_NS,
            wanted_bytes=wanted,
            free_bytes=free,
            budget_bytes=host.budget_bytes,
        )

    async def _demote_while(self, is_short: Callable[[], bool], reserve: bool = True) -> bool:
        """The oldest first; whether any went. With `reserve` some room on disk stays for a later return."""
        helped = False
        async with self._moving.leaving:
            for place in self._line:
                if not is_short() or (reserve and not self._has_reserve()):
                    break
                if self._may_leave(place):
                    if not await self._demoted(place):
                        break
                    helped = True
        return helped

    def _sizes(self) -> Iterator[tuple[Tier, int]]:
        """Of all parcels: where each lies, and its bytes."""
        for place in self._line:
            if found := self._line.found(place):
                yield found[1].tier, self._size(place)

    def _has_reserve(self) -> bool:
        """Whether beside the next one some can go to disk for one that comes back when all is full."""
        free = self._device.arenas[Tier.DISK].free_bytes + self._device.copied_bytes(Tier.DISK)
        return free >= RESERVE * max((size for _, size in self._sizes()), default=0)

    def _may_leave(self, place: Parcel) -> bool:
        """Whether it lies in the host tier and nobody wants it now."""
        found = self._line.found(place)
        if found is None or not found[1].slots.size or self._wanted[place]:
            return False
        return found[1].tier is Tier.HOST and not isinstance(found[0].job, Fetching)

    async def _demoted(self, place: Parcel) -> bool:
        """Whether the next one shall be tried, too."""
        try:
            try:
                await self._left(place)
            except KernelWorkerUnavailableError:
                if not await self._copies_gave_way(place):
                    raise
                await self._left(place)
        except KvdError as error:
            LOG.info("lease %d stays in the host tier: %s", place[0], error)
            return False
        return True

    async def _left(self, place: Parcel) -> None:
        move = self._device.begin_move(*place, Tier.DISK)
        self._leaving[place] = move.move_id
        try:
            await self._moving.left(move)
        finally:
            self._leaving.pop(place, None)

    async def _copies_gave_way(self, place: Parcel) -> bool:
        """Whether there is room on disk now that copies had: perhaps the file system has none left."""
        disk = self._device.arenas[Tier.DISK]
        if not self._may_leave(place) or not self._device.copied_bytes(Tier.DISK):
            return False
        self._device.drop_copies(Tier.DISK, max(0, disk.free_bytes) + self._size(place))
        await self._moving.punched()
        return self._may_leave(place)

    def _size(self, place: Parcel) -> int:
        """Bytes of what lies there."""
        found = self._line.found(place)
        assert found is not None, "it is there"
        lease, parked = found
        return parked.slots.size * slot_bytes(self._device.pools[lease.pool].spec)

    @contextlib.asynccontextmanager
    async def at_hand(self, place: Parcel, session_id: str, wait_ns: int) -> AsyncIterator[None]:
        """What that session's lease has parked lies in the host tier meanwhile.

        Raises TierFullError if there is no room for it within `wait_ns` or ROOM_S,
        KernelWorkerUnavailableError (it is still on disk), LeaseLostError, CheckpointLostError (it is damaged
        there).
        """
        self._wanted[place] += 1
        try:
            found = self._line.found(place)
            is_own = found is not None and found[0].session_id == session_id
            if is_own and place in self._leaving:  # else it would be gone when its blocks are there
                self._device.abort_move(self._leaving.pop(place))
            if found is not None and is_own and found[1].tier is Tier.DISK:
                await self._promoted_within(place, time.monotonic() + wait_ns / 1e9)
            yield
        finally:
            self._wanted[place] -= 1
            self._wanted += Counter()  # forgets those at zero

    async def _promoted_within(self, place: Parcel, deadline_s: float) -> None:
        while True:
            try:
                return await self._promoted(place)
            except TierFullError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _promoted(self, place: Parcel) -> None:
        """Once for all who wait for it, whoever leaves."""
        if place not in self._coming:
            self._coming[place] = self._spawn(self._promote(place))
            self._coming[place].add_done_callback(lambda _: self._coming.pop(place, None))
        await asyncio.shield(self._coming[place])

    async def _promote(self, place: Parcel) -> None:
        lease = self._device.leases[place[0]]
        parked = parcel(lease, place[1])
        if not self._moving.is_possible or parked is None:
            raise KernelWorkerUnavailableError("what is parked is on disk, and kvd runs without --spill-dir")
        await self._room(self._device.pools[lease.pool], parked.slots.size, comes_back=True)
        if self._device.leases.get(place[0]) is not lease or parcel(lease, place[1]) is not parked:
            return
        if await self._moving.moved(self._device.begin_move(*place, Tier.HOST)):
            return
        where = f"what lay on disk of lease {place[0]} is damaged"
        if place[1]:
            raise CheckpointLostError(f"{where}; the lease goes on as it is", lease_id=place[0])
        raise LeaseLostError(f"{where}; release it and prefill again", lease_id=place[0])
