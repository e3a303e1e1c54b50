"""What a compression works on: one lease's strided K and V planes, block table and sidecar planes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvd_cuda.dtypes import Array, FloatArray, IntArray, storage_of
from kvd_cuda.errors import KernelInputError

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class HeadRange:
    """Kv heads [start, stop) of one layer: the unit of scoring, so that workspace stays bounded."""

    layer: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of kv heads."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatPlane:
    """One layer's K or V as 1-D unsigned words of its element size; block b starts at b * block_stride."""

    words: Array
    block_stride: int


@dataclass(frozen=True, kw_only=True)
class KVPlanes:
    """One lease, all layers.

    k, v          per layer [blocks, block_size, kv_heads, head_dim_k or _v], storage of `dtype`,
                  any block stride, the last three axes contiguous
    block_table   int32 [n], the lease's blocks in token order
    length        slots in use; the last block may be partial
    position      true position of the next token (>= length)
    positions     int32 [blocks, layers, kv_heads, block_size] sidecar, valid for slots < compressed_length
    scores        float32, same shape: H2O accumulators, valid for slots < observed_length
    Slot s >= compressed_length has position `position - (length - s)`.
    """

    k: Sequence[Array]
    v: Sequence[Array]
    dtype: str
    block_table: IntArray
    length: int
    position: int
    positions: IntArray
    scores: FloatArray
    compressed_length: int = 0
    observed_length: int = 0

    def __post_init__(self) -> None:
        for name, planes in (("k", self.k), ("v", self.v)):
            _check_planes(name, planes, self.dtype)
        if len(self.k) != len(self.v) or self.k[0].shape[:3] != self.v[0].shape[:3]:
            raise KernelInputError(
                "k and v may differ in head_dim only, not in layers, blocks, block_size, kv_heads"
            )
        self._check_table()
        expected = (self.blocks, self.layers, self.kv_heads, self.block_size)
        if self.positions.shape != expected or self.scores.shape != expected:
            raise KernelInputError(f"positions and scores must have the shape {expected}")

    def _check_table(self) -> None:
        table = self.block_table
        if table.ndim != 1 or (table.size and not 0 <= table.min() <= table.max() < self.blocks):
            raise KernelInputError(f"block_table must be 1-D with ids in [0, {self.blocks})")
        if not 0 <= self.length <= table.size * self.block_size or self.position < self.length:
            raise KernelInputError(
                f"length {self.length}, position {self.position} do not fit {table.size} blocks "
                f"of {self.block_size}; length <= capacity and position >= length"
            )
        if not (0 <= self.compressed_length <= self.length and 0 <= self.observed_length <= self.length):
            raise KernelInputError("compressed_length and observed_length must lie in [0, length]")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.k)

    @property
    def blocks(self) -> int:
        """Blocks of the pool."""
        return int(self.k[0].shape[0])

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return int(self.k[0].shape[1])

    @property
    def kv_heads(self) -> int:
        """Kv heads a layer."""
        return int(self.k[0].shape[2])

    @property
    def head_dim_k(self) -> int:
        """Elements of one key."""
        return int(self.k[0].shape[3])

    @property
    def used_table(self) -> IntArray:
        """The blocks that hold the slots in use."""
        return self.block_table[: -(-self.length // self.block_size)]

    def slot_positions(self, layer: int, kv_head: int) -> IntArray:
        """True position of every slot in use; int32 [length]."""
        explicit: IntArray = self.positions[self.used_table, layer, kv_head].reshape(-1)[: self.length]
        first, age = self.compressed_length, self.position - self.length
        explicit[first:] = np.arange(first, self.length, dtype=np.int32) + age
        return explicit

    def slot_scores(self, layer: int, kv_head: int) -> FloatArray:
        """Accumulated attention of every slot in use, 0 where never observed; float32 [length]."""
        scores: FloatArray = self.scores[self.used_table, layer, kv_head].reshape(-1)[: self.length]
        scores[self.observed_length :] = 0
        return scores

    def after(self, kept_length: int, block_table: IntArray) -> "KVPlanes":
        """The same lease once `kept_length` slots with explicit positions lie in `block_table`."""
        return replace(
            self,
            block_table=block_table,
            length=kept_length,
            compressed_length=kept_length,
            observed_length=kept_length if self.observed_length else 0,
        )


def _check_planes(name: str, planes: Sequence[Array], dtype: str) -> None:
    if not planes:
        raise KernelInputError(f"{name} has no layers")
    for plane in planes:
        if plane.ndim != 4 or plane.dtype != storage_of(dtype) or plane.shape != planes[0].shape:
            raise KernelInputError(
                f"{name} of every layer must be [blocks, block_size, kv_heads, head_dim], {storage_of(dtype)}"
            )
        if not plane[0].flags.c_contiguous or plane.strides[0] % plane.itemsize:
            raise KernelInputError(f"the last three axes of {name} must be contiguous")


def flat_plane(plane: Array) -> FlatPlane:
    """`plane` as flat words: compiled code then sees unit stride. Spans whatever lies between its blocks."""
    stride = plane.strides[0] // plane.itemsize
    span = (plane.shape[0] - 1) * stride + plane[0].size
    flat = as_strided(plane[0, 0, 0], (span,), (plane.itemsize,))
    return FlatPlane(flat.view(WORDS[plane.itemsize]), stride)


def gather_slots(plane: Array, block_table: IntArray, length: int) -> Array:
    """The first `length` slots in token order: [length, kv_heads, head_dim], a copy."""
    rows = plane[block_table[: -(-length // plane.shape[1])]]
    return rows.reshape(-1, *plane.shape[2:])[:length]
