"""Compiled loops of the host backend. Single-threaded, GIL released, cached on disk (NUMBA_CACHE_DIR).

Every reduction has a written order (lanes, then rows in blocks of eight), so results do not depend on how
the work is cut. Only the contraction of a * b + c into one rounding is left to the compiler.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from kvd_cuda.dtypes import Array, FloatArray, IntArray

LANES = 64  # partial sums and maxima of a row; a multiple of any vector width
ROW_BLOCK = 8  # rows added together before they join a vote: fewer roundings, fewer passes

_F = TypeVar("_F", bound=Callable[..., Any])


def _compiled(function: _F) -> _F:
    return cast(_F, numba.njit(cache=True, nogil=True, fastmath={"contract"})(function))


_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits
_ROUND_BITS = np.int32(_ROUND.view(np.int32))
_UNDERFLOW = np.float32(-126.0)  # below: 0, as weights that small round to nothing in any sum
_E1 = np.float32(0.6931471805599453)  # 2**r = sum of (r ln 2)**n / n!, 2e-8 at |r| = 0.5
_E2 = np.float32(0.2402265069591007)
_E3 = np.float32(0.05550410866482158)
_E4 = np.float32(0.009618129107628477)
_E5 = np.float32(0.0013333558146428443)
_E6 = np.float32(0.00015403530393381608)
_ONE = np.float32(1)
_ZERO = np.float32(0)
_EXPONENT_SHIFT = np.int32(23)


@_compiled
def _exp2(x: Any) -> Any:
    shifted = np.float32(x + _ROUND)
    r = x - (shifted - _ROUND)
    p = np.float32((((((_E6 * r + _E5) * r + _E4) * r + _E3) * r + _E2) * r + _E1) * r + _ONE)
    bits = p.view(np.int32) + ((shifted.view(np.int32) - _ROUND_BITS) << _EXPONENT_SHIFT)
    power = _ZERO if x < _UNDERFLOW else np.int32(bits).view(np.float32)
    return power if x == x else x  # a NaN's payload would otherwise shift into a number


@_compiled
def _row_max(row: FloatArray, lanes: FloatArray) -> Any:
    lanes[:] = -np.inf
    for j in range(0, row.size, LANES):
        part = row[j : j + LANES]
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], part[lane])
    highest = lanes[0]
    for lane in range(1, LANES):
        highest = max(highest, lanes[lane])
    return highest


@_compiled
def _row_exp2(row: FloatArray, scale: Any, reference: Any, lanes: FloatArray) -> Any:
    lanes[:] = _ZERO
    for j in range(0, row.size, LANES):
        part = row[j : j + LANES]
        for lane in range(LANES):
            power = _exp2(part[lane] * scale - reference)
            part[lane] = power
            lanes[lane] += power
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total


@_compiled
def soften(tile: FloatArray, scale: Any, visible: Array, references: Array, totals: Array) -> None:
    """tile[r, j] = 2 ** (tile[r, j] * scale - references[r]), 0 from column visible[r] on.

    tile        float32 [rows, columns], columns a multiple of LANES, read and written
    scale       float32, log2(e) / sqrt(head_dim)
    visible     int64 [rows], clipped to the tile
    references  float64 [rows], written: the row's largest scaled score in this tile, -inf if it sees none
    totals      float64 [rows], written: the row's sum afterwards; NaN if any visible score is
    """
    lanes = np.empty(LANES, np.float32)
    for r in range(tile.shape[0]):
        row = tile[r]
        limit = min(max(visible[r], 0), row.size)
        if limit == 0:
            row[:] = _ZERO
            references[r] = -np.inf
            totals[r] = 0.0
            continue
        row[limit:] = -np.inf
        reference = _row_max(row, lanes) * scale
        references[r] = reference
        totals[r] = _row_exp2(row, scale, reference, lanes)


@_compiled
def add_votes(tile: FloatArray, weights: FloatArray, sums: FloatArray) -> None:
    """sums[j] += sum over rows of weights[r] * tile[r, j]; rows a multiple of ROW_BLOCK."""
    for r in range(0, tile.shape[0], ROW_BLOCK):
        a, b, c, d = tile[r], tile[r + 1], tile[r + 2], tile[r + 3]
        e, f, g, h = tile[r + 4], tile[r + 5], tile[r + 6], tile[r + 7]
        w = weights[r : r + ROW_BLOCK]
        w0, w1, w2, w3, w4, w5, w6, w7 = w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
        for j in range(sums.size):
            low = (a[j] * w0 + b[j] * w1) + (c[j] * w2 + d[j] * w3)
            high = (e[j] * w4 + f[j] * w5) + (g[j] * w6 + h[j] * w7)
            sums[j] += low + high


@_compiled
def raise_votes(tile: FloatArray, weights: FloatArray, peaks: FloatArray) -> None:
    """peaks[j] = max of itself and weights[r] * tile[r, j] over rows."""
    for r in range(tile.shape[0]):
        row, weight = tile[r], weights[r]
        for j in range(peaks.size):
            peaks[j] = max(peaks[j], row[j] * weight)


@_compiled
def gather_rows(words: Array, starts: Array, rows: Array) -> None:
    """rows[i] = the row of words that begins at starts[i].

    words   unsigned [any], one layer's flat plane
    starts  int64 [count]
    rows    [count, head_dim] of the same words, written
    """
    for i in range(starts.size):
        row = rows[i]
        source = words[starts[i] : starts[i] + row.size]  # a slice: indices known positive vectorise
        for d in range(row.size):
            row[d] = source[d]


@_compiled
def move_slots(words: Array, sources: Array, goals: Array, kept: IntArray, head_dim: int) -> None:
    """Slot c of head h takes the words of slot kept[h, c]. Ascending: nothing still needed is overwritten.

    words    unsigned [any], one layer's flat plane, read and written
    sources  int64 [length], the word at which each slot's token starts
    goals    int64 [count or more], the same for the slots written
    kept     int32 [kv_heads, count], ascending
    """
    heads, count = kept.shape
    for c in range(count):
        for h in range(heads):
            start, goal = sources[kept[h, c]] + h * head_dim, goals[c] + h * head_dim
            source, target = words[start : start + head_dim], words[goal : goal + head_dim]
            for d in range(head_dim):
                target[d] = source[d]


@_compiled
def gather_bfloat16(words: Array, starts: Array, rows: Array) -> None:
    """As `gather_rows` from uint16 words, widened on the way: rows are uint32, the bits of float32."""
    for i in range(starts.size):
        row = rows[i]
        source = words[starts[i] : starts[i] + row.size]
        for d in range(row.size):
            row[d] = np.uint32(source[d]) << np.uint32(16)


_HALF_REBIAS = np.float32(2.0**112)
_HALF_INFINITE = np.float32(65536.0)  # what exponent 31 reads as; finite halves are below


@_compiled
def widen_float16(stored: Array, values: FloatArray) -> None:
    """values (float32) = stored (uint16 bits of float16), exactly; both flat."""
    for i in range(stored.size):
        half = np.uint32(stored[i])
        magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * _HALF_REBIAS
        bits = np.float32(magnitude).view(np.uint32)
        if magnitude >= _HALF_INFINITE:
            bits = np.uint32(bits | np.uint32(0x7F800000))
        sign = np.uint32((half & np.uint32(0x8000)) << np.uint32(16))
        values[i] = np.uint32(bits | sign).view(np.float32)


@_compiled
def widen_by_table(stored: Array, table: FloatArray, values: FloatArray) -> None:
    """values = table[stored]; flat."""
    for i in range(stored.size):
        values[i] = table[stored[i]]


@_compiled
def average_pool(votes: FloatArray, kernel: int, pooled: FloatArray) -> None:
    """pooled[h, j] = sum of votes within kernel // 2 of j, over kernel; zeros outside; summed in float64."""
    heads, count = votes.shape
    half = kernel // 2
    sums = np.empty(count, np.float64)
    for h in range(heads):
        row = votes[h]
        sums[:] = 0.0
        for shift in range(-half, half + 1):
            for j in range(max(0, -shift), min(count, count - shift)):
                sums[j] += row[j + shift]
        for j in range(count):
            pooled[h, j] = sums[j] / kernel


@_compiled
def max_pool(votes: FloatArray, kernel: int, pooled: FloatArray) -> None:
    """pooled[h, j] = largest of the votes within kernel // 2 of j."""
    heads, count = votes.shape
    half = kernel // 2
    for h in range(heads):
        row, best = votes[h], pooled[h]
        best[:] = row
        for shift in range(-half, half + 1):
            for j in range(max(0, -shift), min(count, count - shift)):
                best[j] = max(best[j], row[j + shift])
