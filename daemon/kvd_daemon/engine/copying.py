"""Blocks to slots of the host tier and back, by the kernel worker."""

from kvd.errors import KernelWorkerUnavailableError
from kvd_daemon.core import Device, Pool
from kvd_daemon.core.free_runs import IntArray
from kvd_daemon.kernel.client import KernelClient, KernelDiedError
from kvd_daemon.kernel.messages import Checksums, Done, Fetch, Request, Stow

from .arenas import Arenas

COPY_ATTEMPTS = 3  # kernel workers that may die over one copy before the call is undone
RETRY_AFTER_NS = 500_000_000  # ns; until another kernel worker is there


class Copying:
    """Of a device. Copying again does no harm, so a kernel worker that dies is only waited for."""

    def __init__(self, device: Device, kernel: KernelClient, arenas: Arenas) -> None:
        self._device = device
        self._kernel = kernel
        self._arenas = arenas

    async def stow(self, pool: str, source: IntArray, slots: IntArray) -> Checksums:
        """Checksums of what is in the slots. Raises KernelWorkerUnavailableError, DeviceUnavailableError."""
        found = self._device.pools[pool]
        done = await self._copy(found, Stow(found.pool_id, source, slots), slots.size)
        assert done.checksums.size == slots.size, "the kernel worker tells a checksum for each slot"
        return done.checksums

    async def fetch(
        self, pool: str, slots: IntArray, destination: IntArray, checksums: Checksums
    ) -> list[int]:
        """Indices of damaged slots; all others are in their blocks. Raises as `stow`."""
        found = self._device.pools[pool]
        job = Fetch(found.pool_id, slots, destination, checksums)
        damaged: list[int] = (await self._copy(found, job, slots.size)).damaged.tolist()
        return damaged

    async def _copy(self, pool: Pool, job: Request, count: int) -> Done:
        if not count:
            return Done()
        with self._arenas.lent(pool) as arena:
            for _ in range(COPY_ATTEMPTS):
                try:
                    return await self._kernel.perform(job, fds=[arena])
                except KernelDiedError:
                    continue
        raise KernelWorkerUnavailableError(
            "kernel workers died while a lease was copied; it is as it was, retry after 500 ms",
            retry_after_ns=RETRY_AFTER_NS,
        )
