"""Host memory: one sealed memfd per pool and a sparse one for its sidecar.

The size seals promise everyone who maps them that no access ever meets a truncated file (SIGBUS).
"""

import fcntl
import os

from kvd.errors import DeviceFullError

from .protocol import PoolMemory

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostMemory:
    """Pages are taken when they are first touched; until then a pool costs nothing."""

    kind = "host"

    def __init__(self) -> None:
        self._pools: dict[str, PoolMemory] = {}

    def create(self, pool_id: str, pool_bytes: int, sidecar_bytes: int) -> PoolMemory:
        """Raises DeviceFullError if the system refuses; then nothing was taken."""
        assert pool_id not in self._pools, "pool ids are never used twice"
        pool_fd = sealed_memfd(f"kvd-pool-{pool_id}", pool_bytes)
        try:
            sidecar_fd = sealed_memfd(f"kvd-sidecar-{pool_id}", sidecar_bytes)
        except DeviceFullError:
            os.close(pool_fd)
            raise
        memory = PoolMemory(pool_id, pool_bytes, sidecar_bytes, pool_fd, sidecar_fd)
        self._pools[pool_id] = memory
        return memory

    def adopt(self, pool_id: str, pool_bytes: int, sidecar_bytes: int, fds: tuple[int, int]) -> bool:
        """Take over a pool of a daemon before this one; False, and nothing is taken, if these are not it."""
        assert pool_id not in self._pools, "pool ids are never used twice"
        if not (holds(fds[0], pool_bytes) and holds(fds[1], sidecar_bytes)):
            return False
        self._pools[pool_id] = PoolMemory(pool_id, pool_bytes, sidecar_bytes, *fds)
        return True

    def memory_of(self, pool_id: str) -> PoolMemory:
        return self._pools[pool_id]

    def free(self, pool_id: str) -> None:
        memory = self._pools.pop(pool_id)
        os.close(memory.pool_fd)
        os.close(memory.sidecar_fd)

    def close(self) -> None:
        for pool_id in list(self._pools):
            self.free(pool_id)


def holds(fd: int, size_bytes: int) -> bool:
    """Whether this is a memory file of that size, for ever."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS == SIZE_SEALS
    except OSError:
        return False
    return sealed and os.fstat(fd).st_size == size_bytes


def sealed_memfd(name: str, size_bytes: int) -> int:
    """Raises DeviceFullError."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise DeviceFullError(f"no memory file of {size_bytes} bytes: {error.strerror}") from error
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except OSError as error:
        os.close(fd)
        raise DeviceFullError(f"no memory file of {size_bytes} bytes: {error.strerror}") from error
    return fd
