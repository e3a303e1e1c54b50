"""Host memory: one sealed memfd per pool."""

from .pool_memories import PoolMemories
from .sealed import holds, sealed_memfd


class HostMemory(PoolMemories):
    """Pages are taken when they are first touched; until then a pool costs nothing."""

    kind = "host"

    def _make(self, pool_id: str, byte_count: int) -> int:
        return sealed_memfd(f"kvd-pool-{pool_id}", byte_count)

    def _is_such(self, fd: int, byte_count: int) -> bool:
        return holds(fd, byte_count)
