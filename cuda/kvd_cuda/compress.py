"""Compress one lease: choose what stays, then make it so. The two halves can be called apart."""

from dataclasses import dataclass

import numpy as np

from kvd_cuda.backend import Backend, TokenSelection
from kvd_cuda.dtypes import FloatArray, IntArray
from kvd_cuda.plan import CompressPlan
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries
from kvd_cuda.selection import SELECTORS, BlockSelection, Selection


@dataclass(frozen=True)
class CompressResult:
    """What a compression did.

    planes               the lease afterwards: its table, length, and explicit positions for every slot
    mass_retained        float32 [layers] of attention kept, None where nothing was scored
    kept_block_indices   int32 indices into the source table (span_block), else None: tokens moved
    """

    planes: KVPlanes
    mass_retained: FloatArray | None
    kept_block_indices: IntArray | None

    @property
    def kept_length(self) -> int:
        """Slots in use afterwards."""
        return self.planes.length


def select(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None
) -> Selection:
    """What `plan` keeps. Reads only; raises KernelInputError for whatever cannot be done."""
    if plan.target_tokens >= planes.length:
        return _everything(planes, plan)
    if plan.rope is not None:
        plan.rope.check(planes, plan.sinks)
    if queries is not None:
        queries.check(planes)
    return SELECTORS[plan.method](backend, planes, plan, queries)


def apply(backend: Backend, planes: KVPlanes, plan: CompressPlan, selection: Selection) -> CompressResult:
    """Move (or, by block, only relabel) what was selected. Positions of all kept slots become explicit."""
    if isinstance(selection, BlockSelection):
        return _keep_blocks(planes, selection)
    kept_length = selection.kept.shape[2]
    if kept_length == planes.length:
        return CompressResult(planes, selection.mass_retained, None)
    block_count = -(-kept_length // planes.block_size)
    table = planes.block_table[:block_count] if plan.destination_table is None else plan.destination_table
    backend.compact(planes, selection.kept, table)
    after = planes.after(kept_length, table)
    if plan.rope is not None:
        _move_sinks_forward(backend, planes, after, plan)
    return CompressResult(after, selection.mass_retained, None)


def compress(
    backend: Backend, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries | None = None
) -> CompressResult:
    """Select and apply. With target_tokens >= length nothing happens and `planes` comes back as it is."""
    return apply(backend, planes, plan, select(backend, planes, plan, queries))


def _everything(planes: KVPlanes, plan: CompressPlan) -> Selection:
    whole = np.ones(planes.layers, np.float32)
    if plan.method == "span_block":
        return BlockSelection(np.arange(planes.used_table.size, dtype=np.int32), whole)
    slots = np.arange(planes.length, dtype=np.int32)
    return TokenSelection(np.broadcast_to(slots, (planes.layers, planes.kv_heads, planes.length)), whole)


def _keep_blocks(planes: KVPlanes, selection: BlockSelection) -> CompressResult:
    """Drop the other blocks from the table. Only the sidecar is written, alike for all sharers of a block."""
    kept = selection.kept_blocks
    if kept.size == planes.used_table.size:
        return CompressResult(planes, selection.mass_retained, kept)
    slots = (kept[:, None] * planes.block_size + np.arange(planes.block_size)).reshape(-1)
    slots = slots[slots < planes.length]
    implicit = slots[slots >= planes.compressed_length]
    blocks, offsets = planes.block_table[implicit // planes.block_size], implicit % planes.block_size
    positions = (implicit + (planes.position - planes.length)).astype(np.int32)
    planes.positions[blocks, :, :, offsets] = positions[:, None, None]
    after = planes.after(slots.size, planes.block_table[kept])
    return CompressResult(after, selection.mass_retained, kept)


def _move_sinks_forward(backend: Backend, before: KVPlanes, after: KVPlanes, plan: CompressPlan) -> None:
    """Rotate the sink keys next to the window: distances are then those of positions 0..C-1 (StreamingLLM).

    From the keys as first stored by all tokens ever dropped; else, by those dropped now.
    """
    assert plan.rope is not None
    start = before.length if plan.rope.originals is None else before.position
    backend.rotate_keys(after, np.arange(plan.sinks, dtype=np.int32), start - after.length, plan.rope)
