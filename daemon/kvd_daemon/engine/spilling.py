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
from kvd_daemon.core.parked import Fetching, Move
from kvd_daemon.core.tiers import RETRY_AFTER_NS, content_bytes, slot_bytes
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import CopySlots

from .arenas import Arenas

HIGH_WATER = 0.9  # of the host tier's bytes; beyond that the oldest parcels go to disk
RESERVE = 3  # parcels, of the largest one's size: the next, and what may have to leave for one to come back
ROOM_S = 5.0  # seconds to wait for slots that others are about to give back; a parcel moves in less
PAUSE_S = 0.02  # between two looks whether they did
LOG = logging.getLogger("kvd.tiers")

Parcel = tuple[int, bool]
"""A lease's id, and whether it is the checkpoint."""


class Spilling:
    """Of one device. `disk` is the disk worker, if there is one; `on_trouble` hears why it takes nothing."""

    def __init__(
        self,
        device: RecordingDevice,
        arenas: dict[Tier, Arenas],
        disk: KernelClient | None,
        spawn: "Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]",
        on_trouble: Callable[[str], None],
    ) -> None:
        self._device = device
        self._arenas = arenas
        self._disk = disk
        self._spawn = spawn
        self._on_trouble = on_trouble
        self._trouble = ""  # why the last parcel did not go to disk
        self._line: dict[Parcel, None] = {}
        self._wanted: Counter[Parcel] = Counter()
        self._coming: dict[Parcel, asyncio.Task[None]] = {}
        self._demoting = asyncio.Lock()
        self._leaving: dict[Parcel, int] = {}  # moves to disk under way
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

        if self._disk is None or wanted > self._device.arenas[Tier.HOST].budget_bytes:
            return
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
        return kept if fits or self._trouble else 0

    def _is_any_under_way(self) -> bool:
        """Whether slots of the host tier are taken by what comes or goes right now."""
        lying = 0
        for place in list(self._line):
            if self._may_leave(place):
                lease = self._device.leases[place[0]]
                parked = parcel(lease, place[1])
                assert parked is not None, "it may leave"
                lying += parked.slots.size * slot_bytes(self._device.pools[lease.pool].spec)
        return self._demoting.locked() or self._parked_bytes() > lying

    def _full(self, wanted: int) -> TierFullError:
        host = self._device.arenas[Tier.HOST]
        free = max(0, host.budget_bytes - self._parked_bytes())
        why = self._trouble or "the disk tier (--spill-size) takes no more, or others were faster"
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
        async with self._demoting:
            for place in list(self._line):
                if not is_short() or (reserve and not self._has_reserve()):
                    break
                if self._may_leave(place):
                    if not await self._demoted(place):
                        break
                    helped = True
        return helped

    def _sizes(self) -> Iterator[tuple[Tier, int]]:
        """Of all parcels: where each lies, and its bytes."""
        for lease_id, is_checkpoint in self._line:
            lease = self._device.leases.get(lease_id)
            parked = None if lease is None else parcel(lease, is_checkpoint)
            if lease is not None and parked is not None:
                yield parked.tier, parked.slots.size * slot_bytes(self._device.pools[lease.pool].spec)

    def _has_reserve(self) -> bool:
        """Whether beside the next one some can go to disk for one that comes back when all is full."""
        disk = self._device.arenas[Tier.DISK]
        largest = max((size for _, size in self._sizes()), default=0)
        return disk.budget_bytes - disk.used_bytes >= RESERVE * largest

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
            self._leaving[place] = move.move_id
            await self._moved(move)
        except TierFullError as error:
            LOG.info("lease %d stays in the host tier: %s", place[0], error)
            return False
        except KvdError as error:
            self._in_trouble(f"nothing goes to disk (--spill-dir): {str(error).split(';')[0]}")
            return False
        finally:
            self._leaving.pop(place, None)
        self._in_trouble("")
        return True

    def _in_trouble(self, trouble: str) -> None:
        """Told once, however many parcels fail for it."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._on_trouble(f"degraded: {trouble}" if trouble else "")

    @contextlib.asynccontextmanager
    async def at_hand(self, place: Parcel, session_id: str, wait_ns: int) -> AsyncIterator[None]:
        """What that session's lease has parked lies in the host tier meanwhile.

        Raises TierFullError if there is no room for it within `wait_ns` or ROOM_S,
        KernelWorkerUnavailableError (it is still on disk), LeaseLostError, CheckpointLostError (it is damaged
        there).
        """
        self._wanted[place] += 1
        try:
            lease = self._device.leases.get(place[0])
            parked = None if lease is None else parcel(lease, place[1])
            is_own = lease is not None and lease.session_id == session_id
            if is_own and place in self._leaving:  # else it would be gone when its blocks are there
                self._device.abort_move(self._leaving.pop(place), lost=False)
            if is_own and parked is not None and parked.tier is Tier.DISK:
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
        if self._disk is None or parked is None:
            raise KernelWorkerUnavailableError("what is parked is on disk, and kvd runs without --spill-dir")
        await self._room(self._device.pools[lease.pool], parked.slots.size, comes_back=True)
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
