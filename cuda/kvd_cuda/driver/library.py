"""Loading libcuda.so.1 and calling it. The names are those of the library, versions included."""

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from kvd_cuda.driver.errors import DriverMissingError, DriverTooOldError, failed, unusable

LIBRARY = "libcuda.so.1"
MIN_DRIVER_VERSION = 12_000  # 12.0: cuDeviceGetUuid_v2, RDMA with VMM, and what the kernels' PTX needs
IPC_HANDLE_BYTES = 64  # cuda.h, CU_IPC_HANDLE_SIZE


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = [("reserved", c_ubyte * IPC_HANDLE_BYTES)]


_Out = POINTER
_SIGNATURES: dict[str, Sequence[Any]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_Out(c_int),),
    "cuGetErrorName": (c_int, _Out(c_char_p)),
    "cuDeviceGetCount": (_Out(c_int),),
    "cuDeviceGet": (_Out(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceTotalMem_v2": (_Out(c_size_t), c_int),
    "cuDeviceGetAttribute": (_Out(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_Out(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_Out(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_Out(c_size_t), _Out(c_size_t)),
    "cuMemGetAllocationGranularity": (_Out(c_size_t), c_void_p, c_int),
    "cuMemCreate": (_Out(c_uint64), c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (_Out(c_uint64), c_void_p, c_int),
    "cuMemGetAllocationPropertiesFromHandle": (c_void_p, c_uint64),
    "cuMemAddressReserve": (_Out(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemAlloc_v2": (_Out(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuIpcGetMemHandle": (_Out(IpcMemHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (_Out(c_uint64), IpcMemHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemsetD8_v2": (c_uint64, c_ubyte, c_size_t),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (_Out(c_uint64), c_void_p, c_uint),
    "cuModuleLoadData": (_Out(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (_Out(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuStreamCreate": (_Out(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (_Out(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (_Out(c_float), c_void_p, c_void_p),
}


class Driver:
    """An initialised libcuda.so.1. A child made by fork() cannot use it: `pid` tells."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises DriverTooOldError, DriverUnusableError."""
        self._functions = {name: _function(library, name, types) for name, types in _SIGNATURES.items()}
        self.pid = os.getpid()
        self.contexts: dict[int, c_void_p] = {}
        """Primary contexts that this process has retained, by ordinal."""
        if (code := self._functions["cuInit"](0)) != 0:
            raise unusable(code, self._name_of(code))
        version = c_int()
        self.call("cuDriverGetVersion", version)
        self.version = version.value
        if self.version < MIN_DRIVER_VERSION:
            raise DriverTooOldError(
                f"the CUDA driver is of version {_dotted(self.version)}, {_dotted(MIN_DRIVER_VERSION)} is "
                "needed: install an NVIDIA driver 525 or newer"
            )

    def call(self, name: str, *arguments: Any) -> None:
        """Call by the library's name; instances of ctypes go as pointers where one is wanted.

        Raises the CudaError of what the driver answers.
        """
        if (code := self.result(name, *arguments)) != 0:
            raise failed(name, code, self._name_of(code))

    def result(self, name: str, *arguments: Any) -> int:
        """As `call`, for whoever knows what to make of a CUresult."""
        code: int = self._functions[name](*arguments)
        return code

    def failure(self, name: str, code: int) -> Exception:
        """What `call` would raise."""
        return failed(name, code, self._name_of(code))

    def _name_of(self, code: int) -> str:
        name = c_char_p()
        self._functions["cuGetErrorName"](code, name)
        return name.value.decode() if name.value else f"CUresult {code}"


@cache
def load_driver() -> Driver:
    """Raises DriverMissingError, DriverTooOldError, DriverUnusableError; asked again, it looks again."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverMissingError(
            f"no CUDA driver here ({LIBRARY}): install the NVIDIA driver, or pass it into the container "
            "(docker run --gpus all)"
        ) from error
    return Driver(library)


def _function(library: ctypes.CDLL, name: str, types: Sequence[Any]) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise DriverTooOldError(
            f"the CUDA driver has no {name}: install an NVIDIA driver 525 or newer"
        ) from error
    function.argtypes, function.restype = list(types), c_int
    return function


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
