"""What a daemon needs of the memory it hands out: the same few calls for host memory and for a GPU."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PoolMemory:
    """A pool's bytes and its sidecar as descriptors that other processes can map. Owned by the device.

    The bytes live as long as any process has their descriptor or a mapping of it, whatever dies.
    """

    pool_id: str
    pool_bytes: int
    sidecar_bytes: int
    pool_fd: int
    sidecar_fd: int


class DeviceMemory(Protocol):
    """Memory of one device. None of its calls touches the bytes."""

    kind: str
    """"host"; "cuda": `pool_fd` is memory of a GPU; "cuda_legacy": `pool_fd` has a cuIpc handle in it."""

    uuid: str
    """Of the GPU; empty for the host."""

    def create(self, pool_id: str, pool_bytes: int, sidecar_bytes: int) -> PoolMemory:
        """Raises DeviceFullError, GpuError; then nothing was taken."""

    def adopt(self, pool_id: str, pool_bytes: int, sidecar_bytes: int, fds: tuple[int, int]) -> bool:
        """Take over a pool of a daemon before this one; False, and nothing is taken, if these are not it."""

    def memory_of(self, pool_id: str) -> PoolMemory:
        """Of a pool that was created or adopted."""

    def free(self, pool_id: str) -> None:
        """Close the descriptors; the bytes go when the last process unmaps them."""

    def close(self) -> None:
        """Free every pool."""
