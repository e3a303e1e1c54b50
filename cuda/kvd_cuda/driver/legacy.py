"""GPU memory by cuIpc handles, for where descriptors cannot be had. It ends with the process that made it.

The maker needs a context and cannot open its own handle; both processes must see one pid namespace. A handle
travels as a file of its 64 bytes.
"""

import mmap
from ctypes import c_uint64

from kvd_cuda.driver.devices import Gpu
from kvd_cuda.driver.errors import (
    INVALID_CONTEXT,
    INVALID_VALUE,
    MAP_FAILED,
    SharingUnsupportedError,
    StaleHandleError,
)
from kvd_cuda.driver.library import IPC_HANDLE_BYTES, IpcMemHandle
from kvd_cuda.driver.mapping import Mapping

OWN_BLOCK_BYTES = 2 << 20  # smaller allocations share a block, and a handle would open all of it
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the only flag there is
REFUSED = (INVALID_VALUE, INVALID_CONTEXT, MAP_FAILED)


class OwnedMemory:
    """Memory of this process: it lives as long as the process, or until `free`."""

    def __init__(self, gpu: Gpu, byte_count: int) -> None:
        """Raises GpuMemoryFullError."""
        self._gpu, address = gpu, c_uint64()
        self._byte_count = -(-byte_count // OWN_BLOCK_BYTES) * OWN_BLOCK_BYTES
        with gpu.context():
            gpu.driver.call("cuMemAlloc_v2", address, self._byte_count)
        self.address = address.value

    def zero(self) -> None:
        """Its bytes are undefined at first. Returns when it is done."""
        with self._gpu.context():
            self._gpu.driver.call("cuMemsetD8_v2", self.address, 0, self._byte_count)
            self._gpu.driver.call("cuCtxSynchronize")

    def handle(self) -> bytes:
        """For other processes of this machine. Raises SharingUnsupportedError, e.g. on WSL2."""
        handle = IpcMemHandle()
        with self._gpu.context():
            self._gpu.driver.call("cuIpcGetMemHandle", handle, self.address)
        return bytes(handle.reserved)

    def free(self) -> None:
        """Whoever has it mapped must have stopped."""
        with self._gpu.context():
            self._gpu.driver.call("cuMemFree_v2", self.address)


def map_legacy(gpu: Gpu, fd: int, byte_count: int, writable: bool = True) -> Mapping:
    """Memory of another process, whose handle is in the file `fd`; that stays open as long as the mapping.

    Raises StaleHandleError if the memory is gone; SharingUnsupportedError if not `writable`; CudaError.
    """
    if not writable:
        raise SharingUnsupportedError(
            "memory by cuIpc handles cannot be mapped read-only: attach without read_only=True and do not "
            "write, or have kvd share descriptors where the GPU can (--gpu-sharing descriptors)"
        )
    try:
        handle = mmap.mmap(fd, IPC_HANDLE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise StaleHandleError("this descriptor is none of GPU memory; attach again") from error
    driver, address = gpu.driver, c_uint64()
    with gpu.context():
        code = driver.result(
            "cuIpcOpenMemHandle_v2", address, IpcMemHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS
        )
    if code in REFUSED:
        raise StaleHandleError(
            "the handle of this GPU memory is not good here: its owner is gone, is this very process, or "
            "runs in another container, perhaps under the very same pid (docker: --pid=host and --ipc=host "
            "on both sides)",
            code,
        )
    if code != 0:
        raise driver.failure("cuIpcOpenMemHandle", code)

    def unmap() -> None:
        with gpu.context():
            driver.call("cuIpcCloseMemHandle", address)
        handle.close()

    return Mapping(gpu, address.value, byte_count, unmap)
