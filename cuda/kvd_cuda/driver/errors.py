"""What can go wrong with a GPU and its driver, each with the way out in its text.

CudaError
|-- DriverMissingError        no libcuda.so.1
|-- DriverTooOldError
|-- DriverUnusableError       it is there, but does not start
|-- DeviceNotVisibleError     no such GPU, or hidden from this process
|-- GpuMemoryFullError
|-- SharingUnsupportedError   memory of this GPU cannot be shared in that way (WSL2, old GPUs)
|-- StaleHandleError          memory whose owner is gone, or a handle that is none
`-- CallFailedError           everything else: the call and what the driver says
"""


class CudaError(Exception):
    """Base of all. `code` is the driver's CUresult, 0 where none was given."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DriverMissingError(CudaError):
    """No libcuda.so.1: no NVIDIA driver, or it is not passed into this container."""


class DriverTooOldError(CudaError):
    """Its version is below MIN_DRIVER_VERSION, or a function is missing."""


class DriverUnusableError(CudaError):
    """The driver does not start: no GPU, another version in the kernel, a forked process."""


class DeviceNotVisibleError(CudaError):
    """No GPU of that UUID or index in this process."""


class GpuMemoryFullError(CudaError):
    """The GPU has too little free memory. Nothing was taken."""


class SharingUnsupportedError(CudaError):
    """Memory of this GPU cannot be shared between processes in that way."""


class StaleHandleError(CudaError):
    """A handle or descriptor of memory that is gone, or that never was GPU memory."""


class CallFailedError(CudaError):
    """A call failed for a reason with no class of its own."""


OUT_OF_MEMORY, NOT_INITIALIZED, DEINITIALIZED, NO_DEVICE = 2, 3, 4, 100
INVALID_VALUE, INVALID_CONTEXT, MAP_FAILED, OPERATING_SYSTEM = 1, 201, 205, 304
INVALID_HANDLE, NOT_SUPPORTED, SYSTEM_NOT_READY, DRIVER_MISMATCH, COMPAT_MISMATCH = 400, 801, 802, 803, 804

_START: dict[int, str] = {
    NOT_INITIALIZED: "CUDA does not survive fork(); start this process with spawn",
    NO_DEVICE: "the driver sees no GPU; look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus",
    SYSTEM_NOT_READY: "the machine is not ready; is nvidia-fabricmanager (NVSwitch) running?",
    DRIVER_MISMATCH: "kernel module and libcuda.so.1 have different versions; reboot after a driver upgrade",
    COMPAT_MISMATCH: "this libcuda.so.1, of a compatibility package, does not fit the GPU; use the driver's",
}


def unusable(code: int, name: str) -> CudaError:
    """Of a driver that does not start."""
    way_out = _START.get(code, "nvidia-smi may say more")
    return DriverUnusableError(f"the CUDA driver does not start ({name}): {way_out}", code)


def failed(call: str, code: int, name: str) -> CudaError:
    """Of a call. What the caller knows better (sizes, devices) the caller says."""
    if code == OUT_OF_MEMORY:
        return GpuMemoryFullError(f"the GPU has too little free memory ({call}: {name})", code)
    if code in (NOT_INITIALIZED, DEINITIALIZED):
        return unusable(code, name)
    if code == NOT_SUPPORTED:
        return SharingUnsupportedError(f"this GPU or driver cannot do {call} ({name})", code)
    if code in (INVALID_HANDLE, MAP_FAILED):
        return StaleHandleError(f"{call}: {name}; the memory's owner may be gone: attach again", code)
    return CallFailedError(f"{call} failed: {name}", code)
