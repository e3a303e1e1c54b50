"""GPU memory: one allocation per pool, as a descriptor that any process maps. No CUDA context is needed here.

So this process starts in no time and takes no GPU memory of its own; a pool outlives it as a host pool does.
New memory may hold what another process, of anybody, left there: no driver promises otherwise. A process that
ends zeroes it before its descriptor goes anywhere, which takes as long as a context does, a second or two.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

from kvd.errors import DeviceFullError, DeviceUnavailableError, GpuError, InvalidArgumentError, KvdError
from kvd_cuda.driver import (
    CudaError,
    Gpu,
    GpuMemoryFullError,
    create_shareable,
    gpu_of,
    is_shareable_of,
    load_driver,
)
from kvd_daemon.gpu_list import share_of
from kvd_daemon.settings import parse_bytes

from .cuda_legacy import PATIENCE_S, CudaLegacyMemory
from .pool_memories import PoolMemories
from .zero_memory import FULL

RETRY_AFTER_NS = 500_000_000  # ns; memory of processes that were killed comes back within a second or two


class CudaMemory(PoolMemories):
    """Of one GPU that can share memory as descriptors."""

    kind = "cuda"

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu
        self.uuid = gpu.uuid

    def _make(self, pool_id: str, byte_count: int) -> int:
        try:
            fd = create_shareable(self._gpu, byte_count)
        except GpuMemoryFullError as error:
            raise self._full(byte_count) from error
        except CudaError as error:
            raise GpuError(f"{self.uuid} gives no memory: {error}") from error
        try:
            self._zero(fd, byte_count)
        except KvdError:
            os.close(fd)
            raise
        return fd

    def _zero(self, fd: int, byte_count: int) -> None:
        arguments = [str(fd), self.uuid, str(byte_count)]
        command = [sys.executable, "-m", "kvd_daemon.device.zero_memory", *arguments]
        try:
            ran = subprocess.run(
                command, pass_fds=[fd], stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired as error:
            raise GpuError(
                f"{self.uuid}: new memory was not zeroed within {PATIENCE_S:g} s; look at nvidia-smi"
            ) from error
        if ran.returncode == FULL:
            raise self._full(byte_count)
        if ran.returncode != 0:
            why = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise GpuError(f"{self.uuid}: new memory could not be zeroed: {why}")

    def _full(self, byte_count: int) -> DeviceFullError:
        return DeviceFullError(
            f"{self.uuid} has too little free memory for a pool of {byte_count} bytes. What was in use "
            "by processes that ended, or by dropped pools that workers still map, comes back in a moment",
            retry_after_ns=RETRY_AFTER_NS,
        )

    def _is_such(self, fd: int, byte_count: int) -> bool:
        """The driver does not tell sizes; the name under which it was kept says whose it is."""
        return is_shareable_of(self._gpu, fd)


def open_gpu(uuid: str, sharing: str) -> tuple[Gpu, PoolMemories]:
    """Its memory, in the best way it can be shared, or the one that is wanted.

    Raises DeviceUnavailableError for a GPU that is not there or cannot do it, or without numba-cuda.
    """
    if find_spec("numba_cuda") is None:
        raise DeviceUnavailableError(
            "numba-cuda, which compiles the GPU's kernels, is not installed: pip install 'kvd-pool[cuda12]'"
        )
    try:
        gpu = gpu_of(load_driver(), uuid)
        able = gpu.shares_descriptors
    except CudaError as error:
        raise DeviceUnavailableError(str(error)) from error
    if sharing == "descriptors" and not able:
        raise DeviceUnavailableError(
            f"{gpu.name} ({uuid}) cannot share memory as descriptors; leave --gpu-sharing away, or serve "
            "host memory: --host-memory SIZE"
        )
    return gpu, CudaMemory(gpu) if able and sharing != "legacy" else CudaLegacyMemory(gpu)


def memory_bytes(gpu: Gpu, wanted: str) -> int:
    """How much of it pools may take. Raises InvalidArgumentError if it has less than that."""
    share = share_of(wanted)
    if share is not None:
        return int(gpu.total_bytes * share)
    byte_count = parse_bytes(wanted)
    if not 0 < byte_count <= gpu.total_bytes:
        raise InvalidArgumentError(
            f"--memory {wanted}: {gpu.name} ({gpu.uuid}) has {gpu.total_bytes / 2**30:.1f} GiB; ask for "
            "less, or for a share such as 0.85"
        )
    return byte_count
