"""A pool's memory in this process: views of keys, values and positions, without a copy.

Views are plain memory, without locks: a lease's slots belong to its worker, who must not touch them while
`compress` runs, and not use an old block table after it.
"""

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvd.arguments import whole
from kvd.errors import InternalError, InvalidArgumentError
from kvd.spec import KVSpec, Plane
from kvd_client._attach import Descriptors
from kvd_client._checked import slot_array
from kvd_client._fence import Fences
from kvd_client._fork import keep_in_children
from kvd_client._tensors import framework_name, tensor_of

if TYPE_CHECKING:
    import torch

NUMPY_DTYPES: dict[str, "npt.DTypeLike"] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
}
"""Numpy has no bfloat16 and no float8: their bit patterns."""

Array = npt.NDArray[Any]


class PoolMemory:
    """The mapping lives as long as any view of it. Children made by fork() do not have it."""

    def __init__(self, descriptors: Descriptors, spec: KVSpec, blocks_total: int) -> None:
        sizes = (spec.pool_bytes(blocks_total), spec.sidecar_bytes(blocks_total))
        if (descriptors.pool_bytes, descriptors.sidecar_bytes) != sizes:
            raise InternalError(f"the pool's memory has other sizes than its geometry: {descriptors} {sizes}")
        if descriptors.device_kind != "host":
            raise InvalidArgumentError(f"memory of a {descriptors.device_kind!r} device cannot be mapped yet")
        self.spec = spec
        self.fences = Fences(descriptors)
        self.blocks_total = blocks_total
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(_map(descriptors.pool_fd, sizes[0]), np.uint8)
        sidecar = _map(descriptors.sidecar_fd, sizes[1])
        shape = (blocks_total, spec.layers, spec.kv_heads, spec.block_size)
        self.positions: npt.NDArray[np.int32] = np.ndarray(shape, np.int32, sidecar)
        self.positions.flags.writeable = False

    def layer(self, index: int, framework: str) -> Any:
        """K and V of one layer, each [blocks, block_size, kv_heads, head_dim]."""
        index, framework = whole("layer", index, 0, self.spec.layers - 1), framework_name(framework)
        k, v = self.spec.planes(index, self.blocks_total)
        if framework == "numpy":
            return self._array(k), self._array(v)
        return self._tensor(k), self._tensor(v)

    def _shape(self, plane: Plane) -> tuple[int, int, int, int]:
        return (self.blocks_total, self.spec.block_size, self.spec.kv_heads, plane.head_dim)

    def _strides(self, plane: Plane) -> tuple[int, int, int, int]:
        """In elements."""
        row = self.spec.kv_heads * plane.head_dim
        return (plane.block_stride_bytes // self.spec.element_bytes, row, plane.head_dim, 1)

    def _array(self, plane: Plane) -> Array:
        strides = tuple(stride * self.spec.element_bytes for stride in self._strides(plane))
        dtype = NUMPY_DTYPES[self.spec.dtype]
        return np.ndarray(self._shape(plane), dtype, self.bytes, plane.offset_bytes, strides)

    def _tensor(self, plane: Plane) -> "torch.Tensor":
        import torch

        elements = torch.from_numpy(self.bytes).view(getattr(torch, self.spec.dtype))
        offset = plane.offset_bytes // self.spec.element_bytes
        return elements.as_strided(self._shape(plane), self._strides(plane), offset)

    def write(self, layer: int, slots: Any, k: Any, v: Any) -> None:
        """See Pool.write."""
        blocks, offsets = self._split(slots)
        k_view, v_view = self.layer(layer, "numpy")
        k_rows = self._bits("k", k, blocks.size, k_view)
        v_rows = self._bits("v", v, blocks.size, v_view)
        k_view[blocks, offsets], v_view[blocks, offsets] = k_rows, v_rows

    def gather(self, layer: int, slots: Any, framework: str) -> tuple[Any, Any]:
        """See Pool.gather."""
        at = self._split(slots)
        k, v = (view[at] for view in self.layer(layer, "numpy"))
        if framework_name(framework) == "numpy":
            return k, v
        import torch

        dtype = getattr(torch, self.spec.dtype)
        k, v = (torch.from_numpy(rows.view(np.uint8)).view(dtype) for rows in (k, v))
        return k, v

    def _split(self, slots: Any) -> tuple[Array, Array]:
        """Block ids and offsets of pool slots."""
        at = slot_array(slots, self.blocks_total * self.spec.block_size)
        return at // self.spec.block_size, at % self.spec.block_size

    def _bits(self, name: str, value: Any, count: int, view: Array) -> Array:
        """`value` as an array of the view's type. Raises InvalidArgumentError if it cannot be one."""
        needed = (count, *view.shape[2:])
        tensor = tensor_of(name, value, list(needed))
        if tuple(tensor.shape) != needed:
            raise InvalidArgumentError(f"{name} of shape {list(tensor.shape)}; {list(needed)} is needed")
        if isinstance(tensor, np.ndarray):
            if tensor.dtype != view.dtype:
                raise InvalidArgumentError(
                    f"{name} is an array of {tensor.dtype}; {view.dtype} for {self.spec.dtype} is needed"
                )
            return tensor
        import torch

        if not tensor.is_floating_point():
            raise InvalidArgumentError(f"{name} is a tensor of {tensor.dtype}; a float type is needed")

        rows = tensor.detach().to(getattr(torch, self.spec.dtype)).cpu().contiguous()
        bits: Array = rows.view(torch.uint8).numpy().view(view.dtype)
        return bits

    def write_blocks(self, block_ids: npt.NDArray[np.int32], payload: npt.NDArray[np.uint8]) -> None:
        """Lay `payload` into the bytes of these blocks, in order; what does not fill the last one stays."""
        at = 0
        for block_id in block_ids.tolist():
            for offset, count in self.spec.block_segments(block_id, self.blocks_total):
                part = payload[at : at + count]
                self.bytes[offset : offset + part.size] = part
                at += part.size
        assert at == payload.size, "more bytes than the blocks hold"


def _map(fd: int, size: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    # a child that could still write after its parent's death would break the proof that blocks are unused
    mapping.madvise(mmap.MADV_DONTFORK)
    keep_in_children(mapping)
    return mapping
