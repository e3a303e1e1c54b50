"""Votes -> pooled votes -> ranks of whole blocks."""

from functools import cache

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.intrinsics import Value
from kvd_cuda.gpu.kernel import DOUBLES, FLOAT, FLOATS, INT, Kernel

THREADS = 256


@cache
def pool_kernel(kind: str) -> Kernel:
    """(votes, pooled, length, scored, kernel, scale): folded and pooled along the slots, "avg" or "max".

    votes   float32 [rows, length]; each is multiplied by `scale` (1 / group folds a sum to a mean)
    pooled  float32 [rows, scored]; slots from `scored` on do not count. Averages are summed in float64
    Grid (scored / THREADS, rows). Traffic: 8 bytes a slot, the neighbours from L1.
    """
    average = kind == "avg"

    def pool(votes: Value, pooled: Value, length: Value, scored: Value, kernel: Value, scale: Value) -> None:
        slot = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if slot < scored:
            row = types.int64(cuda.blockIdx.y)
            first = max(slot - kernel // 2, 0)
            stop = min(slot + kernel // 2 + 1, scored)
            total, largest = types.float64(0.0), votes[row * length + slot] * scale
            for j in range(first, stop):
                vote = votes[row * length + j] * scale
                total += vote
                largest = max(largest, vote)
            pooled[row * scored + slot] = types.float32(total / kernel) if average else largest

    return Kernel(f"pool_{kind}", pool, (FLOATS, FLOATS, INT, INT, INT, FLOAT), THREADS)


@cache
def token_ranks_kernel() -> Kernel:
    """(pooled, ranks, rows, scored, begun): ranks float64 [scored] += pooled votes, row after row.

    begun  0: ranks hold nothing yet

    Grid (scored / THREADS). Traffic: 4 bytes a row and slot.
    """

    def token_ranks(pooled: Value, ranks: Value, rows: Value, scored: Value, begun: Value) -> None:
        slot = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if slot < scored:
            total = ranks[types.int64(slot)] if begun else types.float64(0.0)
            for row in range(rows):
                total += pooled[row * scored + slot]
            ranks[types.int64(slot)] = total

    return Kernel("token_ranks", token_ranks, (FLOATS, DOUBLES, INT, INT, INT), THREADS)


@cache
def block_ranks_kernel() -> Kernel:
    """(ranks, block_ranks, rows, scored, block_size, blocks): float32 [blocks], the best token's mean.

    A block without a scored token ranks 0. Grid (blocks / THREADS). Traffic: 8 bytes a slot.
    """

    def block_ranks(
        ranks: Value, block_ranks: Value, rows: Value, scored: Value, block_size: Value, blocks: Value
    ) -> None:
        block = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if block < blocks:
            best = types.float64(0.0)
            for slot in range(block * block_size, min(scored, (block + 1) * block_size)):
                best = max(best, ranks[slot])
            block_ranks[types.int64(block)] = types.float32(best / rows)

    return Kernel("block_ranks", block_ranks, (DOUBLES, FLOATS, INT, INT, INT, INT), THREADS)


@cache
def block_masses_kernel() -> Kernel:
    """(sums, masses, heads, length, block_size): float64 [layers, blocks], attention to whole blocks.

    sums  float32 [layers, heads, length]; heads are added up
    Grid (blocks / THREADS, 1, layers). Traffic: 4 bytes a slot.
    """

    def block_masses(sums: Value, masses: Value, heads: Value, length: Value, block_size: Value) -> None:
        block = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        blocks = (length + block_size - 1) // block_size
        if block < blocks:
            total = types.float64(0.0)
            for head in range(heads):
                row = (types.int64(cuda.blockIdx.z) * heads + head) * length
                for slot in range(block * block_size, min(length, (block + 1) * block_size)):
                    total += sums[row + slot]
            masses[types.int64(cuda.blockIdx.z) * blocks + block] = total

    return Kernel("block_masses", block_masses, (FLOATS, DOUBLES, INT, INT, INT), THREADS)
