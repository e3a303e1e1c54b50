"""One lease in device memory, as kernels are told of it; and what a launch is.

Arrays are addresses. A column is one kv head of one layer.
"""

from dataclasses import dataclass

from kvd_cuda.gpu.kernel import Kernel

MAX_INT = 2**31 - 1  # bytes from block to block, slots, rows: they are int32 arguments
ADDRESS_BYTES = 8
SIDECAR_ITEM_BYTES = 4  # int32 positions, float32 scores


@dataclass(frozen=True)
class Launch:
    """One launch: grid (x, y, z) of blocks of kernel.threads, arguments as the driver takes them."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Where all layers' K (or V) lies.

    bases        address of uint64 [layers]: block 0 of each layer
    head_dim     elements of one head of one slot
    block_bytes  from one block of a layer to the next
    alignment    largest power of two, at most 16, that divides all bases and block_bytes
    """

    bases: int
    head_dim: int
    block_bytes: int
    alignment: int


@dataclass(frozen=True)
class Columns:
    """Layers [layer, layer + layers), of each kv heads [head, head + heads): what one launch works on."""

    layer: int
    layers: int
    head: int
    heads: int

    @property
    def count(self) -> int:
        """How many (layer, kv head)."""
        return self.layers * self.heads

    def grid(self, blocks: int) -> tuple[int, int, int]:
        """Of `blocks` thread blocks a column."""
        return blocks, self.heads, self.layers


@dataclass(frozen=True, kw_only=True)
class DeviceLease:
    """One lease in device memory; fields as in `kvd_cuda.planes.KVPlanes`, arrays as addresses."""

    k: Plane
    v: Plane
    dtype: str
    layers: int
    kv_heads: int
    block_size: int
    table: int
    length: int
    position: int
    positions: int
    scores: int
    compressed_length: int
    observed_length: int

    @property
    def block_count(self) -> int:
        """Blocks that hold slots in use."""
        return -(-self.length // self.block_size)

    @property
    def columns(self) -> Columns:
        """All of it."""
        return Columns(0, self.layers, 0, self.kv_heads)

    def bases(self, plane: Plane, columns: Columns) -> int:
        """Address of the base of the columns' first layer."""
        return plane.bases + columns.layer * ADDRESS_BYTES

    def sidecar(self, address: int, columns: Columns) -> int:
        """Where the columns' first one begins in a sidecar plane (positions or scores)."""
        column = columns.layer * self.kv_heads + columns.head
        return address + column * self.block_size * SIDECAR_ITEM_BYTES


@dataclass(frozen=True, kw_only=True)
class DeviceQueries:
    """Queries of some columns' layers in device memory.

    values   address of [layers, count, query_heads, head_dim_k]
    row_lse  address of float32 [layers, count, query_heads], or 0
    """

    values: int
    dtype: str
    count: int
    query_heads: int
    row_lse: int = 0
