"""The backend for a GPU: CUDA kernels on the pool's own memory.

K, V and queries stay where they are. Votes live in scratch memory of a fixed size; of a lease that is too
long for it some columns are done after the other, which changes no result. What crosses the bus is what was
decided: 4 bytes a kept slot and column, out (a selection is complete before anything moves) and in again.

Positions and accumulated scores (the sidecar) are host memory that workers map and the daemon hands out with
the pool. Here it is registered with the driver, and kernels read and write it over the bus where it lies:
there is one copy, so nothing can be out of date, and a killed worker leaves nothing to be written back. A
compression touches some 20 bytes of it a kept slot, beside hundreds of K and V. The price: its pages, 1 to
2 % of a usual pool's bytes, are taken and pinned as soon as the pool is mapped.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvd_cuda.backend import (
    NAN_KEYS,
    NO_EXPECTED,
    NOT_FINITE,
    Backend,
    BlockRanks,
    TokenSelection,
    check_compaction,
)
from kvd_cuda.dtypes import DoubleArray, IntArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.gpu.device import KernelDevice, rounded
from kvd_cuda.gpu.device_lease import Columns, DeviceLease
from kvd_cuda.gpu.launch_choice import block_masses, mass, rank_blocks, rank_tokens, select
from kvd_cuda.gpu.launch_keydiff import Distinctness, distinctness, segments_of
from kvd_cuda.gpu.launch_moves import Compaction, Rotation, accumulate, compact, gather_scores, rotate
from kvd_cuda.gpu.placing import DeviceSidecar, Needs, column_groups, place
from kvd_cuda.gpu.scratch_queries import ScratchQueries
from kvd_cuda.gpu.selection import SelectShape
from kvd_cuda.gpu.voting import Electorate, refuse_long_keys
from kvd_cuda.plan import CompressPlan, Rope
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries

OBSERVE_ROWS = 512  # query rows (tokens x group) of one launch of `observe`
INT_BYTES, FLOAT_BYTES, DOUBLE_BYTES = 4, 4, 8


class CudaBackend(Backend):
    """Implements `kvd_cuda.backend.Backend` for leases of one pool, whose planes are GPU memory (`place`).

    Queries are `ScratchQueries`. Raises CudaError when the GPU fails: what was under way is undefined then.
    """

    def __init__(self, device: KernelDevice, sidecar: DeviceSidecar) -> None:
        """Several may share `device`, one after the other."""
        self._device = device
        self.sidecar = sidecar

    def top_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """See Backend."""
        voters, chosen = self._electorate(planes, queries), _Chosen(planes, plan)
        shape = SelectShape(voters.candidates, plan.sinks, voters.candidates, planes.length, chosen.count)
        needs = voters.needs(slot_floats=2)
        for columns in self._groups(planes, Needs(needs.column + DOUBLE_BYTES, needs.layer)):
            seen = voters.attention(columns)
            _, pooled = voters.votes(seen, plan)
            kept, masses = self._select(columns, shape, (pooled, seen.sums))
            seen.check(self._device)
            chosen.take(self._device, columns, (kept, masses), 1 / (voters.group * queries.count))
        return chosen.selection()

    def rank_blocks(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> BlockRanks:
        """See Backend."""
        voters, device = self._electorate(planes, queries), self._device
        count = voters.lease.block_count
        ranks, block_ranks = device.room(voters.end, np.float64), device.room(count)
        found = np.zeros((planes.layers, count))
        needs = voters.needs(slot_floats=1)
        by_block = Needs(needs.column, needs.layer + DOUBLE_BYTES * count)
        for number, columns in enumerate(self._groups(planes, by_block)):
            seen = voters.attention(columns)
            if voters.candidates:
                device.run(rank_tokens(*voters.votes(seen, plan), ranks, begun=number > 0))
            masses = device.room(columns.layers * count, np.float64)
            device.run(block_masses(voters.lease, columns, seen.sums, masses))
            seen.check(device)
            part = device.get(masses, (columns.layers, count), np.float64)
            found[columns.layer : columns.layer + columns.layers] += part
        device.run(rank_blocks(voters.lease, voters.candidates, ranks, block_ranks))
        found /= planes.kv_heads * voters.group * queries.count
        return BlockRanks(device.get(block_ranks, (count,)), found)

    def heavy_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """See Backend."""
        lease, chosen, device = self._begin(planes), _Chosen(planes, plan), self._device
        shape = SelectShape(planes.length, plan.sinks, planes.length - recent, planes.length, chosen.count)
        column = FLOAT_BYTES * planes.length + INT_BYTES * chosen.count + 2 * DOUBLE_BYTES
        for columns in self._groups(planes, Needs(column)):
            scores, totals_at = (
                device.room(columns.count * planes.length),
                device.room(columns.count, np.float64),
            )
            device.run(gather_scores(lease, columns, scores))
            device.run(mass(columns.count, (planes.length, planes.length), (scores, 0, totals_at)))
            kept, masses = self._select(columns, shape, (scores, scores))
            totals = device.get(totals_at, (columns.count,), np.float64)
            if not np.isfinite(totals).all():
                raise KernelInputError(NOT_FINITE)
            chosen.take(device, columns, (kept, masses), 1 / np.maximum(totals, np.finfo(np.float64).tiny))
        return chosen.selection()

    def distinct_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """See Backend."""
        lease, chosen, device = self._begin(planes), _Chosen(planes, plan), self._device
        refuse_long_keys(lease)
        shape = SelectShape(planes.length, plan.sinks, planes.length - recent, planes.length, chosen.count)
        dim, segments = lease.k.head_dim, segments_of(lease)
        column = (
            3 * FLOAT_BYTES * planes.length + DOUBLE_BYTES * dim * (segments + 1) + INT_BYTES * chosen.count
        )
        for columns in self._groups(planes, Needs(column)):
            room = Distinctness(
                scales=device.room(columns.count * planes.length, np.float64),
                parts=device.room(columns.count * segments * dim, np.float64),
                anchors=device.room(columns.count * dim, np.float64),
                scores=device.room(columns.count * planes.length),
            )
            kept = device.room(columns.count * chosen.count, np.int32)
            device.run(distinctness(lease, columns, room))
            device.run(select(columns.count, shape, room.scores, kept))
            if not np.isfinite(device.get(room.anchors, (columns.count, dim), np.float64)).all():
                raise KernelInputError(NAN_KEYS)
            chosen.take_kept(device, columns, kept)
        return TokenSelection(chosen.kept, None)

    def expected_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """See Backend."""
        raise KernelInputError(NO_EXPECTED)

    def observe(self, planes: KVPlanes, queries: WindowQueries) -> None:
        """See Backend. NaN is found group by group: columns before have been added to."""
        assert isinstance(queries, ScratchQueries), "queries on the GPU"
        queries.check(planes)
        lease, before = self._begin(planes), planes.length - queries.count
        step = max(1, OBSERVE_ROWS * planes.kv_heads // queries.values.shape[2])
        longest = Electorate(self._device, lease, queries.part(0, min(step, queries.count)), planes.length)
        for columns in self._groups(planes, longest.needs()):
            mark, observed = self._device.mark(), planes.observed_length
            for start in range(0, queries.count, step):
                self._device.rewind(mark)
                part = queries.part(start, min(start + step, queries.count))
                voters = Electorate(self._device, lease, part, before + start + part.count)
                seen = voters.attention(columns)
                seen.check(self._device)
                self._device.run(accumulate(lease, columns, (voters.end, observed), seen.sums))
                observed = max(observed, voters.end)
        self._device.finish()

    def compact(self, planes: KVPlanes, kept: IntArray, destination: IntArray) -> None:
        """See Backend."""
        in_place = check_compaction(planes, kept, destination)
        lease, device = self._begin(planes), self._device
        goal, count = device.put(destination.astype(np.int32)), kept.shape[2]
        for columns in self._groups(planes, Needs(INT_BYTES * count)):
            part = device.put(kept[_of(columns)].astype(np.int32))
            move = Compaction(columns=columns, goal=goal, kept=part, count=count, in_place=in_place)
            device.run(compact(lease, move))
            device.finish()

    def rotate_keys(self, planes: KVPlanes, slots: IntArray, delta: int, rope: Rope) -> None:
        """See Backend. Angles are float64."""
        rope.check(planes, slots.size)
        if slots.size == 0:
            return
        lease, device = self._begin(planes), self._device
        angles = delta * rope.inv_freq
        turns = device.put(np.stack([np.cos(angles), np.sin(angles)], axis=1))
        rotation = partial(Rotation, slot_count=slots.size, turns=turns, pairs=angles.size, style=rope.style)
        where = device.put(slots.astype(np.int32))
        original_bytes = 0 if rope.originals is None else rope.originals[0].nbytes
        for layers in self._groups(planes, Needs(1, rounded(original_bytes) + DOUBLE_BYTES)):
            originals = self._originals(rope, layers)
            device.run(rotate(lease, layers, rotation(slots=where, originals=originals)))
            device.finish()

    def _originals(self, rope: Rope, layers: Columns) -> int:
        """Where the keys to rotate from are, by layer; 0 if they are those in the pool."""
        if rope.originals is None:
            return 0
        chosen = rope.originals[layers.layer : layers.layer + layers.layers]
        return self._device.put(np.array([self._device.put(keys) for keys in chosen], np.uint64))

    def _begin(self, planes: KVPlanes) -> DeviceLease:
        """The lease's addresses; all scratch memory but theirs is free."""
        self._device.rewind()
        return place(self._device, planes, self.sidecar)

    def _electorate(self, planes: KVPlanes, queries: WindowQueries) -> Electorate:
        assert isinstance(queries, ScratchQueries), "queries on the GPU"
        queries.check(planes)
        return Electorate(self._device, self._begin(planes), queries, planes.length)

    def _groups(self, planes: KVPlanes, needs: Needs) -> Iterator[Columns]:
        """Each has the scratch memory for itself that is free when the first is asked for."""
        mark = self._device.mark()
        for columns in column_groups(self._device.room_bytes, planes, needs):
            self._device.rewind(mark)
            yield columns

    def _select(self, columns: Columns, shape: SelectShape, rows: tuple[int, int]) -> tuple[int, int]:
        """Kept slots int32 [columns, kept] of the best of rows[0], and float64 sums of rows[1] over them."""
        kept = self._device.room(columns.count * shape.kept, np.int32)
        masses = self._device.room(columns.count, np.float64)
        self._device.run(select(columns.count, shape, rows[0], kept))
        self._device.run(mass(columns.count, (shape.length, shape.kept), (rows[1], kept, masses)))
        return kept, masses


def _of(columns: Columns) -> tuple[slice, slice]:
    layers = slice(columns.layer, columns.layer + columns.layers)
    return layers, slice(columns.head, columns.head + columns.heads)


class _Chosen:
    """What was kept so far."""

    def __init__(self, planes: KVPlanes, plan: CompressPlan) -> None:
        self.count = plan.target_tokens
        self.kept = np.empty((planes.layers, planes.kv_heads, self.count), np.int32)
        self._mass = np.zeros((planes.layers, planes.kv_heads))

    def take(
        self, device: KernelDevice, columns: Columns, at: tuple[int, int], scale: "float | DoubleArray"
    ) -> None:
        """Kept slots and masses of some columns, the latter to be multiplied by `scale`."""
        self.take_kept(device, columns, at[0])
        masses = device.get(at[1], (columns.count,), np.float64) * scale
        self._mass[_of(columns)] = masses.reshape(columns.layers, columns.heads)

    def take_kept(self, device: KernelDevice, columns: Columns, at: int) -> None:
        """Kept slots of some columns."""
        self.kept[_of(columns)] = device.get(at, (columns.layers, columns.heads, self.count), np.int32)

    def selection(self) -> TokenSelection:
        return TokenSelection(self.kept, self._mass.mean(axis=1).astype(np.float32))
