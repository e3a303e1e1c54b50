"""KeyDiff: which keys differ most from all others. The maths are those of `kvd_cuda.host_keydiff`.

Four kernels: each key's length, the sum of the keys at unit length by segments, their direction (the anchor),
and minus each key's cosine with it. All in float64 and in one order whatever the grid; a key is read three
times.
"""

import math
from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.elements import ITEM_BYTES, READERS
from kvd_cuda.gpu.intrinsics import Value
from kvd_cuda.gpu.kernel import ADDRESSES, DOUBLES, FLOATS, INT, INT32S, Kernel, fields_type
from kvd_cuda.gpu.scores import SEGMENT, column_index, key_address, segment_index
from kvd_cuda.gpu.scores_scalar import MAX_HEAD_DIM

THREADS = MAX_HEAD_DIM  # one for each element of a key, or for each slot


class KeyTask(NamedTuple):
    """Which keys; fields as in ScoreTask."""

    key_bases: int
    table: int
    end: int
    kv_heads: int
    first_head: int
    head_dim: int
    block_size: int
    block_bytes: int


KEY_TASK = fields_type(KeyTask, (ADDRESSES, INT32S, *(INT,) * 6))


@cache
def scales_kernel(dtype: str) -> Kernel:
    """(task, scales): float64 [columns, end], 1 / length of each key; 1 for a key of no length.

    Grid (end / THREADS, kv heads, layers).
    """
    read, item_bytes = READERS[dtype], ITEM_BYTES[dtype]

    def scales_of_keys(task: Value, scales: Value) -> None:
        slot = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if slot < task.end:
            key = key_address(task, slot, item_bytes)
            total = types.float64(0.0)
            for i in range(task.head_dim):
                element = types.float64(read(key + types.uint64(i * item_bytes)))
                total += element * element
            scales[column_index() * task.end + slot] = 1.0 / math.sqrt(total) if total != 0.0 else 1.0

    return Kernel(f"keydiff_scales_{dtype}", scales_of_keys, (KEY_TASK, DOUBLES), THREADS)


@cache
def parts_kernel(dtype: str) -> Kernel:
    """(task, scales, parts): float64 [columns, segments, head_dim], sums of the keys at unit length.

    Grid (segments, kv heads, layers).
    """
    read, item_bytes = READERS[dtype], ITEM_BYTES[dtype]

    def sums_of_keys(task: Value, scales: Value, parts: Value) -> None:
        first, element = cuda.blockIdx.x * SEGMENT, cuda.threadIdx.x
        if element < task.head_dim:
            total = types.float64(0.0)
            for slot in range(first, min(first + SEGMENT, task.end)):
                key = key_address(task, slot, item_bytes) + types.uint64(element * item_bytes)
                total += types.float64(read(key)) * scales[column_index() * task.end + slot]
            parts[segment_index() * task.head_dim + element] = total

    return Kernel(f"keydiff_parts_{dtype}", sums_of_keys, (KEY_TASK, DOUBLES, DOUBLES), THREADS)


@cache
def anchors_kernel() -> Kernel:
    """(parts, anchors, segments, head_dim): float64 [columns, head_dim], of unit length, or 0 if the sum is.

    Grid (1, kv heads, layers). NaN and infinite keys make it NaN.
    """

    def anchors_of_parts(parts: Value, anchors: Value, segments: Value, head_dim: Value) -> None:
        squares = cuda.shared.array(THREADS, types.float64)
        element = cuda.threadIdx.x
        total = types.float64(0.0)
        if element < head_dim:
            for segment in range(segments):
                total += parts[(column_index() * segments + segment) * head_dim + element]
        squares[types.uint32(element)] = total * total
        cuda.syncthreads()
        length = types.float64(0.0)
        for i in range(head_dim):
            length += squares[types.uint32(i)]
        if element < head_dim:
            size = math.sqrt(length) if length != 0.0 else 1.0
            anchors[column_index() * head_dim + element] = total / size

    return Kernel("keydiff_anchors", anchors_of_parts, (DOUBLES, DOUBLES, INT, INT), THREADS)


@cache
def distinctness_kernel(dtype: str) -> Kernel:
    """(task, scales, anchors, scores): float32 [columns, end], minus the cosine of each key with its anchor.

    Grid (end / THREADS, kv heads, layers).
    """
    read, item_bytes = READERS[dtype], ITEM_BYTES[dtype]

    def distinctness(task: Value, scales: Value, anchors: Value, scores: Value) -> None:
        slot = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if slot < task.end:
            key = key_address(task, slot, item_bytes)
            place = column_index() * task.end + slot
            total = types.float64(0.0)
            for i in range(task.head_dim):
                element = types.float64(read(key + types.uint64(i * item_bytes))) * scales[place]
                total += element * anchors[column_index() * task.head_dim + i]
            scores[place] = types.float32(-total)

    parameters = (KEY_TASK, DOUBLES, DOUBLES, FLOATS)
    return Kernel(f"keydiff_{dtype}", distinctness, parameters, THREADS)
