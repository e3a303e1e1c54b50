"""The backend for CPU memory: Numba loops and torch's float32 GEMM, one thread, bounded workspace."""

from collections.abc import Callable, Iterator

import numpy as np

from kvd_cuda.backend import Backend, WindowScores
from kvd_cuda.dtypes import Array, FloatArray, IntArray, from_float32, to_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host_attention import KeyColumn, QueryRows, TiledAttention, Votes, padded_length
from kvd_cuda.host_kernels import average_pool, max_pool, move_slots
from kvd_cuda.plan import REDUCTIONS, Rope, check_pooling
from kvd_cuda.planes import HeadRange, KVPlanes, flat_plane
from kvd_cuda.queries import WindowQueries
from kvd_cuda.rope import rotate

WORKSPACE_BYTES = 38_000_000  # all temporaries; leaves 2 MB of the promised 40 for the allocator
SCORES_BYTES = 4_000_000  # of them, votes of the kv heads scored in one call
SLOT_BYTES = 32  # a slot's share of vote, mass, pooling, selection and address arrays of one kv head
MIN_STORE_BYTES = 1_000_000  # one tile of any usual group; only leases above a million slots get this little
OBSERVE_ROWS = 128  # query rows (tokens x group) of one tile of `observe`


class HostBackend(Backend):
    """Implements `kvd_cuda.backend.Backend`. Not shared between threads: it owns its buffers.

    Temporaries stay under `workspace_bytes` for leases up to a million slots; results do not depend on it.
    `on_step` is called between steps: a tile of scores, one layer's keys or values to move.
    """

    def __init__(
        self, workspace_bytes: int = WORKSPACE_BYTES, on_step: Callable[[], None] = lambda: None
    ) -> None:
        self._workspace_bytes = workspace_bytes
        self._on_step = on_step
        self._attention = TiledAttention(on_step)

    def head_ranges(self, planes: KVPlanes) -> Iterator[HeadRange]:
        """As many kv heads at once as SCORES_BYTES hold."""
        step = max(1, SCORES_BYTES // (SLOT_BYTES * max(planes.length, 1)))
        for layer in range(planes.layers):
            for start in range(0, planes.kv_heads, step):
                yield HeadRange(layer, start, min(start + step, planes.kv_heads))

    def score_window(
        self, planes: KVPlanes, queries: WindowQueries, heads: HeadRange, reduce: str
    ) -> WindowScores:
        """See Backend. Two GEMM-sized passes at most, one when the queries bring their log-sum-exp."""
        queries.check(planes)
        if reduce not in REDUCTIONS:
            raise KernelInputError(f"reduce={reduce!r}; use one of {', '.join(REDUCTIONS)}")
        votes = np.zeros((heads.count, padded_length(planes.length)), np.float32)
        mass = np.zeros_like(votes)
        group = queries.values.shape[2] // planes.kv_heads
        for row, kv_head in enumerate(range(heads.start, heads.stop)):
            seen = Votes(mass[row], votes[row] if reduce == "max" else None)
            self._collect(planes, queries, (heads.layer, kv_head), planes.length, seen)
            if reduce == "mean":
                np.multiply(mass[row], np.float32(1 / group), out=votes[row])
            mass[row] *= np.float32(1 / (group * queries.count))
        return WindowScores(votes[:, : planes.length], mass[:, : planes.length])

    def pool(self, votes: FloatArray, kernel: int, kind: str) -> FloatArray:
        """See Backend. Averages are summed in float64."""
        check_pooling(kernel, kind)
        pooled = np.empty(votes.shape, np.float32)
        (average_pool if kind == "avg" else max_pool)(votes, kernel, pooled)
        return pooled

    def select(self, scores: FloatArray, count: int) -> IntArray:
        """See Backend. Partial sort for the cut, then one scan."""
        if not 0 <= count <= scores.shape[1]:
            raise KernelInputError(f"{count} of {scores.shape[1]} slots wanted; lower target_tokens")
        return np.stack([_top(row, count) for row in scores])

    def observe(self, planes: KVPlanes, queries: WindowQueries) -> None:
        """See Backend. Tiled by rows: no [heads, queries, length] tensor exists.

        NaN keys or queries are found head by head: heads before them have been added to.
        """
        queries.check(planes)
        for column in _columns(planes):
            total = planes.slot_scores(*column) + self._observed(planes, queries, column)
            _write_slots(planes.scores, planes.used_table, column, total)

    def compact(self, planes: KVPlanes, kept: IntArray, destination: IntArray) -> None:
        """See Backend. One ascending sweep a layer, K then V."""
        _check_compaction(planes, kept, destination)
        for layer in range(planes.layers):
            for plane in (planes.k[layer], planes.v[layer]):
                self._on_step()
                sources = _slot_starts(plane, planes.block_table, planes.length)
                goals = _slot_starts(plane, destination, kept.shape[2])
                move_slots(flat_plane(plane).words, sources, goals, kept[layer], plane.shape[3])
            for kv_head in range(planes.kv_heads):
                column, chosen = (layer, kv_head), kept[layer, kv_head]
                positions, scores = planes.slot_positions(*column), planes.slot_scores(*column)
                _write_slots(planes.positions, destination, column, positions[chosen])
                _write_slots(planes.scores, destination, column, scores[chosen])

    def rotate_keys(self, planes: KVPlanes, slots: IntArray, delta: int, rope: Rope) -> None:
        """See Backend. Keys are rotated in float64, then rounded to their storage."""
        rope.check(planes, slots.size)
        blocks, offsets = planes.block_table[slots // planes.block_size], slots % planes.block_size
        for layer, plane in enumerate(planes.k):
            self._on_step()
            stored = plane[blocks, offsets] if rope.originals is None else rope.originals[layer]
            turned = rotate(to_float32(stored, planes.dtype), delta, rope.inv_freq, rope.style)
            plane[blocks, offsets] = from_float32(turned.astype(np.float32), planes.dtype)

    def _collect(
        self, planes: KVPlanes, queries: WindowQueries, column: tuple[int, int], end: int, votes: Votes
    ) -> None:
        """Attention of `queries`, the tokens of the slots before `end`, to one (layer, kv head)."""
        layer, kv_head = column
        rows = queries.folded(layer, kv_head, planes.kv_heads)
        visible = np.tile(np.arange(end - queries.count, end) + 1, len(rows) // queries.count)
        lse = queries.folded_lse(layer, kv_head, planes.kv_heads)
        starts = _slot_starts(planes.k[layer], planes.block_table, end) + kv_head * planes.head_dim_k
        keys = KeyColumn(flat_plane(planes.k[layer]), starts, planes.dtype)
        store_bytes = max(self._workspace_bytes - SCORES_BYTES - SLOT_BYTES * end, MIN_STORE_BYTES)
        self._attention.collect(keys, QueryRows(rows, visible, lse), votes, store_bytes)

    def _observed(self, planes: KVPlanes, queries: WindowQueries, column: tuple[int, int]) -> FloatArray:
        """Attention of all `queries` to one (layer, kv head), a few query tokens at a time."""
        votes = Votes(np.zeros(padded_length(planes.length), np.float32), None)
        step = max(1, OBSERVE_ROWS * planes.kv_heads // queries.values.shape[2])
        for start in range(0, queries.count, step):
            stop = min(start + step, queries.count)
            end = planes.length - queries.count + stop
            self._collect(planes, queries.part(start, stop), column, end, votes)
        return votes.sums[: planes.length]


def _columns(planes: KVPlanes) -> Iterator[tuple[int, int]]:
    for layer in range(planes.layers):
        for kv_head in range(planes.kv_heads):
            yield layer, kv_head


def _slot_starts(plane: Array, block_table: IntArray, length: int) -> Array:
    """int64 [length]: the word of `flat_plane(plane)` at which each slot's token begins."""
    block_size, token_words = plane.shape[1], plane.shape[2] * plane.shape[3]
    blocks = block_table[: -(-length // block_size)].astype(np.int64)[:, None] * (
        plane.strides[0] // plane.itemsize
    )
    starts: Array = (blocks + np.arange(block_size) * token_words).reshape(-1)[:length]
    return starts


def _write_slots(sidecar: Array, table: IntArray, column: tuple[int, int], values: Array) -> None:
    """sidecar[block, layer, kv_head, offset] = values, slot by slot."""
    block_size = sidecar.shape[3]
    slots = np.arange(values.size)
    sidecar[table[slots // block_size], column[0], column[1], slots % block_size] = values


def _top(row: FloatArray, count: int) -> IntArray:
    if count == 0:
        return np.empty(0, np.int32)
    cut = np.partition(row, row.size - count)[row.size - count]
    chosen = row > cut
    ties = np.flatnonzero(row == cut)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen).astype(np.int32)


def _check_compaction(planes: KVPlanes, kept: IntArray, destination: IntArray) -> None:
    layers, kv_heads, count = kept.shape
    assert (layers, kv_heads) == (planes.layers, planes.kv_heads), "kept must be [layers, kv_heads, C]"
    assert count, "something must be kept"
    assert 0 <= kept.min() <= kept.max() < planes.length, "kept slots must be in use"
    assert (kept[:, :, 1:] > kept[:, :, :-1]).all(), "kept slots must ascend"
    needed = -(-count // planes.block_size)
    in_place = np.array_equal(destination, planes.block_table[:needed])
    distinct = np.unique(destination).size == destination.size and destination.min() >= 0
    fits = destination.size == needed and distinct and destination.max() < planes.blocks
    if not fits or not (in_place or not np.isin(destination, planes.block_table).any()):
        raise KernelInputError(
            f"destination must be {needed} distinct blocks in [0, {planes.blocks}), disjoint from the source "
            "blocks or equal to the first of them"
        )
