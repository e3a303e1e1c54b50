"""A pool in GPU memory: the very bytes of the other workers, by the GPU's UUID.

Whatever uses this process's primary context (torch, cupy, numba) reads and writes them in place. Their
allocators have no part in it, so their settings (PYTORCH_CUDA_ALLOC_CONF) do not matter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import (
    DeviceFullError,
    GpuDriverError,
    GpuError,
    GpuHandleError,
    GpuNotVisibleError,
    InvalidArgumentError,
)
from kvd.spec import KVSpec, Plane
from kvd_client._attach import Descriptors
from kvd_client._dlpack import CUDA
from kvd_client._memory import NUMPY_DTYPES, Array, PoolMemory
from kvd_client._tensors import GPU_FRAMEWORKS, framework_name, is_torch
from kvd_cuda import driver

_KINDS: dict[type[driver.CudaError], type[GpuError] | type[DeviceFullError]] = {
    driver.DriverMissingError: GpuDriverError,
    driver.DriverTooOldError: GpuDriverError,
    driver.DriverUnusableError: GpuDriverError,
    driver.DeviceNotVisibleError: GpuNotVisibleError,
    driver.SharingUnsupportedError: GpuHandleError,
    driver.StaleHandleError: GpuHandleError,
    driver.GpuMemoryFullError: DeviceFullError,
}
_HANDLES = ("cuda_stream", "ptr", "handle")
"""Where torch, cupy and numba keep a stream's address."""


@contextmanager
def _told() -> Iterator[None]:
    """The driver's errors as those of kvd."""
    try:
        yield
    except driver.CudaError as error:
        raise _KINDS.get(type(error), GpuError)(str(error)) from error


class CudaPoolMemory(PoolMemory):
    """Views are tensors of torch on the GPU, or arrays of cupy or numba."""

    def __init__(self, descriptors: Descriptors, spec: KVSpec, blocks_total: int, writable: bool) -> None:
        """Raises GpuError."""
        super().__init__(descriptors, spec, blocks_total, writable)
        map_pool = driver.map_shared if descriptors.device_kind == "cuda" else driver.map_legacy
        with _told():
            self._gpu = driver.gpu_of(driver.load_driver(), descriptors.device_uuid)
            self._mapping = map_pool(self._gpu, descriptors.pool_fd, descriptors.pool_bytes, writable)

    def layer(self, index: int, framework: str) -> Any:
        """See PoolMemory; bfloat16 and float8 are bit patterns for cupy and numba, as for numpy."""
        if framework == "numpy":
            raise InvalidArgumentError(
                'numpy cannot see a GPU\'s memory: layer(framework="torch"), "cupy" or "numba", or '
                'gather(framework="numpy") for a copy'
            )
        planes, framework = self._planes(index), framework_name(framework, GPU_FRAMEWORKS)
        k, v = (_VIEWS[framework](self, plane) for plane in planes)
        return k, v

    @property
    def _home(self) -> tuple[int, tuple[int, int], object]:
        return self._mapping.address, (CUDA, self._gpu.ordinal), self._mapping

    def _torch(self, plane: Plane) -> Any:
        import torch

        if not torch.cuda.is_available():
            raise InvalidArgumentError(
                "this torch cannot use the GPU (is it a build for CUDA?); take "
                'layer(framework="cupy") or "numba", or gather(framework="numpy") for a copy'
            )
        return super()._torch(plane)

    def _cupy(self, plane: Plane) -> Any:
        import cupy  # type: ignore[import-not-found,unused-ignore]

        return cupy.from_dlpack(self._exported(plane, self._bits_name))

    def _numba(self, plane: Plane) -> Any:
        from numba import cuda

        return cuda.as_cuda_array(self._exported(plane, self._bits_name))

    def write(self, layer: int, slots: Any, k: Any, v: Any) -> None:
        """See PoolMemory. Tensors on the GPU are written in the current stream of torch, others at once."""
        blocks, offsets = self._split(slots)
        if is_torch(k) and is_torch(v) and k.is_cuda and v.is_cuda:
            return self._write_in_stream(layer, (blocks, offsets), (k, v))
        planes = self._planes(layer)
        rows = [
            np.ascontiguousarray(self._bits(name, value, blocks.size, plane))
            for name, value, plane in zip("kv", (k, v), planes, strict=True)
        ]
        for plane, values in zip(planes, rows, strict=True):
            self._copy(plane, (blocks, offsets), values, self._mapping.write)

    def _write_in_stream(self, layer: int, at: tuple[Array, Array], values: tuple[Any, Any]) -> None:
        import torch

        for view, rows in zip(self.layer(layer, "torch"), values, strict=True):
            if tuple(rows.shape) != (at[0].size, *view.shape[2:]) or not rows.is_floating_point():
                raise InvalidArgumentError(
                    f"a tensor of {rows.dtype} {list(rows.shape)}; floats of {[at[0].size, *view.shape[2:]]} "
                    "are needed"
                )
            index = tuple(torch.from_numpy(part).to(rows.device) for part in at)
            view[index] = rows.detach().to(view.dtype)

    def gather(self, layer: int, slots: Any, framework: str) -> tuple[Any, Any]:
        """See PoolMemory. numpy: copies in host memory; torch: on the GPU."""
        at, planes = self._split(slots), self._planes(layer)
        if framework_name(framework) == "torch":
            import torch

            views = self.layer(layer, "torch")
            index = tuple(torch.from_numpy(part).to(views[0].device) for part in at)
            copies = views[0][index], views[1][index]
            self.wait_for(
                torch.cuda.current_stream(views[0].device)
            )  # whose slots they are is looked at next
            return copies
        k, v = (np.empty((at[0].size, *self._shape(p)[2:]), NUMPY_DTYPES[self.spec.dtype]) for p in planes)
        for plane, rows in zip(planes, (k, v), strict=True):
            self._copy(plane, at, rows, self._mapping.read)
        return k, v

    def _copy(self, plane: Plane, at: tuple[Array, Array], rows: Array, copy: Any) -> None:
        """Between the rows [n, kv_heads, head_dim] and the plane's slots, neighbours in one go."""
        row_bytes = self.spec.kv_heads * plane.head_dim * self.spec.element_bytes
        begins = plane.offset_bytes + at[0] * plane.block_stride_bytes + at[1] * row_bytes
        firsts = np.flatnonzero(np.diff(begins, prepend=-1) != row_bytes)
        host = rows.ctypes.data
        with _told():
            for first, last in zip(firsts, np.append(firsts[1:], begins.size), strict=True):
                count = int(last - first) * row_bytes
                copy(int(begins[first]), host + int(first) * row_bytes, count)

    def wait_for(self, stream: Any) -> None:
        """See PoolMemory."""
        handle = stream_address(stream)
        with _told():
            driver.synchronize(self._gpu, handle)

    def _put(self, offset: int, part: npt.NDArray[np.uint8]) -> None:
        contiguous = np.ascontiguousarray(part)
        with _told():
            self._mapping.write(offset, contiguous.ctypes.data, contiguous.size)


_VIEWS = {"torch": CudaPoolMemory._torch, "cupy": CudaPoolMemory._cupy, "numba": CudaPoolMemory._numba}


def stream_address(stream: Any) -> int:
    """Of a stream of torch, cupy, numba or cuda.core, or of its address. Raises InvalidArgumentError."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    found = next((getattr(stream, name) for name in _HANDLES if hasattr(stream, name)), stream)
    address = getattr(found, "value", found)  # numba keeps a ctypes pointer, None for the default stream
    if address is None and found is not stream:
        return 0
    if isinstance(address, bool) or not isinstance(address, int) or address < 0:
        raise InvalidArgumentError(
            f"stream={stream!r}; a stream of torch, cupy or numba is needed, or its address (0: the default)"
        )
    return address
