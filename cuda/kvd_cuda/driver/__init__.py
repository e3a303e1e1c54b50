"""The NVIDIA driver by ctypes: libcuda.so.1 and nothing else, found by the system's loader.

One wheel serves CUDA 12 and 13; a process that only hands out memory loads no torch, cupy or numpy for it.
Every call is synchronous unless it takes a stream. Source: CUDA Driver API reference, versions 12.0 to 13.0.

CudaError                     see `errors`
load_driver() -> Driver       once a process
gpus(driver) -> [Gpu]         what this process may see, by UUID
create_shareable(gpu, n)      memory as a file descriptor; map_shared(gpu, fd, n) maps it in any process
"""

from kvd_cuda.driver.devices import Gpu, gpu_of, gpus
from kvd_cuda.driver.errors import (
    CallFailedError,
    CudaError,
    DeviceNotVisibleError,
    DriverMissingError,
    DriverTooOldError,
    DriverUnusableError,
    GpuMemoryFullError,
    SharingUnsupportedError,
    StaleHandleError,
)
from kvd_cuda.driver.legacy import OwnedMemory, map_legacy
from kvd_cuda.driver.library import Driver, load_driver
from kvd_cuda.driver.mapping import Mapping
from kvd_cuda.driver.memory import create_shareable, is_shareable_of, map_shared, rounded_up
from kvd_cuda.driver.modules import Function, Grid, Module
from kvd_cuda.driver.registered import RegisteredMemory
from kvd_cuda.driver.streams import Event, Stream, synchronize

__all__ = [
    "CallFailedError",
    "CudaError",
    "DeviceNotVisibleError",
    "Driver",
    "DriverMissingError",
    "DriverTooOldError",
    "DriverUnusableError",
    "Event",
    "Function",
    "Gpu",
    "GpuMemoryFullError",
    "Grid",
    "Mapping",
    "Module",
    "OwnedMemory",
    "RegisteredMemory",
    "SharingUnsupportedError",
    "StaleHandleError",
    "Stream",
    "create_shareable",
    "gpu_of",
    "gpus",
    "is_shareable_of",
    "load_driver",
    "map_legacy",
    "map_shared",
    "rounded_up",
    "synchronize",
]
