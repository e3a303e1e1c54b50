"""GPU memory as a file descriptor: made by one process, mapped by any that gets it, freed after the last.

No context is needed to make it. It lives as long as a handle, a mapping or a descriptor of it anywhere, so it
outlives its maker. Source: CUDA Driver API, Virtual Memory Management.
"""

import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p

from kvd_cuda.driver.devices import Gpu
from kvd_cuda.driver.errors import INVALID_VALUE, OPERATING_SYSTEM, SharingUnsupportedError, StaleHandleError
from kvd_cuda.driver.library import Driver
from kvd_cuda.driver.mapping import Mapping

PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ, READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_...
BAD_DESCRIPTOR = (INVALID_VALUE, OPERATING_SYSTEM)


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows_metadata", c_void_p),
        ("compression", c_ubyte),
        ("rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


def _properties(gpu: Gpu) -> _Properties:
    wanted = _Properties(PINNED, POSIX_FD, _Location(ON_DEVICE, gpu.ordinal))
    wanted.rdma_capable = gpu.has_rdma  # later it cannot be had: RDMA would take a far slower way, silently
    return wanted


def rounded_up(gpu: Gpu, byte_count: int) -> int:
    """What `byte_count` bytes take: whole pages of the GPU, 2 MiB as a rule."""
    granularity = c_size_t()
    gpu.driver.call("cuMemGetAllocationGranularity", granularity, byref(_properties(gpu)), 0)
    return -(-byte_count // granularity.value) * granularity.value


def create_shareable(gpu: Gpu, byte_count: int) -> int:
    """A descriptor of new memory; close it. Its bytes are undefined.

    Raises SharingUnsupportedError, GpuMemoryFullError; then nothing was taken.
    """
    if not gpu.shares_descriptors:
        raise SharingUnsupportedError(
            f"memory of {gpu.name} ({gpu.uuid}) cannot be shared as file descriptors (WSL2, or a GPU older "
            "than Volta)"
        )
    handle = c_uint64()
    gpu.driver.call("cuMemCreate", handle, rounded_up(gpu, byte_count), byref(_properties(gpu)), 0)
    try:
        return _exported(gpu.driver, handle)
    finally:
        gpu.driver.call("cuMemRelease", handle)


def _exported(driver: Driver, handle: c_uint64) -> int:
    fd = c_int()
    driver.call("cuMemExportToShareableHandle", byref(fd), handle, POSIX_FD, 0)
    os.set_inheritable(fd.value, False)
    return fd.value


def _imported(driver: Driver, fd: int) -> c_uint64:
    """Raises StaleHandleError if it is no descriptor of GPU memory."""
    handle = c_uint64()
    code = driver.result("cuMemImportFromShareableHandle", handle, c_void_p(fd), POSIX_FD)
    if code in BAD_DESCRIPTOR:
        raise StaleHandleError("this descriptor is none of GPU memory; attach again", code)
    if code != 0:
        raise driver.failure("cuMemImportFromShareableHandle", code)
    return handle


def is_shareable_of(gpu: Gpu, fd: int) -> bool:
    """Whether `fd` is memory of that GPU. The driver does not tell its size."""
    try:
        handle = _imported(gpu.driver, fd)
    except StaleHandleError:
        return False
    found = _Properties()
    try:
        gpu.driver.call("cuMemGetAllocationPropertiesFromHandle", byref(found), handle)
    finally:
        gpu.driver.call("cuMemRelease", handle)
    return (found.location.type, found.location.id) == (ON_DEVICE, gpu.ordinal)


def map_shared(gpu: Gpu, fd: int, byte_count: int, writable: bool = True) -> Mapping:
    """Memory of `create_shareable`, mapped in this process; `fd` stays the caller's.

    Not `writable` is a guard against mistakes, not a border: whoever has the descriptor may map it anew.
    Raises StaleHandleError, CudaError; then nothing is mapped.
    """
    driver, size = gpu.driver, rounded_up(gpu, byte_count)
    handle = _imported(driver, fd)
    address = c_uint64()
    try:
        driver.call("cuMemAddressReserve", address, size, 0, 0, 0)
        try:
            _map_at(gpu, address.value, size, handle, READ_WRITE if writable else READ)
        except BaseException:
            driver.call("cuMemAddressFree", address, size)
            raise
    finally:
        driver.call("cuMemRelease", handle)  # the mapping keeps the memory
    return Mapping(gpu, address.value, byte_count, lambda: _unmap(driver, address.value, size))


def _map_at(gpu: Gpu, address: int, size: int, handle: c_uint64, flags: int) -> None:
    gpu.driver.call("cuMemMap", address, size, 0, handle, 0)
    access = _Access(_Location(ON_DEVICE, gpu.ordinal), flags)
    try:
        gpu.driver.call("cuMemSetAccess", address, size, byref(access), 1)
    except BaseException:
        gpu.driver.call("cuMemUnmap", address, size)
        raise


def _unmap(driver: Driver, address: int, size: int) -> None:
    driver.call("cuMemUnmap", address, size)
    driver.call("cuMemAddressFree", address, size)
