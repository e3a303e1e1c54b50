"""The backend for CPU memory: Numba loops and torch's float32 GEMM, one thread, bounded workspace."""

from collections.abc import Iterator

import numpy as np

from kvd_cuda.backend import Backend, BlockRanks, TokenSelection, check_compaction
from kvd_cuda.dtypes import Array, FloatArray, IntArray, from_float32, to_float32
from kvd_cuda.host_attention import Votes, padded_length
from kvd_cuda.host_kernels import move_slots
from kvd_cuda.host_scoring import HostScoring, slot_starts
from kvd_cuda.host_selection import distinct_tokens, expected_tokens, heavy_tokens, rank_blocks, top_tokens
from kvd_cuda.plan import CompressPlan, Rope
from kvd_cuda.planes import KVPlanes, flat_plane
from kvd_cuda.queries import WindowQueries
from kvd_cuda.rope import rotate

OBSERVE_ROWS = 128  # query rows (tokens x group) of one tile of `observe`


class HostBackend(HostScoring, Backend):
    """Implements `kvd_cuda.backend.Backend`. Not shared between threads: it owns its buffers.

    Temporaries stay under `workspace_bytes` for leases up to a million slots; results do not depend on it.
    `on_step` is called between steps: a tile of scores, one layer's keys or values to move.
    """

    def top_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """See Backend."""
        return top_tokens(self, planes, plan, queries)

    def rank_blocks(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> BlockRanks:
        """See Backend."""
        return rank_blocks(self, planes, plan, queries)

    def heavy_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """See Backend."""
        return heavy_tokens(planes, plan, recent)

    def distinct_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """See Backend."""
        return distinct_tokens(self, planes, plan, recent)

    def expected_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """See Backend."""
        return expected_tokens(self, planes, plan, queries)

    def observe(self, planes: KVPlanes, queries: WindowQueries) -> None:
        """See Backend. Tiled by rows: no [heads, queries, length] tensor exists.

        NaN keys or queries are found head by head: heads before them have been added to.
        """
        queries.check(planes)
        queries.check_finite()
        for column in _columns(planes):
            total = planes.slot_scores(*column) + self._observed(planes, queries, column)
            _write_slots(planes.scores, planes.used_table, column, total)

    def compact(self, planes: KVPlanes, kept: IntArray, destination: IntArray) -> None:
        """See Backend. One ascending sweep a layer, K then V."""
        check_compaction(planes, kept, destination)
        for layer in range(planes.layers):
            for plane in (planes.k[layer], planes.v[layer]):
                self._on_step()
                sources = slot_starts(plane, planes.block_table, planes.length)
                goals = slot_starts(plane, destination, kept.shape[2])
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

    def _observed(self, planes: KVPlanes, queries: WindowQueries, column: tuple[int, int]) -> FloatArray:
        """Attention of all `queries` to one (layer, kv head), a few query tokens at a time."""
        votes = Votes(np.zeros(padded_length(planes.length), np.float32), None)
        step = max(1, OBSERVE_ROWS * planes.kv_heads // queries.values.shape[2])
        for start in range(0, queries.count, step):
            stop = min(start + step, queries.count)
            end = planes.length - queries.count + stop
            self.collect(planes, queries.part(start, stop), column, end, votes)
        return votes.sums[: planes.length]


def _columns(planes: KVPlanes) -> Iterator[tuple[int, int]]:
    for layer in range(planes.layers):
        for kv_head in range(planes.kv_heads):
            yield layer, kv_head


def _write_slots(sidecar: Array, table: IntArray, column: tuple[int, int], values: Array) -> None:
    """sidecar[block, layer, kv_head, offset] = values, slot by slot."""
    block_size = sidecar.shape[3]
    slots = np.arange(values.size)
    sidecar[table[slots // block_size], column[0], column[1], slots % block_size] = values
