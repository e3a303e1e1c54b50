"""A pool in GPU memory whose compressions run on the host: blocks are copied here, changed, and copied back.

What the host kernels see is a mirror of the pool, address space without memory: only blocks at hand take any,
so a job needs as much host memory as its lease has bytes. Scrubbing happens on the GPU.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.spec import KVSpec
from kvd_cuda.driver import Mapping, gpu_of, load_driver, map_legacy, map_shared
from kvd_daemon.core import runs_of
from kvd_daemon.kernel.budgets import SCRUB_STEP_BYTES
from kvd_daemon.kernel.mapped_pool import MappedPool
from kvd_daemon.kernel.messages import IntArray

MAP_NORESERVE = 0x4000  # linux/mman.h


@dataclass(frozen=True)
class GpuOf:
    """Which GPU's memory it is, how it is shared, and whom to tell of each step."""

    kind: str
    uuid: str
    on_step: Callable[[], None]


class StagedPool(MappedPool):
    """Owns the mapping of one pool."""

    def __init__(self, spec: KVSpec, blocks_total: int, pool_fd: int, sidecar_fd: int, gpu: GpuOf) -> None:
        """Raises CudaError."""
        self._gpu = gpu
        super().__init__(spec, blocks_total, pool_fd, sidecar_fd)

    def _mapped(self, pool_fd: int, byte_count: int) -> mmap.mmap:
        gpu = gpu_of(load_driver(), self._gpu.uuid)
        self._device: Mapping
        if self._gpu.kind == "cuda":
            self._device = map_shared(gpu, pool_fd, byte_count)
        else:
            self._device = map_legacy(gpu, pool_fd, byte_count)
        return mmap.mmap(-1, byte_count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)

    @contextmanager
    def at_hand(self, block_ids: Sequence[IntArray]) -> Iterator[None]:
        """See MappedPool; copies the blocks here, and forgets them afterwards."""
        try:
            for table in block_ids:
                self._copy(table, self._device.read)
            yield
        finally:
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def give_back(self, block_ids: IntArray) -> None:
        """See MappedPool."""
        self._copy(block_ids, self._device.write)

    def _copy(self, block_ids: IntArray, copy: Callable[[int, int, int], None]) -> None:
        mirror = self._flat.ctypes.data
        for start, count in runs_of(block_ids):
            for at, byte_count in self._run_segments(start, count):
                for step_at in range(at, at + byte_count, SCRUB_STEP_BYTES):
                    copy(step_at, mirror + step_at, min(SCRUB_STEP_BYTES, at + byte_count - step_at))
                    self._gpu.on_step()

    def _zero(self, offset: int, byte_count: int) -> None:
        self._device.zero(offset, byte_count)

    def populate(self, offset: int, byte_count: int) -> None:
        """GPU memory is there from the start."""
