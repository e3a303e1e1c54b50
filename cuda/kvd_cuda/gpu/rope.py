"""Rotating cached keys by a number of positions, in float64, rounded once to their storage."""

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.elements import ITEM_BYTES, READERS, WRITERS
from kvd_cuda.gpu.intrinsics import Value, inlined, quotient
from kvd_cuda.gpu.kernel import ADDRESSES, DOUBLES, INT, INT32S, Kernel, fields_type

THREADS = 128


class RotateShape(NamedTuple):
    """Numbers of one rotation.

    slots        how many
    pairs        elements that turn, divided by 2
    head_dim     elements of a key
    block_size   tokens a block
    block_bytes  from one block of a layer's K to the next
    """

    slots: int
    pairs: int
    head_dim: int
    block_size: int
    block_bytes: int


ROTATE_SHAPE = fields_type(RotateShape, (INT,) * 5)


@cache
def rotate_kernel(dtype: str, style: str, from_originals: bool) -> Kernel:
    """(bases, originals, table, slots, turns, shape): keys of `slots`, turned, into the pool.

    bases      uint64 [layers]: block 0 of each layer's K
    originals  uint64 [layers]: [slots, kv_heads, head_dim] to turn from; ignored unless `from_originals`
    slots      int32 [shape.slots]
    turns      float64 [pairs, 2]: cosine and sine of each pair's angle
    style      "half" turns i with i + pairs, "interleaved" 2 i with 2 i + 1. Source: RoFormer, eq. 34
    A thread has one pair, or one element past them. Grid (slots * (head_dim - pairs) / THREADS, kv_heads,
    layers). Traffic: each key once in, once out.
    """
    read, write, item_bytes, half_split = READERS[dtype], WRITERS[dtype], ITEM_BYTES[dtype], style == "half"

    def rotate(
        bases: Value, originals: Value, table: Value, slots: Value, turns: Value, shape: Value
    ) -> None:
        index = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        parts = shape.head_dim - shape.pairs
        if index < shape.slots * parts:
            which = quotient(index, parts)
            part = types.int64(index) - types.int64(which) * parts
            goal = bases[cuda.blockIdx.z] + key_offset(table, slots[which], shape, item_bytes)
            origin = goal
            if from_originals:
                key = types.uint64(which) * cuda.gridDim.y + cuda.blockIdx.y
                origin = originals[cuda.blockIdx.z] + types.uint64(key * shape.head_dim * item_bytes)
            if part < shape.pairs:
                first = part if half_split else 2 * part
                second = types.uint64((part + shape.pairs if half_split else 2 * part + 1) * item_bytes)
                x = types.float64(read(origin + types.uint64(first * item_bytes)))
                y = types.float64(read(origin + second))
                cosine, sine = turns[2 * part], turns[2 * part + 1]
                write(goal + types.uint64(first * item_bytes), types.float32(x * cosine - y * sine))
                write(goal + second, types.float32(x * sine + y * cosine))
            else:
                rest = types.uint64((part + shape.pairs) * item_bytes)
                write(goal + rest, read(origin + rest))

    suffix = "originals" if from_originals else "pool"
    parameters = (ADDRESSES, ADDRESSES, INT32S, INT32S, DOUBLES, ROTATE_SHAPE)
    return Kernel(f"rotate_{dtype}_{style}_{suffix}", rotate, parameters, THREADS)


@inlined
def key_offset(table: Value, slot: Value, shape: Value, item_bytes: Value) -> Value:
    """uint64 bytes from a layer's base to the key of one slot and this block's kv head."""
    block = quotient(slot, shape.block_size)
    inside = types.uint32(slot) - block * types.uint32(shape.block_size)
    head = types.uint64(inside) * types.uint64(cuda.gridDim.y) + types.uint64(cuda.blockIdx.y)
    start = types.uint64(table[block]) * types.uint64(shape.block_bytes)
    return start + head * types.uint64(shape.head_dim * item_bytes)
