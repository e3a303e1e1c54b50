"""Pools with their memory: created, mapped by the kernel worker, populated, dropped."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from kvd.errors import KernelWorkerUnavailableError, KvdError
from kvd.spec import KVSpec
from kvd_daemon.core import Device, Pool
from kvd_daemon.device.protocol import DeviceMemory, PoolMemory
from kvd_daemon.fd_store import DescriptorStore
from kvd_daemon.kernel.client import KernelClient, KernelDiedError, Priority
from kvd_daemon.kernel.messages import MapPool, Populate

from .arenas import Arenas

POOL_ID_BYTES = 8  # unique among the pools of one device, whatever its daemons
POPULATE_CHUNK_BYTES = 32 << 20  # bytes; some 10 ms of zeroing between two jobs that somebody waits for
RETRY_POPULATE_S = 0.5  # after a chunk failed, with its worker or for lack of memory; doubled each time
MAX_RETRY_POPULATE_S = 60.0  # seconds; memory that is short for minutes need not be asked for more often
LOG = logging.getLogger("kvd.pools")


def descriptors_of(pool: Pool) -> tuple[str, str]:
    """The names under which a pool's bytes and its sidecar outlive the daemon."""
    return f"pool.{pool.pool_id}.bytes", f"pool.{pool.pool_id}.sidecar"


@dataclass(frozen=True)
class Backing:
    """Who makes the memory of pools, who keeps its descriptors, and where slots of pools lie."""

    memory: DeviceMemory
    store: DescriptorStore
    arenas: Collection[Arenas]


class Pools:
    """A device's pools."""

    def __init__(
        self,
        device: Device,
        backing: Backing,
        kernel: KernelClient,
        spawn: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
    ) -> None:
        """Pools that the device has already are those of a daemon before: their memory was adopted."""
        self._device = device
        self._memory = backing.memory
        self._kernel = kernel
        self._store = backing.store
        self._arenas = backing.arenas
        self._spawn = spawn
        self._populated_bytes: dict[str, int] = {}
        self._populating: dict[str, asyncio.Task[None]] = {}
        for pool in device.pools.values():
            self._use(pool)

    @property
    def device_kind(self) -> str:
        return self._memory.kind

    @property
    def device_uuid(self) -> str:
        """Of the GPU; empty for the host."""
        return self._memory.uuid

    def create(self, name: str, spec: KVSpec, blocks: int) -> tuple[Pool, bool]:
        """The pool, and whether it is new. Raises what Device.create_pool does; then nothing was taken."""
        pool_id = secrets.token_hex(POOL_ID_BYTES)
        pool, created = self._device.create_pool(name, spec, blocks, pool_id)
        if created:
            try:
                self._back(pool)
            except KvdError:
                self._device.drop_pool(name)
                raise
        return pool, created

    def _back(self, pool: Pool) -> None:
        """Raises DeviceFullError, DeviceUnavailableError; then nothing was taken."""
        spec, total = pool.spec, pool.blocks_total
        memory = self._memory.create(pool.pool_id, spec.pool_bytes(total), spec.sidecar_bytes(total))
        try:
            for name, fd in zip(descriptors_of(pool), (memory.pool_fd, memory.sidecar_fd), strict=True):
                self._store.put(name, fd)
        except KvdError:
            self._free(pool)
            raise
        self._use(pool)

    def _use(self, pool: Pool) -> None:
        memory, spec, total = self.memory_of(pool), pool.spec, pool.blocks_total
        self._populated_bytes[pool.name] = 0
        request = MapPool(pool.pool_id, asdict(spec), total, self._memory.kind, self._memory.uuid)
        self._kernel.map_pool(request, (memory.pool_fd, memory.sidecar_fd))
        self._populating[pool.name] = self._spawn(self._populate(pool.name, memory))
        LOG.info("pool %s: %d blocks, %d bytes", pool.name, total, memory.pool_bytes)

    def drop(self, name: str, with_pins: bool) -> None:
        """Raises PoolNotFoundError, PoolInUseError."""
        pool = self._device.drop_pool(name, with_pins)
        self._populating.pop(name).cancel()
        del self._populated_bytes[name]
        self._kernel.unmap_pool(pool.pool_id)
        asyncio.get_running_loop().call_soon(self._free, pool)  # not before the journal tells of it
        LOG.info("pool %s is dropped", name)

    def _free(self, pool: Pool) -> None:
        for name in descriptors_of(pool):
            self._store.drop(name)
        for arenas in self._arenas:
            arenas.drop(pool)
        self._memory.free(pool.pool_id)

    def memory_of(self, pool: Pool) -> PoolMemory:
        return self._memory.memory_of(pool.pool_id)

    def populated_bytes(self, pool: Pool) -> int:
        """Bytes known to be backed by memory already."""
        return self._populated_bytes[pool.name]

    async def _populate(self, name: str, memory: PoolMemory) -> None:
        """Have pages before workers touch them: a page fault in a decode step costs more than the step."""
        offset, pause_s = 0, RETRY_POPULATE_S
        while offset < memory.pool_bytes:
            byte_count = min(POPULATE_CHUNK_BYTES, memory.pool_bytes - offset)
            try:
                await self._kernel.perform(Populate(memory.pool_id, offset, byte_count), Priority.POPULATE)
            except (KernelDiedError, KernelWorkerUnavailableError) as error:
                LOG.warning("pool %s: populating pauses for %g s: %s", name, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_POPULATE_S)
                continue
            offset += byte_count
            self._populated_bytes[name] = offset

    def close(self) -> None:
        for task in self._populating.values():
            task.cancel()
        self._memory.close()
