"""A pool in host memory."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidArgumentError
from kvd.spec import KVSpec, Plane
from kvd_client._attach import Descriptors
from kvd_client._dlpack import CPU
from kvd_client._memory import NUMPY_DTYPES, Array, PoolMemory, as_torch, mapped
from kvd_client._tensors import framework_name


class HostPoolMemory(PoolMemory):
    """Views are arrays of numpy or tensors of torch on the CPU."""

    def __init__(self, descriptors: Descriptors, spec: KVSpec, blocks_total: int, writable: bool) -> None:
        super().__init__(descriptors, spec, blocks_total, writable)
        mapping = mapped(descriptors.pool_fd, descriptors.pool_bytes, writable)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    def layer(self, index: int, framework: str) -> Any:
        """See PoolMemory."""
        (k, v), framework = self._planes(index), framework_name(framework)
        if framework == "numpy":
            return self._array(k), self._array(v)
        return self._torch(k), self._torch(v)

    @property
    def _home(self) -> tuple[int, tuple[int, int], object]:
        return self.bytes.ctypes.data, (CPU, 0), self.bytes

    def _array(self, plane: Plane) -> Array:
        strides = tuple(stride * self.spec.element_bytes for stride in self._strides(plane))
        dtype = NUMPY_DTYPES[self.spec.dtype]
        return np.ndarray(self._shape(plane), dtype, self.bytes, plane.offset_bytes, strides)

    def _torch(self, plane: Plane) -> Any:
        if not self.writable:
            return super()._torch(plane)  # from_numpy warns of such memory
        import torch

        elements = torch.from_numpy(self.bytes).view(getattr(torch, self.spec.dtype))  # a third of the time
        offset = plane.offset_bytes // self.spec.element_bytes
        return elements.as_strided(self._shape(plane), self._strides(plane), offset)

    def write(self, layer: int, slots: Any, k: Any, v: Any) -> None:
        """See PoolMemory."""
        blocks, offsets = self._split(slots)
        k_plane, v_plane = self._planes(layer)
        k_rows = self._bits("k", k, blocks.size, k_plane)
        v_rows = self._bits("v", v, blocks.size, v_plane)
        self._array(k_plane)[blocks, offsets], self._array(v_plane)[blocks, offsets] = k_rows, v_rows

    def gather(self, layer: int, slots: Any, framework: str) -> tuple[Any, Any]:
        """See PoolMemory."""
        at = self._split(slots)
        k, v = (self._array(plane)[at] for plane in self._planes(layer))
        if framework_name(framework) == "numpy":
            return k, v
        return as_torch(k, self.spec.dtype), as_torch(v, self.spec.dtype)

    def wait_for(self, stream: Any) -> None:
        """There are no streams here."""
        raise InvalidArgumentError(f"stream={stream!r}; a pool in host memory has none, leave it away")

    def _put(self, offset: int, part: npt.NDArray[np.uint8]) -> None:
        self.bytes[offset : offset + part.size] = part
