"""A pool in GPU memory, whose kernels run on that GPU."""

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.spec import KVSpec
from kvd_cuda.driver import Mapping, RegisteredMemory, map_legacy, map_shared
from kvd_cuda.errors import KernelInputError
from kvd_cuda.gpu.backend import CudaBackend
from kvd_cuda.gpu.device import KernelDevice
from kvd_cuda.gpu.placing import DeviceSidecar
from kvd_cuda.gpu.scratch_queries import ScratchQueries
from kvd_cuda.gpu.warm import warm_up
from kvd_cuda.queries import WindowQueries
from kvd_daemon.kernel.mapped_pool import MappedPool
from kvd_daemon.kernel.messages import IntArray, LeaseAt, QueriesAt, no_ids


class CudaPool(MappedPool):
    """Owns the mapping of one pool. Its planes are arrays at addresses of the GPU: only kernels may look.

    The sidecar is host memory, registered so that kernels reach it. So is the buffer by which blocks come and
    go: its pages are pinned, and the GPU copies there itself.
    """

    def __init__(
        self, spec: KVSpec, blocks_total: int, fds: tuple[int, int], kind: str, device: KernelDevice
    ) -> None:
        """Raises CudaError."""
        self._map = map_shared if kind == "cuda" else map_legacy
        self._kernels = device
        super().__init__(spec, blocks_total, *fds)
        base = self.positions.ctypes.data
        self._registered = RegisteredMemory(device.gpu, base, self._sidecar.size(), self._sidecar)
        scores = self._registered.address + self.scores.ctypes.data - base
        sidecar = DeviceSidecar(self._registered.address, scores)
        self.backend = CudaBackend(device, sidecar)
        with contextlib.suppress(KernelInputError):  # blocks that kernels refuse: each job is told so
            warm_up(device, self.lease(_NO_LEASE), sidecar)

    def _mapped(self, pool_fd: int, byte_count: int) -> Any:
        self._device: Mapping = self._map(self._kernels.gpu, pool_fd, byte_count)
        return (ctypes.c_uint8 * byte_count).from_address(self._device.address)

    def _bounced(self, byte_count: int) -> Any:
        buffer = mmap.mmap(-1, byte_count)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        self._pinned = RegisteredMemory(self._kernels.gpu, address, byte_count, buffer)
        return buffer

    def queries(self, at: QueriesAt) -> WindowQueries | None:
        """See MappedPool; they stay in the scratch blocks."""
        if at.query_count == 0:
            return None
        shape = (self.spec.layers, at.query_count, at.query_heads, self.spec.head_dim_k)
        return ScratchQueries.at(tuple(self._stretches(at.scratch)), shape, at.query_dtype, at.has_row_lse)

    def _stretches(self, block_ids: IntArray) -> Iterator[tuple[int, int]]:
        """Where the bytes of these blocks lie on the GPU, neighbours in one."""
        begin = end = 0
        for block in block_ids.tolist():
            for offset, byte_count in self._segments(block):
                if self._device.address + offset != end:
                    if end > begin:
                        yield begin, end - begin
                    begin = end = self._device.address + offset
                end += byte_count
        if end > begin:
            yield begin, end - begin

    def _read_bytes(self, block_id: int, into: npt.NDArray[np.uint8]) -> int:
        done = 0
        for at, byte_count in self._segments(block_id):
            self._device.read(at, into.ctypes.data + done, byte_count)
            done += byte_count
        return done

    def _write_bytes(self, block_id: int, content: npt.NDArray[np.uint8]) -> int:
        done = 0
        for at, byte_count in self._segments(block_id):
            self._device.write(at, content.ctypes.data + done, byte_count)
            done += byte_count
        return done

    def _zero(self, offset: int, byte_count: int) -> None:
        self._device.zero(offset, byte_count)

    def _move(self, source: int, target: int, byte_count: int) -> None:
        """By way of this process: a block is small, and it happens once a fork."""
        self._device.read(source, self.bounce.ctypes.data, byte_count)
        self._device.write(target, self.bounce.ctypes.data, byte_count)

    def populate(self, offset: int, byte_count: int) -> None:
        """GPU memory is there from the start."""


_NO_LEASE = LeaseAt(pool_id="", source=no_ids(), length=0, position=0, compressed_length=0, observed_length=0)
