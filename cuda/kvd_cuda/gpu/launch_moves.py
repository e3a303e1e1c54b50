"""Moving, rotating and accumulating slots of a lease, and whole blocks: grids and arguments."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvd_cuda.gpu import blocks, compaction, observe, rope
from kvd_cuda.gpu.device_lease import Columns, DeviceLease, Launch
from kvd_cuda.gpu.elements import ITEM_BYTES
from kvd_cuda.gpu.kernel import Kernel

COLUMN_BLOCKS = 64  # thread blocks a column moved out of place
COPY_PARTS = 8  # thread blocks a copied or scrubbed block


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """Slots kept int32 [columns, count] to blocks goal int32, both by address.

    in_place  the goal's blocks are the first ones of the lease
    """

    columns: Columns
    goal: int
    kept: int
    count: int
    in_place: bool


def compact(lease: DeviceLease, move: Compaction) -> Iterator[Launch]:
    """K, V, positions and scores of the kept slots of some columns to the goal."""
    columns, grid = move.columns, move.columns.grid(1 if move.in_place else COLUMN_BLOCKS)
    for plane in (lease.k, lease.v):
        head_bytes = plane.head_dim * ITEM_BYTES[lease.dtype]
        sizes = (move.count, head_bytes, lease.block_size, plane.block_bytes)
        shape = compaction.MoveShape(*sizes, lease.kv_heads, columns.head)
        kernel = compaction.compact_kernel(word_bytes(plane.alignment, head_bytes))
        places = (lease.bases(plane, columns), lease.table, move.goal, move.kept)
        yield Launch(kernel, grid, (*places, *shape))
    sidecar = compaction.SidecarShape(
        kept=move.count,
        block_size=lease.block_size,
        explicit=lease.compressed_length,
        observed=lease.observed_length,
        age=lease.position - lease.length,
        columns=lease.columns.count,
        kv_heads=lease.kv_heads,
    )
    both = (lease.sidecar(lease.positions, columns), lease.sidecar(lease.scores, columns))
    arguments = (*both, lease.table, move.goal, move.kept, *sidecar)
    yield Launch(compaction.sidecar_kernel(), columns.grid(1), arguments)


def word_bytes(*sizes: int) -> int:
    """The widest word that divides all sizes."""
    return next(word for word in compaction.WORDS if all(size % word == 0 for size in sizes))


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Addresses of what a rotation needs: slots int32, turns float64 [pairs, 2], originals or 0."""

    slots: int
    slot_count: int
    turns: int
    pairs: int
    style: str
    originals: int = 0


def rotate(lease: DeviceLease, columns: Columns, rotation: Rotation) -> Launch:
    """Keys of the rotation's slots turn, in all kv heads of the columns' layers."""
    assert (columns.head, columns.heads) == (0, lease.kv_heads), "whole layers"
    kernel = rope.rotate_kernel(lease.dtype, rotation.style, rotation.originals != 0)
    shape = rope.RotateShape(
        rotation.slot_count, rotation.pairs, lease.k.head_dim, lease.block_size, lease.k.block_bytes
    )
    work = rotation.slot_count * (lease.k.head_dim - rotation.pairs)
    bases = lease.bases(lease.k, columns)
    arguments = (bases, rotation.originals, lease.table, rotation.slots, rotation.turns, *shape)
    return Launch(kernel, columns.grid(-(-work // rope.THREADS)), arguments)


def accumulate(lease: DeviceLease, columns: Columns, scored: tuple[int, int], sums: int) -> Launch:
    """lease.scores += sums float32 [layers, heads, end].

    scored  (end, observed): slots from `observed` on start at 0
    """
    return _by_slot(observe.accumulate_kernel(), lease, columns, scored, sums)


def gather_scores(lease: DeviceLease, columns: Columns, dense: int) -> Launch:
    """lease.scores in slot order: float32 [layers, heads, length]."""
    scored = (lease.length, lease.observed_length)
    return _by_slot(observe.gather_scores_kernel(), lease, columns, scored, dense)


def _by_slot(
    kernel: Kernel, lease: DeviceLease, columns: Columns, scored: tuple[int, int], dense: int
) -> Launch:
    shape = observe.ObserveShape(*scored, lease.block_size, lease.columns.count, lease.kv_heads)
    arguments = (lease.sidecar(lease.scores, columns), lease.table, dense, *shape)
    return Launch(kernel, columns.grid(-(-scored[0] // observe.THREADS)), arguments)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Planes of equal size whose blocks are copied or scrubbed; alignment as in Plane."""

    bases: int
    planes: int
    block_bytes: int
    stride: int
    alignment: int

    def grid(self, count: int) -> tuple[int, int, int]:
        """For `count` blocks."""
        return (COPY_PARTS, count, self.planes)


def copy_blocks(planes: Blocks, sources: int, goals: int, count: int) -> Launch:
    """Blocks `sources` to blocks `goals`: addresses of int32 [count]."""
    kernel = blocks.copy_kernel(word_bytes(planes.alignment, planes.block_bytes, planes.stride))
    arguments = (planes.bases, sources, goals, planes.block_bytes, planes.stride)
    return Launch(kernel, planes.grid(count), arguments)


def scrub_blocks(planes: Blocks, ids: int, count: int, pattern: int) -> Launch:
    """Fill blocks int32 [count] at `ids` with a 32-bit pattern."""
    arguments = (planes.bases, ids, planes.block_bytes, planes.stride, pattern)
    return Launch(blocks.scrub_kernel(), planes.grid(count), arguments)
