"""GPU memory at an address of this process."""

import os
import weakref
from collections.abc import Callable

from kvd_cuda.driver.devices import Gpu

LEGACY_STREAM = 1  # CU_STREAM_LEGACY: the one that copies without a stream are made in


class Mapping:
    """`address` is good on the GPU, not for the CPU. The mapping goes with its last user, or by `close`.

    Copies return when they are done, for everybody; they do not wait for kernels in streams of others.
    """

    def __init__(self, gpu: Gpu, address: int, byte_count: int, unmap: Callable[[], None]) -> None:
        self.gpu = gpu
        self.address = address
        self.byte_count = byte_count
        self._finalizer = weakref.finalize(self, unless_forked, gpu.driver.pid, unmap)
        self._finalizer.atexit = False  # the driver takes everything back with the process

    def write(self, offset: int, source: int, byte_count: int) -> None:
        """Copy from host address `source`. Raises CudaError, e.g. of memory that is mapped read-only."""
        self._check(offset, byte_count)
        with self.gpu.context():
            self.gpu.driver.call("cuMemcpyHtoD_v2", self.address + offset, source, byte_count)
            # It may return as soon as the bytes are staged: another process, or stream, could read too early.
            self.gpu.driver.call("cuStreamSynchronize", LEGACY_STREAM)

    def read(self, offset: int, target: int, byte_count: int) -> None:
        """Copy to host address `target`."""
        self._check(offset, byte_count)
        with self.gpu.context():
            self.gpu.driver.call("cuMemcpyDtoH_v2", target, self.address + offset, byte_count)

    def zero(self, offset: int, byte_count: int) -> None:
        """Returns when it is done."""
        self._check(offset, byte_count)
        with self.gpu.context():
            self.gpu.driver.call("cuMemsetD8_v2", self.address + offset, 0, byte_count)
            self.gpu.driver.call("cuCtxSynchronize")

    def close(self) -> None:
        """Unmap; kernels and copies of it must have ended. Harmless twice."""
        self._finalizer()

    def _check(self, offset: int, byte_count: int) -> None:
        assert self._finalizer.alive, "memory that is not mapped any more"
        assert 0 <= offset <= offset + byte_count <= self.byte_count, "outside of the mapping"


def unless_forked(pid: int, unmap: Callable[[], None]) -> None:
    """A forked child has no such mapping, and may not call the driver."""
    if os.getpid() == pid:
        unmap()
