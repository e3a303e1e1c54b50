"""Moves between the tiers: the disk worker copies, the core swaps. And why the disk takes nothing, if so."""

import asyncio
from collections.abc import Callable

from kvd.errors import DeviceUnavailableError, KernelWorkerUnavailableError, KvdError
from kvd_daemon.core import Tier
from kvd_daemon.core.parked import CopyMove, Move
from kvd_daemon.core.tiers import content_bytes, slot_bytes
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import CopySlots

from .arenas import Arenas
from .undoing import undone_unless_done


class Moving:
    """Of one device. `disk` is the disk worker, if there is one; `on_trouble` hears why it takes nothing."""

    def __init__(
        self,
        device: RecordingDevice,
        arenas: dict[Tier, Arenas],
        disk: KernelClient | None,
        on_trouble: Callable[[str], None],
    ) -> None:
        self._device = device
        self._arenas = arenas
        self._disk = disk
        self._on_trouble = on_trouble
        self.trouble = ""
        """Why the last thing that should did not go to disk."""
        self.leaving = asyncio.Lock()
        """Held by what goes to disk: one thing at a time, so that what comes back waits for no more."""

    @property
    def is_possible(self) -> bool:
        return self._disk is not None

    async def moved(self, move: Move | CopyMove) -> bool:
        """Whether nothing was lost.

        Raises KernelWorkerUnavailableError, DeviceUnavailableError; then all is where it was.
        """
        assert self._disk is not None, "there is a disk worker"
        pool, origin = self._device.pools.get(move.pool), move.origin
        if pool is None:
            raise DeviceUnavailableError(f"pool {move.pool} was dropped meanwhile, and its moves with it")
        sizes = slot_bytes(pool.spec), content_bytes(pool.spec)
        job = CopySlots(*sizes, origin.slots, move.slots, origin.checksums)
        with undone_unless_done(lambda _: self._device.abort_move(move.move_id)):
            if move.tier is Tier.HOST:
                await self._arenas[Tier.HOST].punched()
            with self._arenas[origin.tier].lent(pool) as source, self._arenas[move.tier].lent(pool) as target:
                try:
                    done = await self._disk.perform(job, fds=[source, target])
                except KernelDiedError as death:
                    raise KernelWorkerUnavailableError("the disk worker died; retry in a second") from death
        return self._device.finish_move(move.move_id, done.damaged.tolist())

    async def left(self, move: Move | CopyMove) -> None:
        """As `moved`, to disk: whether it takes things is shown. Raises KernelWorkerUnavailableError."""
        try:
            await self.moved(move)
        except KvdError as error:
            self._show(f"nothing goes to disk (--spill-dir): {str(error).split(';')[0]}")
            raise
        self._show("")

    def _show(self, trouble: str) -> None:
        """Told once, however many moves fail for it."""
        if trouble != self.trouble:
            self.trouble = trouble
            self._on_trouble(f"degraded: {trouble}" if trouble else "")

    async def punched(self) -> None:
        """What was given up on disk has given its room to others."""
        await self._arenas[Tier.DISK].punched()
