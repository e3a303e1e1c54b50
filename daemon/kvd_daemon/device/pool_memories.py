"""The pools of a device as descriptors: what all kinds of memory have in common."""

import os
from abc import ABC, abstractmethod

from kvd.errors import DeviceFullError

from .protocol import PoolMemory
from .sealed import holds, sealed_memfd


class PoolMemories(ABC):
    """Implements DeviceMemory, but for how a pool's bytes are made. Sidecars are host memory everywhere."""

    kind: str
    uuid = ""

    def __init__(self) -> None:
        self._pools: dict[str, PoolMemory] = {}

    @abstractmethod
    def _make(self, pool_id: str, byte_count: int) -> int:
        """A descriptor of new memory. Raises DeviceFullError, GpuError."""

    @abstractmethod
    def _is_such(self, fd: int, byte_count: int) -> bool:
        """Whether `_make` could have made it, on this device."""

    def create(self, pool_id: str, pool_bytes: int, sidecar_bytes: int) -> PoolMemory:
        """See DeviceMemory."""
        assert pool_id not in self._pools, "pool ids are never used twice"
        pool_fd = self._make(pool_id, pool_bytes)
        try:
            sidecar_fd = sealed_memfd(f"kvd-sidecar-{pool_id}", sidecar_bytes)
        except DeviceFullError:
            os.close(pool_fd)
            raise
        memory = PoolMemory(pool_id, pool_bytes, sidecar_bytes, pool_fd, sidecar_fd)
        self._pools[pool_id] = memory
        return memory

    def adopt(self, pool_id: str, pool_bytes: int, sidecar_bytes: int, fds: tuple[int, int]) -> bool:
        """See DeviceMemory."""
        assert pool_id not in self._pools, "pool ids are never used twice"
        if not (self._is_such(fds[0], pool_bytes) and holds(fds[1], sidecar_bytes)):
            return False
        self._pools[pool_id] = PoolMemory(pool_id, pool_bytes, sidecar_bytes, *fds)
        return True

    def memory_of(self, pool_id: str) -> PoolMemory:
        """See DeviceMemory."""
        return self._pools[pool_id]

    def free(self, pool_id: str) -> None:
        """See DeviceMemory."""
        memory = self._pools.pop(pool_id)
        os.close(memory.pool_fd)
        os.close(memory.sidecar_fd)

    def close(self) -> None:
        """See DeviceMemory."""
        for pool_id in list(self._pools):
            self.free(pool_id)
