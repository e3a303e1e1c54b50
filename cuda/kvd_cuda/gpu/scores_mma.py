"""SnapKV scoring on tensor cores: bf16 and fp16 keys with queries alike, fp8 keys with bf16 queries.

A block looks at one segment of keys for all rows. Each warp keeps 16 rows' queries in registers and
multiplies them with every key of a tile while the next tile is on its way (`key_tiles`). Two passes:
`statistics_kernel`, then, with the bases that `merge` made of its parts, `votes_kernel`. Buffers: `scores`.
Grid (segments, kv_heads, layers), 32 * warps threads. head_dim a multiple of 16 up to 256; K's addresses and
strides multiples of 16 bytes. Traffic: the keys once a pass from memory, once per 16 * warps rows from L2.
"""

from collections.abc import Callable
from functools import cache

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.intrinsics import (
    Value,
    exp2,
    fma,
    inlined,
    shared_address,
    shuffle_xor,
    wait_for_all_but_newest,
    wait_for_all_copies,
)
from kvd_cuda.gpu.kernel import FLOATS, Kernel
from kvd_cuda.gpu.key_tiles import KeyTiles, tile_copier, tile_widener
from kvd_cuda.gpu.scores import (
    SCORE_TASK,
    SEGMENT,
    UNSEEN,
    column_index,
    joined,
    query_address,
    segment_index,
    visible_slots,
)
from kvd_cuda.gpu.tensor_cores import KEYS_AT_ONCE, query_fragments, score_keys

ROWS = 16  # of a warp
WARPS = (4, 8)
"""Warps a block may have: 4 where a kv head has at most 64 rows."""


@cache
def statistics_kernel(dtype: str, head_dim: int, warps: int) -> Kernel:
    """(task, parts): the largest score of each row in each segment, and its sum of exponentials."""
    tiles = KeyTiles(dtype, head_dim, 32 * warps)
    copy_tile, ready_tile = tile_copier(tiles), _tile_waiter(tiles)
    load_rows, score = _row_loader(head_dim), score_keys(tiles.wide_dtype, head_dim)
    shared_bytes, tile_keys, row_bytes, rows_at_once = (
        tiles.shared_bytes,
        tiles.keys,
        tiles.row_bytes,
        ROWS * warps,
    )

    def statistics(task: Value, parts: Value) -> None:
        shared = shared_address(cuda.shared.array(shared_bytes, types.uint8, alignment=16))
        first = cuda.blockIdx.x * SEGMENT
        row_count = task.window * task.group
        for first_row in range(0, row_count, rows_at_once):
            row = first_row + upper_row()
            fragments = load_rows(task, row)
            upper_limit, lower_limit = visible_slots(task, row), visible_slots(task, row + 8)
            upper, lower = (UNSEEN, types.float32(0.0)), (UNSEEN, types.float32(0.0))
            copy_tile(task, first, shared)
            for tile in range(first, min(first + SEGMENT, task.end), tile_keys):
                keys = ready_tile(task, tile, shared)
                for key in range(0, tile_keys, KEYS_AT_ONCE):
                    products = score(fragments, keys + types.uint32(key * row_bytes))
                    slot = tile + key + first_column()
                    upper = absorbed(task, upper, slot, upper_limit, products[0:2] + products[4:6])
                    lower = absorbed(task, lower, slot, lower_limit, products[2:4] + products[6:8])
                cuda.syncthreads()
            write_part(parts, row_count, row, joined_quad(upper))
            write_part(parts, row_count, row + 8, joined_quad(lower))

    return Kernel(f"statistics_mma_{dtype}_{head_dim}_{warps}", statistics, (SCORE_TASK, FLOATS), 32 * warps)


@cache
def votes_kernel(dtype: str, head_dim: int, warps: int) -> Kernel:
    """(task, bases, sums, peaks, row_sums): attention by slot, summed over rows and its maximum."""
    tiles = KeyTiles(dtype, head_dim, 32 * warps)
    copy_tile, ready_tile = tile_copier(tiles), _tile_waiter(tiles)
    load_rows, score = _row_loader(head_dim), score_keys(tiles.wide_dtype, head_dim)
    collect, write_columns = _collector(tiles.keys, warps), _column_writer(tiles.keys)
    shared_bytes, tile_keys, row_bytes, rows_at_once = (
        tiles.shared_bytes,
        tiles.keys,
        tiles.row_bytes,
        ROWS * warps,
    )
    column_count = warps * tile_keys

    def votes(task: Value, bases: Value, sums: Value, peaks: Value, row_sums: Value) -> None:
        shared = shared_address(cuda.shared.array(shared_bytes, types.uint8, alignment=16))
        warp_sums = cuda.shared.array(column_count, types.float32)
        warp_peaks = cuda.shared.array(column_count, types.float32)
        first = cuda.blockIdx.x * SEGMENT
        row_count = task.window * task.group
        for first_row in range(0, row_count, rows_at_once):
            row = first_row + upper_row()
            fragments = load_rows(task, row)
            upper_limit, lower_limit = visible_slots(task, row), visible_slots(task, row + 8)
            upper_base, lower_base = base_of(bases, row_count, row), base_of(bases, row_count, row + 8)
            upper_sum, lower_sum = types.float32(0.0), types.float32(0.0)
            copy_tile(task, first, shared)
            for tile in range(first, min(first + SEGMENT, task.end), tile_keys):
                keys = ready_tile(task, tile, shared)
                for key in range(0, tile_keys, KEYS_AT_ONCE):
                    products = score(fragments, keys + types.uint32(key * row_bytes))
                    slot = tile + key + first_column()
                    upper = weighed(task, upper_base, slot, upper_limit, products[0:2] + products[4:6])
                    lower = weighed(task, lower_base, slot, lower_limit, products[2:4] + products[6:8])
                    upper_sum += (upper[0] + upper[1]) + (upper[2] + upper[3])
                    lower_sum += (lower[0] + lower[1]) + (lower[2] + lower[3])
                    write_columns(warp_sums, warp_peaks, key, upper, lower)
                cuda.syncthreads()
                collect(task, tile, first_row, (warp_sums, warp_peaks), (sums, peaks))
            write_row_sum(row_sums, row_count, row, upper_sum)
            write_row_sum(row_sums, row_count, row + 8, lower_sum)

    return Kernel(f"votes_mma_{dtype}_{head_dim}_{warps}", votes, (SCORE_TASK, *(FLOATS,) * 4), 32 * warps)


@inlined
def upper_row() -> Value:
    """The first of the two rows whose products this lane holds; the other is 8 further."""
    return types.int32(cuda.threadIdx.x // 32 * ROWS + cuda.laneid // 4)


@inlined
def first_column() -> Value:
    """The first of the four keys whose products this lane holds: + 0, 1, 8, 9."""
    return cuda.laneid % 4 * 2


@inlined
def absorbed(task: Value, state: Value, slot: Value, limit: Value, products: Value) -> Value:
    """(largest, sum) with four more scores, of slots slot + 0, 1, 8, 9."""
    a = products[0] * task.scale if slot < limit else UNSEEN
    b = products[1] * task.scale if slot + 1 < limit else UNSEEN
    c = products[2] * task.scale if slot + 8 < limit else UNSEEN
    d = products[3] * task.scale if slot + 9 < limit else UNSEEN
    largest = max(max(a, b), max(c, d), state[0])
    reference = largest if largest > UNSEEN else types.float32(0.0)
    added = (exp2(a - reference) + exp2(b - reference)) + (exp2(c - reference) + exp2(d - reference))
    return largest, state[1] * exp2(state[0] - reference) + added


@inlined
def weighed(task: Value, base: Value, slot: Value, limit: Value, products: Value) -> Value:
    """Attention to slots slot + 0, 1, 8, 9; 0 to those the row must not see."""
    nothing = types.float32(0.0)
    a = base[1] * exp2(fma(products[0], task.scale, -base[0])) if slot < limit else nothing
    b = base[1] * exp2(fma(products[1], task.scale, -base[0])) if slot + 1 < limit else nothing
    c = base[1] * exp2(fma(products[2], task.scale, -base[0])) if slot + 8 < limit else nothing
    d = base[1] * exp2(fma(products[3], task.scale, -base[0])) if slot + 9 < limit else nothing
    return a, b, c, d


@inlined
def joined_quad(state: Value) -> Value:
    """(largest, sum) over the four lanes that share a row, the same in each."""
    largest, total = state
    for step in (1, 2):
        other = shuffle_xor(largest, step)
        added = shuffle_xor(total, step)
        largest, total = joined((largest, total), (other, added))
    return largest, total


@inlined
def write_part(parts: Value, row_count: Value, row: Value, state: Value) -> None:
    """One row's (largest, sum) in this segment; rows past the last are dropped."""
    if cuda.laneid % 4 == 0 and row < row_count:
        index = 2 * (segment_index() * row_count + row)
        parts[index] = state[0]
        parts[index + 1] = state[1]


@inlined
def write_row_sum(row_sums: Value, row_count: Value, row: Value, value: Value) -> None:
    """One row's attention to this segment, summed over the four lanes that share it."""
    for step in (1, 2):
        value += shuffle_xor(value, step)
    if cuda.laneid % 4 == 0 and row < row_count:
        row_sums[segment_index() * row_count + row] = value


@inlined
def base_of(bases: Value, row_count: Value, row: Value) -> Value:
    """(m, w) of a row; of the last one for rows past it, which see nothing."""
    index = 2 * (column_index() * row_count + min(row, row_count - 1))
    return bases[index], bases[index + 1]


@inlined
def sum_over_rows(value: Value) -> Value:
    """Sum over the eight lanes that hold the same column of different rows."""
    for step in (4, 8, 16):
        value += shuffle_xor(value, step)
    return value


@inlined
def peak_over_rows(value: Value) -> Value:
    """Maximum over the same."""
    for step in (4, 8, 16):
        value = max(value, shuffle_xor(value, step))
    return value


def _row_loader(head_dim: int) -> Callable[[Value, Value], Value]:
    load = query_fragments(head_dim)

    @inlined
    def load_rows(task: Value, row: Value) -> Value:
        """Fragments of this lane's two rows; rows past the last repeat it."""
        last = task.window * task.group - 1
        lane_bytes = types.uint64(cuda.laneid % 4 * 4)
        upper = query_address(task, min(row, last), 2) + lane_bytes
        lower = query_address(task, min(row + 8, last), 2) + lane_bytes
        return load(upper, lower)

    return load_rows


def _column_writer(tile_keys: int) -> Callable[[Value, Value, Value, Value, Value], None]:
    @inlined
    def write_columns(sums: Value, peaks: Value, key: Value, upper: Value, lower: Value) -> None:
        """This warp's attention to 16 keys of the tile: over its 16 rows, the sum and the maximum."""
        index = types.uint32(cuda.threadIdx.x // 32 * tile_keys + key + first_column())
        for i in range(4):
            total = sum_over_rows(upper[i] + lower[i])
            peak = peak_over_rows(max(upper[i], lower[i]))
            if cuda.laneid < 4:
                column = index + types.uint32(i % 2 + i // 2 * 8)
                sums[column] = total
                peaks[column] = peak

    return write_columns


def _collector(tile_keys: int, warps: int) -> Callable[[Value, Value, Value, Value, Value], None]:
    @inlined
    def collect(task: Value, tile: Value, first_row: Value, of_warps: Value, results: Value) -> None:
        """Add all warps' rows, in order, to the tile's slots; each slot has one thread, always the same."""
        slot = tile + cuda.threadIdx.x
        if cuda.threadIdx.x < tile_keys and slot < task.end:
            index = column_index() * task.end + slot
            total = results[0][index] if first_row > 0 else types.float32(0.0)
            peak = results[1][index] if first_row > 0 else types.float32(0.0)
            for warp in range(warps):
                column = types.uint32(warp * tile_keys + cuda.threadIdx.x)
                total += of_warps[0][column]
                peak = max(peak, of_warps[1][column])
            results[0][index] = total
            results[1][index] = peak

    return collect


def _tile_waiter(tiles: KeyTiles) -> Callable[[Value, Value, Value], Value]:
    copy_tile, widen_tile, tile_keys = tile_copier(tiles), tile_widener(tiles), tiles.keys
    tile_bytes, row_bytes, is_fp8 = tiles.keys * tiles.raw_row_bytes, tiles.row_bytes, tiles.fp8

    @inlined
    def ready_tile(task: Value, tile: Value, shared: Value) -> Value:
        """Wait for a tile while the segment's next is copied; the key row that this lane fetches first."""
        here = types.uint32(tile // tile_keys % 2 * tile_bytes)
        following = tile + tile_keys
        if following < task.end and following % SEGMENT != 0:
            copy_tile(task, following, shared + types.uint32(tile_bytes) - here)
            wait_for_all_but_newest()
        else:
            wait_for_all_copies()
        cuda.syncthreads()
        wide = shared + here
        if is_fp8:
            wide = shared + types.uint32(2 * tile_bytes)
            widen_tile(shared + here, wide)
            cuda.syncthreads()
        key = cuda.laneid % 8 + cuda.laneid // 16 * 8
        return types.uint32(wide + key * row_bytes + cuda.laneid // 8 % 2 * 16)

    return ready_tile
