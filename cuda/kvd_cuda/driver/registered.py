"""Host memory that kernels read and write where it lies, over the bus."""

import weakref
from ctypes import c_uint64
from functools import partial
from typing import Any

from kvd_cuda.driver.devices import Gpu
from kvd_cuda.driver.mapping import unless_forked

DEVICE_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP


class RegisteredMemory:
    """`address` is good on the GPU for the bytes at `host`, whose pages are all taken and pinned."""

    def __init__(self, gpu: Gpu, host: int, byte_count: int, owner: Any) -> None:
        """`owner` keeps the host memory, and is kept until this is gone. Raises CudaError."""
        address = c_uint64()
        with gpu.context():
            gpu.driver.call("cuMemHostRegister_v2", host, byte_count, DEVICE_MAPPED)
            gpu.driver.call("cuMemHostGetDevicePointer_v2", address, host, 0)
        self.address = address.value
        unregister = partial(_unregister, gpu, host, owner)
        self._finalizer = weakref.finalize(self, unless_forked, gpu.driver.pid, unregister)
        self._finalizer.atexit = False  # the driver takes everything back with the process


def _unregister(gpu: Gpu, host: int, owner: Any) -> None:
    with gpu.context():
        gpu.driver.call("cuMemHostUnregister", host)
