"""SnapKV scoring on ordinary cores: any dtype, head_dim, group, window and alignment. The readable twin.

A block of 8 warps looks at one segment of keys for all rows, 8 rows (one a warp) and 32 keys (one a lane) at
a time, both as float32 in shared memory. Two passes: `statistics_kernel`, then, with the bases that `merge`
made of its parts, `votes_kernel`. Buffers: see `scores`. Grid (segments, kv_heads, layers), 256 threads.
Traffic: the keys once a pass from memory, and once per 8 rows from L2.
"""

from collections.abc import Callable
from functools import cache

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.elements import ITEM_BYTES, READERS
from kvd_cuda.gpu.intrinsics import Value, exp2, fma, inlined, shuffle_xor
from kvd_cuda.gpu.kernel import FLOATS, Kernel
from kvd_cuda.gpu.scores import (
    SCORE_TASK,
    SEGMENT,
    UNSEEN,
    column_index,
    joined,
    key_address,
    query_address,
    segment_index,
    visible_slots,
)

WARPS = 8
LANES = 32
THREADS = WARPS * LANES
MAX_HEAD_DIM = 256  # elements; a tile of keys then takes 33 of the 48 KiB of shared memory
KEY_STRIDE = MAX_HEAD_DIM + 1  # odd: 32 lanes read 32 banks
ROW_ELEMENTS = WARPS * MAX_HEAD_DIM
KEY_ELEMENTS = LANES * KEY_STRIDE


@cache
def statistics_kernel(key_dtype: str, query_dtype: str) -> Kernel:
    """(task, parts): the largest score of each row in each segment, and its sum of exponentials."""
    load_rows, load_keys = _row_loader(query_dtype), _key_loader(key_dtype)

    def statistics(task: Value, parts: Value) -> None:
        rows = cuda.shared.array(ROW_ELEMENTS, types.float32)
        keys = cuda.shared.array(KEY_ELEMENTS, types.float32)
        first = cuda.blockIdx.x * SEGMENT
        row_count = task.window * task.group
        for first_row in range(0, row_count, WARPS):
            row = first_row + cuda.threadIdx.x // LANES
            limit = visible_slots(task, row)
            largest, total = UNSEEN, types.float32(0.0)
            load_rows(task, rows, first_row)
            for tile in range(first, min(first + SEGMENT, task.end), LANES):
                load_keys(task, keys, tile)
                cuda.syncthreads()
                score = dot(task, rows, keys)
                if tile + cuda.laneid < limit:
                    largest, total = joined((largest, total), (score, types.float32(1.0)))
                cuda.syncthreads()
            largest, total = joined_lanes(largest, total)
            if cuda.laneid == 0 and row < row_count:
                index = 2 * (segment_index() * row_count + row)
                parts[index] = largest
                parts[index + 1] = total

    return Kernel(f"statistics_scalar_{key_dtype}_{query_dtype}", statistics, (SCORE_TASK, FLOATS), THREADS)


@cache
def votes_kernel(key_dtype: str, query_dtype: str) -> Kernel:
    """(task, bases, sums, peaks, row_sums): attention by slot, summed over rows and its maximum."""
    load_rows, load_keys = _row_loader(query_dtype), _key_loader(key_dtype)

    def votes(task: Value, bases: Value, sums: Value, peaks: Value, row_sums: Value) -> None:
        rows = cuda.shared.array(ROW_ELEMENTS, types.float32)
        keys = cuda.shared.array(KEY_ELEMENTS, types.float32)
        weights = cuda.shared.array(THREADS, types.float32)
        first = cuda.blockIdx.x * SEGMENT
        row_count = task.window * task.group
        for first_row in range(0, row_count, WARPS):
            row = first_row + cuda.threadIdx.x // LANES
            limit = visible_slots(task, row)
            base = 2 * (column_index() * row_count + min(row, row_count - 1))
            reference, factor, row_sum = bases[base], bases[base + 1], types.float32(0.0)
            load_rows(task, rows, first_row)
            for tile in range(first, min(first + SEGMENT, task.end), LANES):
                load_keys(task, keys, tile)
                cuda.syncthreads()
                weight = types.float32(0.0)
                if tile + cuda.laneid < limit:
                    weight = factor * exp2(dot(task, rows, keys) - reference)
                weights[cuda.threadIdx.x] = weight
                row_sum += weight
                cuda.syncthreads()
                collect(task, weights, tile, first_row, sums, peaks)
            row_sum = sum_of_lanes(row_sum)
            if cuda.laneid == 0 and row < row_count:
                row_sums[segment_index() * row_count + row] = row_sum

    return Kernel(
        f"votes_scalar_{key_dtype}_{query_dtype}",
        votes,
        (SCORE_TASK, FLOATS, FLOATS, FLOATS, FLOATS),
        THREADS,
    )


@inlined
def dot(task: Value, rows: Value, keys: Value) -> Value:
    """Scaled product of this warp's row with this lane's key."""
    row = cuda.threadIdx.x // LANES * MAX_HEAD_DIM
    key = cuda.laneid * KEY_STRIDE
    total = types.float32(0.0)
    for i in range(task.head_dim):
        total = fma(rows[types.uint32(row + i)], keys[types.uint32(key + i)], total)
    return total * task.scale


@inlined
def collect(task: Value, weights: Value, tile: Value, first_row: Value, sums: Value, peaks: Value) -> None:
    """Add the weights of 8 rows, in order, to the tile's slots; each has one thread, always the same."""
    slot = tile + cuda.threadIdx.x
    if cuda.threadIdx.x < LANES and slot < task.end:
        index = column_index() * task.end + slot
        total = sums[index] if first_row > 0 else types.float32(0.0)
        peak = peaks[index] if first_row > 0 else types.float32(0.0)
        for warp in range(WARPS):
            weight = weights[types.uint32(warp * LANES + cuda.threadIdx.x)]
            total += weight
            peak = max(peak, weight)
        sums[index] = total
        peaks[index] = peak


@inlined
def joined_lanes(largest: Value, total: Value) -> Value:
    """(largest, sum) over the warp, the same in all lanes."""
    for step in (1, 2, 4, 8, 16):
        other = shuffle_xor(largest, step)
        added = shuffle_xor(total, step)
        largest, total = joined((largest, total), (other, added))
    return largest, total


@inlined
def sum_of_lanes(value: Value) -> Value:
    """Sum over the warp, the same in all lanes."""
    for step in (1, 2, 4, 8, 16):
        value += shuffle_xor(value, step)
    return value


def _row_loader(dtype: str) -> Callable[[Value, Value, Value], None]:
    read, item_bytes = READERS[dtype], ITEM_BYTES[dtype]

    @inlined
    def load_rows(task: Value, rows: Value, first_row: Value) -> None:
        """Each warp fetches its own row; rows past the last repeat it."""
        row = min(first_row + cuda.threadIdx.x // LANES, task.window * task.group - 1)
        address = query_address(task, row, item_bytes)
        for i in range(cuda.laneid, task.head_dim, LANES):
            index = types.uint32(cuda.threadIdx.x // LANES * MAX_HEAD_DIM + i)
            rows[index] = read(address + types.uint64(i * item_bytes))

    return load_rows


def _key_loader(dtype: str) -> Callable[[Value, Value, Value], None]:
    read, item_bytes = READERS[dtype], ITEM_BYTES[dtype]

    @inlined
    def load_keys(task: Value, keys: Value, tile: Value) -> None:
        """Each warp fetches every eighth key; those past the end repeat the last, unseen by any row."""
        for key in range(cuda.threadIdx.x // LANES, LANES, WARPS):
            slot = min(tile + key, task.end - 1)
            address = key_address(task, slot, item_bytes)
            for i in range(cuda.laneid, task.head_dim, LANES):
                keys[types.uint32(key * KEY_STRIDE + i)] = read(address + types.uint64(i * item_bytes))

    return load_keys
