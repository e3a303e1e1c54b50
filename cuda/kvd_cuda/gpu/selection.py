"""The largest scores of each row, ties to the lower index, by radix select; and the attention they hold."""

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.intrinsics import Value, ballot, bits_of, inlined, match_lanes, shuffle_from, shuffle_up
from kvd_cuda.gpu.kernel import DOUBLES, FLOATS, INT, INT32S, Kernel, fields_type

THREADS = 1024
WARPS = 32
DIGITS = 256  # of 8 bits
MASS_THREADS = 256


class SelectShape(NamedTuple):
    """Numbers of one selection.

    stride  from row to row of the scores
    first   candidates begin here: sinks, which stay
    stop    and end here: the window, which stays
    length  slots of the lease
    kept    slots that stay in all: first + chosen + (length - stop)
    """

    stride: int
    first: int
    stop: int
    length: int
    kept: int


SELECT_SHAPE = fields_type(SelectShape, (INT,) * 5)


@cache
def select_kernel() -> Kernel:
    """(scores, kept, shape): sinks, the best candidates and the window, ascending; int32 [rows, shape.kept].

    scores  float32 [rows, stride], finite or infinite, not NaN
    Four passes find the cut, 8 bits each, by counting in shared memory: integers, so the order of the atomic
    additions does not show. A fifth writes indices in order. Grid (rows). Traffic: 20 bytes a candidate.
    """

    def select(scores: Value, kept: Value, shape: Value) -> None:
        counts = cuda.shared.array(DIGITS, types.uint32)
        found = cuda.shared.array(2, types.uint32)
        row = types.int64(cuda.blockIdx.x)
        chosen = shape.kept - shape.first - (shape.length - shape.stop)
        cut, known, wanted = types.uint32(0), types.uint32(0), types.uint32(chosen)
        for shift in (24, 16, 8, 0):
            count_digits(scores, row * shape.stride, shape, counts, (cut, known, types.uint32(shift)))
            if cuda.threadIdx.x == 0:
                find_digit(counts, wanted, found)
            cuda.syncthreads()
            cut |= found[types.uint32(0)] << types.uint32(shift)
            known |= types.uint32(0xFF) << types.uint32(shift)
            wanted = found[types.uint32(1)]
        write_chosen(scores, row * shape.stride, kept, row * shape.kept, (shape, cut, wanted))
        for i in range(cuda.threadIdx.x, shape.first, THREADS):
            kept[row * shape.kept + i] = i
        for i in range(cuda.threadIdx.x, shape.length - shape.stop, THREADS):
            kept[row * shape.kept + shape.first + chosen + i] = shape.stop + i

    return Kernel("select", select, (FLOATS, INT32S, SELECT_SHAPE), THREADS)


@inlined
def ordered_bits(score: Value) -> Value:
    """uint32 that compares as the float does; -0 as 0."""
    bits = bits_of(score + types.float32(0.0))
    flipped = bits ^ types.uint32(0xFFFFFFFF)
    return flipped if bits >= types.uint32(0x80000000) else bits | types.uint32(0x80000000)


@inlined
def count_digits(scores: Value, start: Value, shape: Value, counts: Value, prefix: Value) -> None:
    """counts[d]: candidates that begin with the known bits of the cut and go on with digit d.

    prefix  (cut, mask of known bits, shift of the digit)
    Lanes with the same digit add once: scores share few exponents.
    """
    cut, known, shift = prefix
    if cuda.threadIdx.x < DIGITS:
        counts[types.uint32(cuda.threadIdx.x)] = types.uint32(0)
    cuda.syncthreads()
    for tile in range(shape.first, shape.stop, THREADS):
        slot = tile + cuda.threadIdx.x
        score = scores[start + min(slot, shape.stop - 1)]
        bits = ordered_bits(score)
        counted = slot < shape.stop and (bits & known) == cut
        digit = types.uint32(bits >> shift) & types.uint32(0xFF) if counted else types.uint32(DIGITS)
        peers = match_lanes(digit)
        lower = types.uint32(peers & ((types.uint32(1) << types.uint32(cuda.laneid)) - types.uint32(1)))
        if counted and lower == types.uint32(0):
            cuda.atomic.add(counts, types.int64(digit), types.uint32(cuda.popc(peers)))
    cuda.syncthreads()


@inlined
def find_digit(counts: Value, wanted: Value, found: Value) -> None:
    """found: the digit of the cut, and how many of its candidates are still wanted; one thread's work."""
    digit, above = types.uint32(DIGITS - 1), types.uint32(0)
    while digit > types.uint32(0) and types.uint32(above + counts[digit]) < wanted:
        above = types.uint32(above + counts[digit])
        digit = types.uint32(digit - types.uint32(1))
    found[types.uint32(0)] = digit
    found[types.uint32(1)] = types.uint32(wanted - above)


@inlined
def write_chosen(scores: Value, start: Value, kept: Value, goal: Value, choice: Value) -> None:
    """Indices of candidates above the cut, and of the first `wanted` at it, in ascending order.

    choice  (shape, cut, wanted)
    """
    shape, cut, wanted = choice
    warp_counts = cuda.shared.array(WARPS, types.uint32)
    below = (types.uint32(1) << types.uint32(cuda.laneid)) - types.uint32(1)
    above_before, ties_before = types.uint32(0), types.uint32(0)
    for tile in range(shape.first, shape.stop, THREADS):
        slot = tile + cuda.threadIdx.x
        bits = ordered_bits(scores[start + min(slot, shape.stop - 1)])
        above = slot < shape.stop and bits > cut
        tie = slot < shape.stop and bits == cut
        above_lanes = ballot(above)
        tie_lanes = ballot(tie)
        both = types.uint32(cuda.popc(above_lanes)) | (types.uint32(cuda.popc(tie_lanes)) << types.uint32(16))
        before, total = counts_before(warp_counts, both)
        ties = types.uint32((before >> types.uint32(16)) + ties_before + cuda.popc(tie_lanes & below))
        earlier = types.uint32(
            (before & types.uint32(0xFFFF)) + above_before + cuda.popc(above_lanes & below)
        )
        if above or (tie and ties < wanted):
            kept[goal + shape.first + earlier + min(ties, wanted)] = slot
        above_before = types.uint32(above_before + (total & types.uint32(0xFFFF)))
        ties_before = types.uint32(ties_before + (total >> types.uint32(16)))


@inlined
def counts_before(warp_counts: Value, count: Value) -> Value:
    """(sum of `count` over the warps before this one, over all); the same `count` in all lanes of a warp."""
    warp = cuda.threadIdx.x // 32
    if cuda.laneid == 0:
        warp_counts[types.uint32(warp)] = count
    cuda.syncthreads()
    running = warp_counts[types.uint32(cuda.laneid)]
    for step in (1, 2, 4, 8, 16):
        lower = shuffle_up(running, step)
        running = types.uint32(running + (lower if cuda.laneid >= step else types.uint32(0)))
    total, through = shuffle_from(running, 31), shuffle_from(running, warp)
    cuda.syncthreads()
    return types.uint32(through - count), total


@cache
def mass_kernel(of_all: bool = False) -> Kernel:
    """(values, kept, masses, length, kept_count): float64 [rows], sums of values at kept slots, or `of_all`.

    values  float32 [rows, length]
    kept    int32 [rows, kept_count], not looked at with `of_all`: then the first kept_count slots count
    Grid (rows). Traffic: 8 bytes a kept slot.
    """

    def mass(values: Value, kept: Value, masses: Value, length: Value, kept_count: Value) -> None:
        partial = cuda.shared.array(MASS_THREADS, types.float64)
        row = types.int64(cuda.blockIdx.x)
        total = types.float64(0.0)
        for i in range(cuda.threadIdx.x, kept_count, MASS_THREADS):
            slot = types.int64(i)
            if not of_all:
                slot = types.int64(kept[row * kept_count + i])
            total += values[row * length + slot]
        partial[types.uint32(cuda.threadIdx.x)] = total
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for i in range(1, MASS_THREADS):
                total += partial[types.uint32(i)]
            masses[row] = total

    return Kernel(
        "mass_of_all" if of_all else "mass", mass, (FLOATS, INT32S, DOUBLES, INT, INT), MASS_THREADS
    )
