"""The GPUs of a kernel worker. What they need is imported when the first pool of one is mapped."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.spec import KVSpec
from kvd_cuda.driver import gpu_of, load_driver
from kvd_daemon.kernel.mapped_pool import MappedPool
from kvd_daemon.kernel.messages import MapPool

if TYPE_CHECKING:
    from kvd_cuda.gpu.device import KernelDevice


class Gpus:
    """Kernels, a stream and scratch memory on each GPU that a pool lies on."""

    def __init__(self, cache: Path, on_step: Callable[[], None]) -> None:
        self._cache = cache
        self._on_step = on_step
        self._devices: dict[str, KernelDevice] = {}

    def map_pool(self, spec: KVSpec, request: MapPool, fds: tuple[int, int]) -> MappedPool:
        """Raises CudaError."""
        from kvd_daemon.kernel.cuda_pool import CudaPool

        return CudaPool(spec, request.blocks_total, fds, request.kind, self._device(request.uuid))

    def _device(self, uuid: str) -> "KernelDevice":
        from kvd_cuda.gpu.device import KernelDevice

        if uuid not in self._devices:
            gpu = gpu_of(load_driver(), uuid)
            self._devices[uuid] = KernelDevice(gpu, self._cache / "gpu", self._on_step)
        return self._devices[uuid]
