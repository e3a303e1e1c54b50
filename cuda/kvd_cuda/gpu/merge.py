"""From the parts of each segment to each row's base, and the proof that its attention sums to 1."""

from functools import cache

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.intrinsics import Value, exp2, inlined, quotient, shuffle_xor
from kvd_cuda.gpu.kernel import FLOATS, INT, Kernel
from kvd_cuda.gpu.scores import UNSEEN, column_index, joined

THREADS = 128
LOG2_E = 1.4426950408889634
WARPS = 4


@cache
def merge_kernel() -> Kernel:
    """(parts, bases, segments, rows): base (m, w) of each row from its segments, joined in ascending order.

    Grid (rows / THREADS, kv_heads, layers). Traffic: 8 bytes a part.
    """

    def merge(parts: Value, bases: Value, segments: Value, rows: Value) -> None:
        row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if row < rows:
            largest, total = UNSEEN, types.float32(0.0)
            for segment in range(segments):
                part = 2 * ((column_index() * segments + segment) * rows + row)
                largest, total = joined((largest, total), (parts[part], parts[part + 1]))
            index = 2 * (column_index() * rows + row)
            bases[index] = largest
            bases[index + 1] = types.float32(1.0) / total

    return Kernel("merge", merge, (FLOATS, FLOATS, INT, INT), THREADS)


@cache
def lse_kernel() -> Kernel:
    """(row_lse, bases, window, query_count, group, query_heads): bases of rows whose log-sum-exp is known.

    row_lse  float32 [layers, query_count, query_heads], natural, from this launch's first query and head on
    Grid (rows / THREADS, kv_heads, layers). Traffic: 12 bytes a row.
    """

    def bases_of_lse(
        row_lse: Value, bases: Value, window: Value, query_count: Value, group: Value, query_heads: Value
    ) -> None:
        row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        rows = window * group
        if row < rows:
            head = types.int64(quotient(row, window))
            token = types.int64(cuda.blockIdx.z) * query_count + row - head * window
            column = types.int64(cuda.blockIdx.y) * group + head
            lse = row_lse[token * query_heads + column]
            exact = types.float64(lse) * LOG2_E
            base = types.float32(exact)
            index = 2 * (column_index() * rows + row)
            bases[index] = base
            bases[index + 1] = exp2(types.float32(types.float64(base) - exact))

    return Kernel("bases_of_lse", bases_of_lse, (FLOATS, FLOATS, *(INT,) * 4), THREADS)


@cache
def check_kernel() -> Kernel:
    """(row_sums, errors, segments, rows): how far any row's attention is from 1, infinity where it is NaN.

    errors  float32 [layers, kv_heads]: tells NaN and infinite scores and a wrong log-sum-exp
    Grid (1, kv_heads, layers). Traffic: 4 bytes a row and segment.
    """

    def check(row_sums: Value, errors: Value, segments: Value, rows: Value) -> None:
        warp_errors = cuda.shared.array(WARPS, types.float32)
        worst = types.float32(0.0)
        for row in range(cuda.threadIdx.x, rows, THREADS):
            total = types.float32(0.0)
            for segment in range(segments):
                total += row_sums[(column_index() * segments + segment) * rows + row]
            error = abs(total - types.float32(1.0))
            worst = max(worst, error if error == error else types.float32(float("inf")))
        worst = largest_of_lanes(worst)
        if cuda.laneid == 0:
            warp_errors[types.uint32(cuda.threadIdx.x // 32)] = worst
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for warp in range(1, WARPS):
                worst = max(worst, warp_errors[types.uint32(warp)])
            errors[column_index()] = worst

    return Kernel("check", check, (FLOATS, FLOATS, INT, INT), THREADS)


@inlined
def largest_of_lanes(value: Value) -> Value:
    """Maximum over the warp, the same in all lanes."""
    for step in (1, 2, 4, 8, 16):
        value = max(value, shuffle_xor(value, step))
    return value
