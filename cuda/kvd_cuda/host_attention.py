"""Tiled attention of a few query rows over one kv head's keys, with a bounded workspace.

Scores of one kv head are computed in tiles of TILE_SLOTS columns: gather keys through the block table into
float32, one GEMM of all the group's rows (G folded into rows: no key is repeated), then exp2 against the
tile's own row maximum, in place. Softened tiles stay in a store; once all maxima and sums are known, one
weighted sum of each tile's rows gives the votes: one GEMM and one exp per score, where two passes need two.
Rows that would overflow the store are split; tiles that still do not fit are computed a second time.
Both change no bit: each tile is computed alike whichever way the work is cut.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvd_cuda.backend import LSE_TOLERANCE, NAN_SCORES, WRONG_LSE
from kvd_cuda.dtypes import FP8_TABLE, Array, DoubleArray, FloatArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host_kernels import (
    add_votes,
    gather_bfloat16,
    gather_rows,
    raise_votes,
    soften,
    widen_by_table,
    widen_float16,
)
from kvd_cuda.planes import WORDS, FlatPlane

TILE_SLOTS = 1024  # columns of a tile: 128 rows of it (512 KiB) and its keys (512 KiB) stay in a core's L2
ROW_STEP = 16  # rows of a GEMM are a multiple: from 16 on its bits do not depend on the number of rows
MIN_ROWS = 64  # rows below which a narrower GEMM costs more than computing tiles twice
LOG2_E = 1.4426950408889634


def padded_length(length: int) -> int:
    """`length` rounded up to whole tiles."""
    return -(-length // TILE_SLOTS) * TILE_SLOTS


@dataclass(frozen=True)
class KeyColumn:
    """Keys of one layer and kv head.

    starts  int64 [length]: the word of `plane` at which each slot's key begins
    """

    plane: FlatPlane
    starts: Array
    dtype: str


@dataclass(frozen=True)
class QueryRows:
    """Query rows of one kv head's group.

    values   float32 [rows, head_dim]
    visible  int64 [rows], leading slots that each may see
    lse      float64 [rows], natural log-sum-exp of each row's scores, or None
    """

    values: FloatArray
    visible: Array
    lse: DoubleArray | None = None

    def padded(self) -> "QueryRows":
        """Rows up to a multiple of ROW_STEP; the added ones see nothing and so weigh nothing."""
        extra = -len(self.values) % ROW_STEP
        lse = None if self.lse is None else np.pad(self.lse, (0, extra))
        return QueryRows(np.pad(self.values, ((0, extra), (0, 0))), np.pad(self.visible, (0, extra)), lse)

    def part(self, start: int, stop: int) -> "QueryRows":
        """Rows [start, stop)."""
        lse = None if self.lse is None else self.lse[start:stop]
        return QueryRows(self.values[start:stop], self.visible[start:stop], lse)


@dataclass(frozen=True)
class Votes:
    """Where attention is collected.

    sums   float32 [padded_length(N)], attention summed over rows; zeros at first
    peaks  the same shape, its maximum over rows, or None when nobody asks
    """

    sums: FloatArray
    peaks: FloatArray | None

    def add(self, tile_index: int, tile: FloatArray, weights: FloatArray) -> None:
        """Collect one softened tile [rows, TILE_SLOTS] whose rows weigh `weights`."""
        columns = slice(tile_index * TILE_SLOTS, (tile_index + 1) * TILE_SLOTS)
        add_votes(tile, weights, self.sums[columns])
        if self.peaks is not None:
            raise_votes(tile, weights, self.peaks[columns])


class TiledAttention:
    """Collects attention over key columns; owns the tile buffers, so one instance serves one thread.

    `on_step` is called before every tile.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._store = np.empty(0, np.float32)
        self._keys = np.empty((TILE_SLOTS, 0), np.float32)

    def collect(self, column: KeyColumn, rows: QueryRows, votes: Votes, store_bytes: int) -> None:
        """Add softmax attention of `rows` over the slots they see to `votes`; KernelInputError on NaN."""
        padded = rows.padded()
        tile_count = -(-int(rows.visible.max()) // TILE_SLOTS)
        row_count = _rows_at_once(len(padded.values), tile_count, store_bytes)
        for start in range(0, len(padded.values), row_count):
            part = padded.part(start, start + row_count)
            work = _Rows(self, column, part, tile_count, store_bytes)
            for tile_index, tile, weights in work.softened():
                votes.add(tile_index, tile, weights)

    def load_keys(self, column: KeyColumn, tile_index: int, head_dim: int) -> FloatArray:
        """float32 [TILE_SLOTS, head_dim] of the tile's keys; rows past the end keep old, finite values."""
        self._on_step()
        if self._keys.shape[1] != head_dim:
            self._keys = np.zeros((TILE_SLOTS, head_dim), np.float32)
        starts = column.starts[tile_index * TILE_SLOTS : (tile_index + 1) * TILE_SLOTS]
        _load_rows(column, starts, self._keys)
        return self._keys

    def store(self, tile_count: int, rows: int, store_bytes: int) -> FloatArray:
        """Room for `tile_count` tiles of `rows` rows: [tile_count, rows, TILE_SLOTS]; kept for the next."""
        size = tile_count * rows * TILE_SLOTS
        if size > self._store.size or self._store.nbytes > store_bytes:
            roomy = min(1 << (size - 1).bit_length(), store_bytes // 4)
            self._store = np.empty(max(size, roomy), np.float32)
        return self._store[:size].reshape(tile_count, rows, TILE_SLOTS)


class _Rows:
    """One set of rows on its way over all tiles."""

    def __init__(
        self, owner: TiledAttention, column: KeyColumn, rows: QueryRows, tile_count: int, store_bytes: int
    ) -> None:
        row_count, head_dim = rows.values.shape
        self._owner, self._column, self._rows = owner, column, rows
        self._scale = np.float32(LOG2_E / np.sqrt(head_dim))
        self._queries = torch.from_numpy(rows.values)
        self._references = np.full((tile_count, row_count), -np.inf)
        self._totals = np.zeros((tile_count, row_count))
        fitting = store_bytes // (row_count * TILE_SLOTS * 4)
        # With the rows' log-sum-exp known, each tile is finished at once and one tile of room is enough.
        self._stored = 0 if rows.lse is not None else min(tile_count, max(fitting - 1, 0))
        self._tiles = owner.store(self._stored + 1, row_count, store_bytes)

    def softened(self) -> Iterator[tuple[int, FloatArray, FloatArray]]:
        """Each tile index with its softened scores and the rows' weights."""
        if self._rows.lse is not None:
            yield from self._softened_by_lse(self._rows.lse)
            return
        for index in range(len(self._totals)):
            self._soften(index)
        base = self._log2_sum_exp()
        for index in range(len(self._totals)):
            tile = self._tiles[index] if index < self._stored else self._soften(index)
            yield index, tile, self._weights(index, base)

    def _softened_by_lse(self, lse: DoubleArray) -> Iterator[tuple[int, FloatArray, FloatArray]]:
        base = lse * LOG2_E
        attention = np.zeros(len(base))
        for index in range(len(self._totals)):
            tile = self._soften(index)
            weights = self._weights(index, base)
            attention += self._totals[index] * weights
            yield index, tile, weights
        _refuse_nan(self._totals)
        if not (np.abs(attention - 1)[self._sees_something] <= LSE_TOLERANCE).all():
            raise KernelInputError(WRONG_LSE)

    def _log2_sum_exp(self) -> DoubleArray:
        _refuse_nan(self._totals)
        highest = np.where(self._sees_something, self._references.max(axis=0), 0.0)
        total = (self._totals * np.exp2(self._references - highest)).sum(axis=0)
        return highest + np.log2(np.where(self._sees_something, total, 1.0))

    @property
    def _sees_something(self) -> Array:
        seen: Array = self._rows.visible > 0
        return seen

    def _weights(self, index: int, base: DoubleArray) -> FloatArray:
        with np.errstate(over="ignore", invalid="ignore"):  # a wrong lse is told by the rows' sums
            weights: FloatArray = np.exp2(self._references[index] - base).astype(np.float32)
        return weights

    def _soften(self, index: int) -> FloatArray:
        tile: FloatArray = self._tiles[min(index, self._stored)]
        keys = self._owner.load_keys(self._column, index, self._queries.shape[1])
        torch.mm(self._queries, torch.from_numpy(keys).t(), out=torch.from_numpy(tile))
        visible = self._rows.visible - index * TILE_SLOTS
        soften(tile, self._scale, visible, self._references[index], self._totals[index])
        return tile


def _rows_at_once(rows: int, tile_count: int, store_bytes: int) -> int:
    """All rows if their tiles fit the store, else as many as fit but not fewer than MIN_ROWS."""
    fitting = store_bytes // ((tile_count + 1) * TILE_SLOTS * 4)
    return min(rows, max(fitting - fitting % ROW_STEP, MIN_ROWS))


def _refuse_nan(values: DoubleArray) -> None:
    if not np.isfinite(values).all():
        raise KernelInputError(NAN_SCORES)


def _load_rows(column: KeyColumn, starts: Array, rows: FloatArray) -> None:
    """rows[i] = float32 of the key at starts[i]."""
    words = column.plane.words
    if column.dtype == "float32":
        gather_rows(words, starts, rows.view(np.uint32))
        return
    if column.dtype == "bfloat16":
        gather_bfloat16(words, starts, rows.view(np.uint32))
        return
    stored = np.empty((len(starts), rows.shape[1]), WORDS[words.itemsize])
    gather_rows(words, starts, stored)
    flat, values = stored.reshape(-1), rows.reshape(-1)
    if column.dtype == "float16":
        widen_float16(flat, values)
    else:
        widen_by_table(flat, FP8_TABLE, values)
