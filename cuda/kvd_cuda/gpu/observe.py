"""H2O: attention accumulated in the sidecar, and read from it."""

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.compaction import sidecar_index
from kvd_cuda.gpu.intrinsics import Value
from kvd_cuda.gpu.kernel import FLOATS, INT, INT32S, Kernel, fields_type

THREADS = 256


class ObserveShape(NamedTuple):
    """Numbers of one accumulation.

    end         slots there are
    observed    slots that have a score; later ones have 0
    block_size  tokens a block
    columns     layers x kv heads of the pool: sidecar rows a block
    kv_heads    of the pool
    """

    end: int
    observed: int
    block_size: int
    columns: int
    kv_heads: int


OBSERVE_SHAPE = fields_type(ObserveShape, (INT,) * 5)


@cache
def accumulate_kernel() -> Kernel:
    """(scores, table, sums, shape): scores of the slots += sums, of the votes kernel: float32 [.., end].

    scores  float32 [blocks, layers, kv_heads, block_size], from the grid's first column on
    Grid (end / THREADS, kv_heads, layers). Traffic: 12 bytes a slot.
    """

    def accumulate(scores: Value, table: Value, sums: Value, shape: Value) -> None:
        slot = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if slot < shape.end:
            column = types.int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
            place = sidecar_index(table, slot, shape)
            before = types.float32(0.0)
            if slot < shape.observed:
                before = scores[place]
            scores[place] = before + sums[column * shape.end + slot]

    return Kernel("accumulate", accumulate, (FLOATS, INT32S, FLOATS, OBSERVE_SHAPE), THREADS)


@cache
def gather_scores_kernel() -> Kernel:
    """(scores, table, dense, shape): accumulated scores in slot order, float32 [layers, kv_heads, end].

    Grid (end / THREADS, kv_heads, layers). Traffic: 8 bytes a slot.
    """

    def gather_scores(scores: Value, table: Value, dense: Value, shape: Value) -> None:
        slot = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if slot < shape.end:
            column = types.int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
            score = types.float32(0.0)
            if slot < shape.observed:
                score = scores[sidecar_index(table, slot, shape)]
            dense[column * shape.end + slot] = score

    return Kernel("gather_scores", gather_scores, (FLOATS, INT32S, FLOATS, OBSERVE_SHAPE), THREADS)
