"""Leases as a daemon lays them out: strided views of one buffer, tables in random order, poison around."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvd_cuda.dtypes import Array, FloatArray, IntArray, from_float32, storage_of, to_float32
from kvd_cuda.planes import KVPlanes, gather_slots
from kvd_cuda.queries import WindowQueries

LAYOUTS = ("block-outermost", "layer-outermost")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


@dataclass(frozen=True)
class Shape:
    """What a lease looks like; `length` tokens, K and V head dims may differ."""

    layers: int = 2
    kv_heads: int = 2
    group: int = 2
    head_dim_k: int = 32
    head_dim_v: int = 32
    block_size: int = 16
    length: int = 200
    dtype: str = "float32"
    layout: str = "block-outermost"

    @property
    def used_blocks(self) -> int:
        return -(-self.length // self.block_size)


@dataclass(frozen=True)
class Lease:
    """One lease, the free blocks beside it, and the float32 values of its slots as first written."""

    planes: KVPlanes
    free: IntArray
    keys: list[FloatArray] = field(default_factory=list)
    values: list[FloatArray] = field(default_factory=list)

    def stored_keys(self, planes: KVPlanes, layer: int) -> FloatArray:
        """float32 [length, kv_heads, head_dim_k] as lying in the pool now."""
        return to_float32(gather_slots(planes.k[layer], planes.block_table, planes.length), planes.dtype)

    def stored_values(self, planes: KVPlanes, layer: int) -> FloatArray:
        """float32 [length, kv_heads, head_dim_v] as lying in the pool now."""
        return to_float32(gather_slots(planes.v[layer], planes.block_table, planes.length), planes.dtype)

    def with_planes(self, planes: KVPlanes) -> "Lease":
        return replace(self, planes=planes)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Standard normal values in the storage of `dtype`."""
    return from_float32(rng.standard_normal(shape, dtype=np.float32), dtype)


def make_lease(rng: np.random.Generator, shape: Shape, spare_blocks: int = 0) -> Lease:
    """A lease of random K and V in blocks of random order. All other memory holds NaN.

    Half the blocks but the null block are free; `spare_blocks` more belong to the lease beyond its length.
    """
    owned = shape.used_blocks + spare_blocks
    blocks = 2 * owned + 1
    order = rng.permutation(np.arange(1, blocks)).astype(np.int32)
    k, v = _planes_of(shape, blocks)
    sidecar = (blocks, shape.layers, shape.kv_heads, shape.block_size)
    planes = KVPlanes(
        k=k,
        v=v,
        dtype=shape.dtype,
        block_table=order[:owned],
        length=shape.length,
        position=shape.length,
        positions=np.full(sidecar, -9, np.int32),
        scores=np.full(sidecar, np.nan, np.float32),
    )
    lease = Lease(planes, order[owned:])
    for layer in range(shape.layers):
        write_slots(planes.k[layer], planes.block_table, 0, _random_slots(rng, shape, shape.head_dim_k))
        write_slots(planes.v[layer], planes.block_table, 0, _random_slots(rng, shape, shape.head_dim_v))
    keys = [lease.stored_keys(planes, layer) for layer in range(shape.layers)]
    values = [lease.stored_values(planes, layer) for layer in range(shape.layers)]
    return Lease(planes, lease.free, keys, values)


def write_slots(plane: Array, block_table: IntArray, first: int, slots: Array) -> None:
    """Write `slots` [count, kv_heads, head_dim] from slot `first` on, as a worker would."""
    where = np.arange(first, first + len(slots))
    plane[block_table[where // plane.shape[1]], where % plane.shape[1]] = slots


def make_queries(
    rng: np.random.Generator, shape: Shape, count: int, dtype: str | None = None
) -> WindowQueries:
    """Random queries of the last `count` tokens; in bfloat16 for fp8 pools unless told."""
    chosen = dtype or ("bfloat16" if shape.dtype == "float8_e4m3fn" else shape.dtype)
    dims = (shape.layers, count, shape.kv_heads * shape.group, shape.head_dim_k)
    return WindowQueries(normal(rng, dims, chosen), chosen)


def query_values(queries: WindowQueries, layer: int) -> FloatArray:
    """float32 [count, q_heads, head_dim] of one layer."""
    return to_float32(queries.values[layer], queries.dtype)


def _random_slots(rng: np.random.Generator, shape: Shape, head_dim: int) -> Array:
    return normal(rng, (shape.length, shape.kv_heads, head_dim), shape.dtype)


def _planes_of(shape: Shape, blocks: int) -> tuple[list[Array], list[Array]]:
    """K and V views per layer into one poisoned buffer: [B, L, K|V, N, H, D] or [L, K|V, B, N, H, D]."""
    sizes = [shape.block_size * shape.kv_heads * dim for dim in (shape.head_dim_k, shape.head_dim_v)]
    layer_words = sum(sizes)
    buffer = from_float32(np.full(blocks * shape.layers * layer_words, np.nan, np.float32), shape.dtype)
    planes: tuple[list[Array], list[Array]] = ([], [])
    for layer in range(shape.layers):
        for kind, head_dim in enumerate((shape.head_dim_k, shape.head_dim_v)):
            if shape.layout == "block-outermost":
                start, stride = layer * layer_words + kind * sizes[0], shape.layers * layer_words
            else:
                start, stride = blocks * (layer * layer_words + kind * sizes[0]), sizes[kind]
            planes[kind].append(_view(buffer, start, stride, (blocks, shape, head_dim)))
    return planes


def _view(buffer: Array, start: int, stride: int, dims: tuple[int, Shape, int]) -> Array:
    blocks, shape, head_dim = dims
    item = storage_of(shape.dtype).itemsize
    token = shape.kv_heads * head_dim * item
    view: Array = as_strided(
        buffer[start:],
        (blocks, shape.block_size, shape.kv_heads, head_dim),
        (stride * item, token, head_dim * item, item),
    )
    return view
