"""A pool's memory in this process: views of keys, values and positions, without a copy.

Views are plain memory, without locks: a lease's slots belong to its worker, who must not touch them while
`compress` runs, and not use an old block table after it.
"""

import mmap
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.arguments import whole
from kvd.errors import InternalError, InvalidArgumentError
from kvd.spec import KVSpec, Plane
from kvd_client._attach import Descriptors
from kvd_client._checked import slot_array
from kvd_client._dlpack import CODES, Exported
from kvd_client._fence import Fences
from kvd_client._fork import keep_in_children
from kvd_client._tensors import tensor_of

NUMPY_DTYPES: dict[str, "npt.DTypeLike"] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
}
"""Numpy has no bfloat16 and no float8: their bit patterns."""

Array = npt.NDArray[Any]


class PoolMemory(ABC):
    """The mapping lives as long as any view of it. Children made by fork() do not have it."""

    def __init__(self, descriptors: Descriptors, spec: KVSpec, blocks_total: int, writable: bool) -> None:
        sizes = (spec.pool_bytes(blocks_total), spec.sidecar_bytes(blocks_total))
        if (descriptors.pool_bytes, descriptors.sidecar_bytes) != sizes:
            raise InternalError(f"the pool's memory has other sizes than its geometry: {descriptors} {sizes}")
        self.spec = spec
        self.fences = Fences(descriptors)
        self.blocks_total = blocks_total
        self.writable = writable
        sidecar = mapped(descriptors.sidecar_fd, sizes[1], writable=False)
        shape = (blocks_total, spec.layers, spec.kv_heads, spec.block_size)
        self.positions: npt.NDArray[np.int32] = np.ndarray(shape, np.int32, sidecar)

    @property
    @abstractmethod
    def _home(self) -> tuple[int, tuple[int, int], object]:
        """Address, DLPack's device, and what keeps the memory mapped."""

    @abstractmethod
    def layer(self, index: int, framework: str) -> Any:
        """K and V of one layer, each [blocks, block_size, kv_heads, head_dim]."""

    @abstractmethod
    def write(self, layer: int, slots: Any, k: Any, v: Any) -> None:
        """See Pool.write."""

    @abstractmethod
    def gather(self, layer: int, slots: Any, framework: str) -> tuple[Any, Any]:
        """See Pool.gather."""

    @abstractmethod
    def wait_for(self, stream: Any) -> None:
        """Returns when everything in that stream of the GPU is done."""

    def write_blocks(self, block_ids: npt.NDArray[np.int32], payload: npt.NDArray[np.uint8]) -> None:
        """Lay `payload` into the bytes of these blocks, in order; what does not fill the last one stays."""
        at = 0
        for block_id in block_ids.tolist():
            for offset, count in self.spec.block_segments(block_id, self.blocks_total):
                part = payload[at : at + count]
                self._put(offset, part)
                at += part.size
        assert at == payload.size, "more bytes than the blocks hold"

    @abstractmethod
    def _put(self, offset: int, part: npt.NDArray[np.uint8]) -> None:
        """Bytes from this offset of the pool on."""

    def _planes(self, layer: Any) -> tuple[Plane, Plane]:
        return self.spec.planes(whole("layer", layer, 0, self.spec.layers - 1), self.blocks_total)

    def _shape(self, plane: Plane) -> tuple[int, int, int, int]:
        return (self.blocks_total, self.spec.block_size, self.spec.kv_heads, plane.head_dim)

    def _strides(self, plane: Plane) -> tuple[int, int, int, int]:
        """In elements."""
        row = self.spec.kv_heads * plane.head_dim
        return (plane.block_stride_bytes // self.spec.element_bytes, row, plane.head_dim, 1)

    def _split(self, slots: Any) -> tuple[Array, Array]:
        """Block ids and offsets of pool slots."""
        at = slot_array(slots, self.blocks_total * self.spec.block_size)
        return at // self.spec.block_size, at % self.spec.block_size

    def _exported(self, plane: Plane, dtype: str) -> Exported:
        """A view for whoever takes it; the memory stays mapped as long as it is used."""
        address, device, owner = self._home
        at = address + plane.offset_bytes
        return Exported(at, self._shape(plane), self._strides(plane), dtype, device, owner, self.writable)

    def _torch(self, plane: Plane) -> Any:
        import torch.utils.dlpack

        dtype = self.spec.dtype if self.spec.dtype in CODES else self._bits_name
        tensor: Any = torch.utils.dlpack.from_dlpack(self._exported(plane, dtype))
        return tensor.view(getattr(torch, self.spec.dtype))

    @property
    def _bits_name(self) -> str:
        """The type of the same size that every framework knows."""
        return np.dtype(NUMPY_DTYPES[self.spec.dtype]).name

    def _bits(self, name: str, value: Any, count: int, plane: Plane) -> Array:
        """`value` as an array of the plane's rows. Raises InvalidArgumentError if it cannot be one."""
        needed, dtype = (count, *self._shape(plane)[2:]), np.dtype(NUMPY_DTYPES[self.spec.dtype])
        tensor = tensor_of(name, value, list(needed))
        if tuple(tensor.shape) != needed:
            raise InvalidArgumentError(f"{name} of shape {list(tensor.shape)}; {list(needed)} is needed")
        if isinstance(tensor, np.ndarray):
            if tensor.dtype != dtype:
                raise InvalidArgumentError(
                    f"{name} is an array of {tensor.dtype}; {dtype} for {self.spec.dtype} is needed"
                )
            return tensor
        import torch

        if not tensor.is_floating_point():
            raise InvalidArgumentError(f"{name} is a tensor of {tensor.dtype}; a float type is needed")

        rows = tensor.detach().to(getattr(torch, self.spec.dtype)).cpu().contiguous()
        bits: Array = rows.view(torch.uint8).numpy().view(dtype)
        return bits


def as_torch(rows: Array, dtype: str) -> Any:
    """Bit patterns as a tensor of that type, without a copy."""
    import torch

    return torch.from_numpy(rows.view(np.uint8)).view(getattr(torch, dtype))


def mapped(fd: int, size: int, writable: bool) -> mmap.mmap:
    """A memory file, in this process alone."""
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
    # a child that could still write after its parent's death would break the proof that blocks are unused
    mapping.madvise(mmap.MADV_DONTFORK)
    keep_in_children(mapping)
    return mapping
