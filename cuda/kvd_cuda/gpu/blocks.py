"""Whole blocks: copied from one to another, or overwritten."""

from functools import cache

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.compaction import MOVES
from kvd_cuda.gpu.intrinsics import Value, store_u32
from kvd_cuda.gpu.kernel import ADDRESSES, INT, INT32S, Kernel

THREADS = 256


@cache
def copy_kernel(word: int) -> Kernel:
    """(bases, sources, goals, block_bytes, stride): block sources[i] to block goals[i] in every plane.

    bases           uint64 [planes]: block 0 of each plane (a layer's K or V, a sidecar), all alike in size
    sources, goals  int32 [blocks], all different
    stride          bytes from one block to the next
    Grid (parts of a block, blocks, planes). Traffic: every byte once in, once out, `word` at a time.
    """
    load, store = MOVES[word]

    def copy_blocks(bases: Value, sources: Value, goals: Value, block_bytes: Value, stride: Value) -> None:
        base = bases[cuda.blockIdx.z]
        source = base + types.uint64(sources[cuda.blockIdx.y]) * types.uint64(stride)
        goal = base + types.uint64(goals[cuda.blockIdx.y]) * types.uint64(stride)
        first = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        for index in range(first, block_bytes // word, cuda.gridDim.x * THREADS):
            offset = types.uint64(index * word)
            store(goal + offset, load(source + offset))

    return Kernel(f"copy_blocks_{word}", copy_blocks, (ADDRESSES, INT32S, INT32S, INT, INT), THREADS)


@cache
def scrub_kernel() -> Kernel:
    """(bases, blocks, block_bytes, stride, pattern): fill blocks in every plane with a 32-bit pattern.

    Grid (parts of a block, blocks, planes). Traffic: every byte once out. Sizes and strides multiples of 4.
    """

    def scrub_blocks(bases: Value, blocks: Value, block_bytes: Value, stride: Value, pattern: Value) -> None:
        goal = bases[cuda.blockIdx.z] + types.uint64(blocks[cuda.blockIdx.y]) * types.uint64(stride)
        first = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        for index in range(first, block_bytes // 4, cuda.gridDim.x * THREADS):
            store_u32(goal + types.uint64(index * 4), pattern)

    return Kernel("scrub_blocks", scrub_blocks, (ADDRESSES, INT32S, INT, INT, types.uint32), THREADS)
