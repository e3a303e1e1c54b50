"""KeyDiff over some columns of a lease: kernels, grids and arguments."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvd_cuda.gpu import keydiff
from kvd_cuda.gpu.device_lease import Columns, DeviceLease, Launch
from kvd_cuda.gpu.scores import SEGMENT


@dataclass(frozen=True, kw_only=True)
class Distinctness:
    """Addresses of its buffers.

    scales   float64 [columns, length]
    parts    float64 [columns, segments, head_dim]
    anchors  float64 [columns, head_dim]
    scores   float32 [columns, length]
    """

    scales: int
    parts: int
    anchors: int
    scores: int


def segments_of(lease: DeviceLease) -> int:
    """Thread blocks that sum up one column."""
    return -(-lease.length // SEGMENT)


def distinctness(lease: DeviceLease, columns: Columns, room: Distinctness) -> Iterator[Launch]:
    """Scores into room.scores; a column with NaN keys has NaN in its anchor."""
    task = keydiff.KeyTask(
        key_bases=lease.bases(lease.k, columns),
        table=lease.table,
        end=lease.length,
        kv_heads=lease.kv_heads,
        first_head=columns.head,
        head_dim=lease.k.head_dim,
        block_size=lease.block_size,
        block_bytes=lease.k.block_bytes,
    )
    by_slot, segments = columns.grid(-(-lease.length // keydiff.THREADS)), segments_of(lease)
    yield Launch(keydiff.scales_kernel(lease.dtype), by_slot, (*task, room.scales))
    sums = (*task, room.scales, room.parts)
    yield Launch(keydiff.parts_kernel(lease.dtype), columns.grid(segments), sums)
    sizes = (segments, lease.k.head_dim)
    yield Launch(keydiff.anchors_kernel(), columns.grid(1), (room.parts, room.anchors, *sizes))
    places = (room.scales, room.anchors, room.scores)
    yield Launch(keydiff.distinctness_kernel(lease.dtype), by_slot, (*task, *places))
