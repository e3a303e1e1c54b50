"""Scoring on CPU memory: votes of a few kv heads at a time, pooled, and the largest of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvd_cuda.dtypes import Array, DoubleArray, FloatArray, IntArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.host_attention import KeyColumn, QueryRows, TiledAttention, Votes, padded_length
from kvd_cuda.host_kernels import average_pool, max_pool
from kvd_cuda.plan import REDUCTIONS, check_pooling
from kvd_cuda.planes import HeadRange, KVPlanes, flat_plane
from kvd_cuda.queries import WindowQueries

WORKSPACE_BYTES = 38_000_000  # all temporaries; leaves 2 MB of the promised 40 for the allocator
SCORES_BYTES = 4_000_000  # of them, votes of the kv heads scored in one call
SLOT_BYTES = 32  # a slot's share of vote, mass, pooling, selection and address arrays of one kv head
MIN_STORE_BYTES = 1_000_000  # one tile of any usual group; only leases above a million slots get this little


@dataclass(frozen=True)
class WindowScores:
    """What the window's queries look at, for a range of kv heads.

    votes  float32 [heads, length]: per slot, reduced over the group's heads and the queries, not pooled
    mass   float32 [heads, length]: mean attention over the same; sums to 1 over all slots, window included
    """

    votes: FloatArray
    mass: FloatArray


class HostScoring:
    """Not shared between threads: it owns its buffers. `on_step` is called for each tile of scores."""

    def __init__(
        self, workspace_bytes: int = WORKSPACE_BYTES, on_step: Callable[[], None] = lambda: None
    ) -> None:
        self._workspace_bytes = workspace_bytes
        self._on_step = on_step
        self._attention = TiledAttention(on_step)

    def step(self) -> None:
        """A step is done."""
        self._on_step()

    def head_ranges(self, planes: KVPlanes) -> Iterator[HeadRange]:
        """All kv heads of all layers, in order, as many at once as SCORES_BYTES hold."""
        step = max(1, SCORES_BYTES // (SLOT_BYTES * max(planes.length, 1)))
        for layer in range(planes.layers):
            for start in range(0, planes.kv_heads, step):
                yield HeadRange(layer, start, min(start + step, planes.kv_heads))

    def score_window(
        self, planes: KVPlanes, queries: WindowQueries, heads: HeadRange, reduce: str
    ) -> WindowScores:
        """Attention of the window's queries over all slots. `reduce`: see CompressPlan.

        Two GEMM-sized passes at most, one when the queries bring their log-sum-exp.
        """
        queries.check(planes)
        queries.check_finite()
        if reduce not in REDUCTIONS:
            raise KernelInputError(f"reduce={reduce!r}; use one of {', '.join(REDUCTIONS)}")
        votes = np.zeros((heads.count, padded_length(planes.length)), np.float32)
        mass = np.zeros_like(votes)
        group = queries.values.shape[2] // planes.kv_heads
        for row, kv_head in enumerate(range(heads.start, heads.stop)):
            seen = Votes(mass[row], votes[row] if reduce == "max" else None)
            self.collect(planes, queries, (heads.layer, kv_head), planes.length, seen)
            if reduce == "mean":
                np.multiply(mass[row], np.float32(1 / group), out=votes[row])
            mass[row] *= np.float32(1 / (group * queries.count))
        return WindowScores(votes[:, : planes.length], mass[:, : planes.length])

    def pool(self, votes: FloatArray, kernel: int, kind: str) -> FloatArray:
        """Stride 1, same length, last axis: "avg" (zeros outside count, float64 sums) or "max"."""
        check_pooling(kernel, kind)
        pooled = np.empty(votes.shape, np.float32)
        (average_pool if kind == "avg" else max_pool)(votes, kernel, pooled)
        return pooled

    def select(self, scores: FloatArray, count: int) -> IntArray:
        """Ascending indices of the `count` largest per row, ties to the lower; int32 [heads, count].

        Partial sort for the cut, then one scan.
        """
        if not 0 <= count <= scores.shape[1]:
            raise KernelInputError(f"{count} of {scores.shape[1]} slots wanted; lower target_tokens")
        return np.stack([top_of(row, count) for row in scores])

    def collect(
        self, planes: KVPlanes, queries: WindowQueries, column: tuple[int, int], end: int, votes: Votes
    ) -> None:
        """Attention of `queries`, the tokens of the slots before `end`, to one (layer, kv head)."""
        layer, kv_head = column
        rows = queries.folded(layer, kv_head, planes.kv_heads)
        visible = np.tile(np.arange(end - queries.count, end) + 1, len(rows) // queries.count)
        lse = queries.folded_lse(layer, kv_head, planes.kv_heads)
        starts = slot_starts(planes.k[layer], planes.block_table, end) + kv_head * planes.head_dim_k
        keys = KeyColumn(flat_plane(planes.k[layer]), starts, planes.dtype)
        store_bytes = max(self._workspace_bytes - SCORES_BYTES - SLOT_BYTES * end, MIN_STORE_BYTES)
        self._attention.collect(keys, QueryRows(rows, visible, lse), votes, store_bytes)


def slot_starts(plane: Array, block_table: IntArray, length: int) -> Array:
    """int64 [length]: the word of `flat_plane(plane)` at which each slot's token begins."""
    block_size, token_words = plane.shape[1], plane.shape[2] * plane.shape[3]
    blocks = block_table[: -(-length // block_size)].astype(np.int64)[:, None] * (
        plane.strides[0] // plane.itemsize
    )
    starts: Array = (blocks + np.arange(block_size) * token_words).reshape(-1)[:length]
    return starts


def top_of(row: FloatArray | DoubleArray, count: int) -> IntArray:
    """Ascending indices of the `count` largest, ties to the lower one."""
    if count == 0:
        return np.empty(0, np.int32)
    cut = np.partition(row, row.size - count)[row.size - count]
    chosen = row > cut
    ties = np.flatnonzero(row == cut)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen).astype(np.int32)
