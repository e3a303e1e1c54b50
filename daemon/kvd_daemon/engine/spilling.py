"""The disk tier: what was parked longest goes there when host memory is short, and back when it is wanted.

Everything here waits for a disk, and nobody waits for it but who wants back what lies there.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from kvd.errors import CheckpointLostError, KernelWorkerUnavailableError, KvdError, LeaseLostError
from kvd_daemon.core import Pool, Tier
from kvd_daemon.core.moving import parcel
from kvd_daemon.core.parked import Fetching, Move
from kvd_daemon.core.tiers import content_bytes, slot_bytes
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import CopySlots

from .arenas import Arenas

HIGH_WATER = 0.9  # of the host tier's bytes; beyond that the oldest parcels go to disk
RESERVE = 3  # parcels, of the largest one's size: the next, and what may have to leave for one to come back
LOG = logging.getLogger("kvd.tiers")

Parcel = tuple[int, bool]
"""A lease's id, and whether it is the checkpoint."""


class Spilling:
    """Of one device. `disk` is the disk worker, if there is one."""

    def __init__(
        self,
        device: RecordingDevice,
        arenas: dict[Tier, Arenas],
        disk: KernelClient | None,
        spawn: "Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]",
    ) -> None:
        self._device = device
        self._arenas = arenas
        self._disk = disk
        self._spawn = spawn
        self._line: dict[Parcel, None] = {}
        self._wanted: Counter[Parcel] = Counter()
        self._coming: dict[Parcel, asyncio.Task[None]] = {}
        self._demoting = asyncio.Lock()
        for lease in device.leases.values():
            for is_checkpoint in (False, True):
                if parcel(lease, is_checkpoint) is not None:
                    self._line[lease.lease_id, is_checkpoint] = None

    def parked(self, lease_id: int, is_checkpoint: bool) -> None:
        """That is the newest parcel."""
        self._line.pop((lease_id, is_checkpoint), None)
        self._line[lease_id, is_checkpoint] = None
        if self._disk is not None and self._is_high():
            self._spawn(self._relieve())

    async def _relieve(self) -> None:
        await self._demote_while(self._is_high)

    def _is_high(self) -> bool:
        return self._parked_bytes() > HIGH_WATER * self._device.arenas[Tier.HOST].budget_bytes

    def _parked_bytes(self) -> int:
        """Copies of cached blocks make room by themselves."""
        return self._device.arenas[Tier.HOST].used_bytes - self._device.copied_bytes

    async def make_room(self, pool: Pool, slots: int, reserve: bool = True) -> None:
        """Until the host tier has so many free slots for `pool`, or cannot have them."""
        host = self._device.arenas[Tier.HOST]
        wanted = slots * slot_bytes(pool.spec)
        if self._disk is not None and wanted <= host.budget_bytes:
            await self._demote_while(lambda: self._parked_bytes() + wanted > host.budget_bytes, reserve)

    async def room_for(self, lease_id: int) -> None:
        """As `make_room`, for all that lease has in blocks."""
        lease = self._device.leases.get(lease_id)
        pool = None if lease is None else self._device.pools.get(lease.pool)
        if lease is not None and pool is not None:
            await self.make_room(pool, len(lease.blocks))

    async def _demote_while(self, is_short: Callable[[], bool], reserve: bool = True) -> None:
        """The oldest first. With `reserve` there stays room on disk to bring something back at last."""
        async with self._demoting:
            for place in list(self._line):
                if not is_short() or (reserve and not self._has_reserve()):
                    return
                if self._may_leave(place) and not await self._demoted(place):
                    return

    def _has_reserve(self) -> bool:
        """Whether beside the next one some can go to disk for one that comes back when all is full."""
        disk = self._device.arenas[Tier.DISK]
        sizes = [0]
        for lease_id, is_checkpoint in self._line:
            lease = self._device.leases.get(lease_id)
            parked = None if lease is None else parcel(lease, is_checkpoint)
            if lease is not None and parked is not None:
                sizes.append(parked.slots.size * slot_bytes(self._device.pools[lease.pool].spec))
        return disk.budget_bytes - disk.used_bytes >= RESERVE * max(sizes)

    def _may_leave(self, place: Parcel) -> bool:
        """Whether it lies in the host tier and nobody wants it now. What is no more leaves the line."""
        lease = self._device.leases.get(place[0])
        parked = None if lease is None else parcel(lease, place[1])
        if lease is None or parked is None or not parked.slots.size:
            del self._line[place]
            return False
        busy = isinstance(lease.job, Fetching) or self._wanted[place]
        return parked.tier is Tier.HOST and not busy

    async def _demoted(self, place: Parcel) -> bool:
        """Whether the next one shall be tried, too."""
        try:
            move = self._device.begin_move(*place, Tier.DISK)
            await self._moved(move)
        except KvdError as error:
            LOG.warning("lease %d stays in the host tier: %s", place[0], error)
            return False
        return True

    @contextlib.asynccontextmanager
    async def at_hand(self, place: Parcel, session_id: str) -> AsyncIterator[None]:
        """What that session's lease has parked lies in the host tier meanwhile.

        Raises TierFullError, KernelWorkerUnavailableError (it is still on disk), LeaseLostError,
        CheckpointLostError (it is damaged there).
        """
        self._wanted[place] += 1
        try:
            lease = self._device.leases.get(place[0])
            parked = None if lease is None else parcel(lease, place[1])
            is_own = lease is not None and lease.session_id == session_id
            if is_own and parked is not None and parked.tier is Tier.DISK:
                await self._promoted(place)
            yield
        finally:
            self._wanted[place] -= 1
            self._wanted += Counter()  # forgets those at zero

    async def _promoted(self, place: Parcel) -> None:
        """Once for all who wait for it, whoever leaves."""
        if place not in self._coming:
            self._coming[place] = self._spawn(self._promote(place))
            self._coming[place].add_done_callback(lambda _: self._coming.pop(place, None))
        await asyncio.shield(self._coming[place])

    async def _promote(self, place: Parcel) -> None:
        lease = self._device.leases[place[0]]
        parked = parcel(lease, place[1])
        if self._disk is None or parked is None:
            raise KernelWorkerUnavailableError("what is parked is on disk, and kvd runs without --spill-dir")
        await self.make_room(self._device.pools[lease.pool], parked.slots.size, reserve=False)
        if self._device.leases.get(place[0]) is not lease or parcel(lease, place[1]) is not parked:
            return
        if await self._moved(self._device.begin_move(*place, Tier.HOST)):
            return
        where = f"what lay on disk of lease {place[0]} is damaged"
        if place[1]:
            raise CheckpointLostError(f"{where}; the lease goes on as it is", lease_id=place[0])
        raise LeaseLostError(f"{where}; release it and prefill again", lease_id=place[0])

    async def _moved(self, move: Move) -> bool:
        """False if it was damaged. Raises KernelWorkerUnavailableError; then it is where it was."""
        assert self._disk is not None, "there is a disk worker"
        pool, source = self._device.pools[move.pool], move.parked
        stride, size = slot_bytes(pool.spec), content_bytes(pool.spec)
        job = CopySlots(stride, size, source.slots, move.slots, source.checksums)
        try:
            if move.tier is Tier.HOST:
                await self._arenas[Tier.HOST].punched()
            with self._arenas[source.tier].lent(pool) as origin, self._arenas[move.tier].lent(pool) as target:
                done = await self._disk.perform(job, fds=[origin, target])
        except KernelDiedError as death:
            self._device.abort_move(move.move_id, lost=False)
            raise KernelWorkerUnavailableError("the disk worker died; retry in a second") from death
        except KvdError:
            self._device.abort_move(move.move_id, lost=False)
            raise
        if not done.damaged.size:
            self._device.finish_move(move.move_id)
            return True
        return not self._device.abort_move(move.move_id, lost=source.tier is Tier.DISK)
