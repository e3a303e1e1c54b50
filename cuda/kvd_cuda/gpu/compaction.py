"""Moving the kept slots to the front: in place, or into other blocks.

A column is one layer's K or V of one kv head. In place it has one thread block, which moves it in ascending
tiles: load a tile, barrier, store it. Slot c takes from kept[c] >= c, so no later tile loads what an earlier
one stored, and the barrier keeps a tile's own stores behind its loads. Into other blocks any number of thread
blocks share a column. Grid (blocks a column, kv_heads, layers).
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.intrinsics import (
    Value,
    inlined,
    load_quad,
    load_u8,
    load_u32,
    quotient,
    store_quad,
    store_u8,
    store_u32,
)
from kvd_cuda.gpu.kernel import ADDRESSES, FLOATS, INT, INT32S, Kernel, fields_type

THREADS = 256
WORDS = (16, 4, 1)
"""Bytes that one load moves: the widest that divides all addresses, strides and sizes."""


class MoveShape(NamedTuple):
    """Numbers of one compaction of K or V.

    kept         slots that stay
    head_bytes   of one kv head of one slot
    block_size   tokens a block
    block_bytes  from one block of a layer to the next
    kv_heads     of the pool: the stride from token to token
    first_head   kv head of the grid's first one
    """

    kept: int
    head_bytes: int
    block_size: int
    block_bytes: int
    kv_heads: int
    first_head: int


class SidecarShape(NamedTuple):
    """Numbers of one compaction of positions and scores.

    kept        slots that stay
    block_size  tokens a block
    explicit    slots whose position is in the sidecar; later ones have their number + age
    observed    slots whose score is; later ones have 0
    age         position - length
    columns     layers x kv heads of the pool: sidecar rows a block
    kv_heads    of the pool
    """

    kept: int
    block_size: int
    explicit: int
    observed: int
    age: int
    columns: int
    kv_heads: int


MOVE_SHAPE = fields_type(MoveShape, (INT,) * 6)
SIDECAR_SHAPE = fields_type(SidecarShape, (INT,) * 7)


@inlined
def _store_quad(address: Value, value: Value) -> None:
    store_quad(address, value[0], value[1], value[2], value[3])


MOVES: dict[int, Any] = {16: (load_quad, _store_quad), 4: (load_u32, store_u32), 1: (load_u8, store_u8)}


@cache
def compact_kernel(word: int) -> Kernel:
    """(bases, source, goal, kept, shape): bytes of slot kept[c] to slot c, `word` at a time.

    bases         uint64 [layers]: block 0 of each layer's K or V
    source, goal  block tables; goal's blocks are the first of source's (one block a column), or none of them
    kept          int32 [layers, kv_heads, shape.kept], ascending
    Traffic: every kept byte once in, once out.
    """
    load, store = MOVES[word]

    def compact(bases: Value, source: Value, goal: Value, kept: Value, shape: Value) -> None:
        row = (types.int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * shape.kept
        words = shape.head_bytes // word
        last = shape.kept * words - 1
        kv_head = types.uint64(shape.first_head) + types.uint64(cuda.blockIdx.y)
        base = bases[cuda.blockIdx.z] + kv_head * types.uint64(shape.head_bytes)
        for tile in range(cuda.blockIdx.x * 4 * THREADS, last + 1, cuda.gridDim.x * 4 * THREADS):
            first = tile + cuda.threadIdx.x
            second, third, fourth = first + THREADS, first + 2 * THREADS, first + 3 * THREADS
            a = load(base + source_of(source, kept, row, shape, min(first, last), word))
            b = load(base + source_of(source, kept, row, shape, min(second, last), word))
            c = load(base + source_of(source, kept, row, shape, min(third, last), word))
            d = load(base + source_of(source, kept, row, shape, min(fourth, last), word))
            cuda.syncthreads()
            if first <= last:
                store(base + goal_of(goal, shape, first, word), a)
            if second <= last:
                store(base + goal_of(goal, shape, second, word), b)
            if third <= last:
                store(base + goal_of(goal, shape, third, word), c)
            if fourth <= last:
                store(base + goal_of(goal, shape, fourth, word), d)

    return Kernel(f"compact_{word}", compact, (ADDRESSES, INT32S, INT32S, INT32S, MOVE_SHAPE), THREADS)


@inlined
def byte_of(table: Value, slot: Value, inside: Value, shape: Value) -> Value:
    """uint64 bytes from a column's base to byte `inside` of its slot."""
    block = quotient(slot, shape.block_size)
    offset = types.uint32(slot) - block * types.uint32(shape.block_size)
    start = types.uint64(table[block]) * types.uint64(shape.block_bytes)
    token_bytes = types.uint64(shape.head_bytes) * types.uint64(shape.kv_heads)
    return start + types.uint64(offset) * token_bytes + types.uint64(inside)


@inlined
def source_of(table: Value, kept: Value, row: Value, shape: Value, index: Value, word: Value) -> Value:
    """Where the column's word `index` comes from."""
    words = quotient(shape.head_bytes, word)
    slot = quotient(index, words)
    return byte_of(table, kept[row + slot], (types.uint32(index) - slot * words) * word, shape)


@inlined
def goal_of(table: Value, shape: Value, index: Value, word: Value) -> Value:
    """Where it goes."""
    words = quotient(shape.head_bytes, word)
    slot = quotient(index, words)
    return byte_of(table, slot, (types.uint32(index) - slot * words) * word, shape)


@cache
def sidecar_kernel() -> Kernel:
    """(positions, scores, tables, kept, shape): positions and accumulated scores move with their slots.

    positions, scores  int32, float32 [blocks, layers, kv_heads, block_size], from the grid's first column on
    tables             int32: the source blocks, all that hold slots in use, then the goal's
    One thread block a column. Traffic: 20 bytes a kept slot.
    """

    def compact_sidecar(
        positions: Value, scores: Value, source: Value, goal: Value, kept: Value, shape: Value
    ) -> None:
        row = (types.int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * shape.kept
        for tile in range(cuda.blockIdx.x * THREADS, shape.kept, cuda.gridDim.x * THREADS):
            index = tile + cuda.threadIdx.x
            slot = kept[row + min(index, shape.kept - 1)]
            place = sidecar_index(source, slot, shape)
            position = slot + shape.age
            if slot < shape.explicit:
                position = types.int64(positions[place])
            score = types.float32(0.0)
            if slot < shape.observed:
                score = scores[place]
            cuda.syncthreads()
            if index < shape.kept:
                place = sidecar_index(goal, index, shape)
                positions[place] = position
                scores[place] = score

    parameters = (INT32S, FLOATS, INT32S, INT32S, INT32S, SIDECAR_SHAPE)
    return Kernel("compact_sidecar", compact_sidecar, parameters, THREADS)


@inlined
def sidecar_index(table: Value, slot: Value, shape: Value) -> Value:
    """Element of a sidecar plane for one slot of the layer and kv head that are this block's z and y."""
    block = quotient(slot, shape.block_size)
    offset = types.int64(slot) - types.int64(block) * shape.block_size
    column = types.int64(cuda.blockIdx.z) * shape.kv_heads + cuda.blockIdx.y
    return (types.int64(table[block]) * shape.columns + column) * shape.block_size + offset
