"""Which kernels do what with a lease: grids and arguments. Says what to launch; whoever has a driver does.

All layers of a lease go in one launch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvd_cuda.gpu import (
    blocks,
    compaction,
    merge,
    observe,
    pooling,
    rope,
    scores_mma,
    scores_scalar,
    selection,
)
from kvd_cuda.gpu.elements import ITEM_BYTES
from kvd_cuda.gpu.kernel import Kernel
from kvd_cuda.gpu.scores import SEGMENT, ScoreTask

LOG2_E = math.log2(math.e)
MAX_INT = 2**31 - 1  # bytes from block to block, slots, rows: they are int32 arguments
COLUMN_BLOCKS = 64  # thread blocks a column moved out of place
COPY_PARTS = 8  # thread blocks a copied or scrubbed block


@dataclass(frozen=True)
class Launch:
    """One launch: grid (x, y, z) of blocks of kernel.threads, arguments as the driver takes them."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Where all layers' K (or V) lies.

    bases        address of uint64 [layers]: block 0 of each layer
    head_dim     elements of one head of one slot
    block_bytes  from one block of a layer to the next
    alignment    largest power of two, at most 16, that divides all bases and block_bytes
    """

    bases: int
    head_dim: int
    block_bytes: int
    alignment: int


@dataclass(frozen=True, kw_only=True)
class DeviceLease:
    """One lease in device memory; fields as in `kvd_cuda.planes.KVPlanes`, arrays as addresses."""

    k: Plane
    v: Plane
    dtype: str
    layers: int
    kv_heads: int
    block_size: int
    table: int
    length: int
    position: int
    positions: int
    scores: int
    compressed_length: int
    observed_length: int


@dataclass(frozen=True, kw_only=True)
class DeviceQueries:
    """Queries in device memory: [layers, count, query_heads, head_dim_k]; row_lse's address or 0."""

    values: int
    dtype: str
    count: int
    query_heads: int
    row_lse: int = 0


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Addresses of float32 buffers of one scoring; sizes by `scratch_floats`."""

    parts: int
    bases: int
    sums: int
    peaks: int
    row_sums: int
    errors: int


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Attention of queries [start, stop) of those sent to the first `end` slots, the last ones their own."""

    lease: DeviceLease
    queries: DeviceQueries
    start: int
    stop: int
    end: int

    @property
    def rows(self) -> int:
        """Rows of one kv head."""
        return (self.stop - self.start) * self.queries.query_heads // self.lease.kv_heads

    @property
    def segments(self) -> int:
        """Thread blocks a kv head."""
        return -(-self.end // SEGMENT)

    def scratch_floats(self) -> dict[str, int]:
        """Elements of each buffer of Scratch."""
        columns = self.lease.layers * self.lease.kv_heads
        part = columns * self.segments * self.rows
        slots = columns * self.end
        sizes = {"parts": 2 * part, "bases": 2 * columns * self.rows, "sums": slots, "peaks": slots}
        return sizes | {"row_sums": part, "errors": columns}

    def task(self) -> ScoreTask:
        """What the scoring kernels are told."""
        lease, queries = self.lease, self.queries
        skipped = self.start * queries.query_heads * lease.k.head_dim * ITEM_BYTES[queries.dtype]
        return ScoreTask(
            queries=queries.values + skipped,
            key_bases=lease.k.bases,
            table=lease.table,
            end=self.end,
            window=self.stop - self.start,
            query_count=queries.count,
            group=queries.query_heads // lease.kv_heads,
            head_dim=lease.k.head_dim,
            block_size=lease.block_size,
            block_bytes=lease.k.block_bytes,
            scale=LOG2_E / math.sqrt(lease.k.head_dim),
        )


def runs_on_tensor_cores(lease: DeviceLease, queries: DeviceQueries) -> bool:
    """Whether keys and queries have the dtypes, sizes and alignment that `scores_mma` needs."""
    wanted = {"bfloat16": "bfloat16", "float16": "float16", "float8_e4m3fn": "bfloat16"}.get(lease.dtype)
    fits = lease.k.head_dim % 16 == 0 and lease.k.head_dim <= scores_scalar.MAX_HEAD_DIM
    return queries.dtype == wanted and fits and lease.k.alignment == 16


def score(scoring: Scoring, scratch: Scratch) -> Iterator[Launch]:
    """Attention by slot into scratch.sums and .peaks; each row's error into .errors."""
    statistics, votes = _scoring_kernels(scoring)
    grid = (scoring.segments, scoring.lease.kv_heads, scoring.lease.layers)
    by_row = (-(-scoring.rows // merge.THREADS), *grid[1:])
    counts = (scoring.segments, scoring.rows)
    task = scoring.task()
    if scoring.queries.row_lse:
        lse = scoring.queries.row_lse + scoring.start * scoring.queries.query_heads * 4
        arguments = (lse, scratch.bases, task.window, task.query_count, task.group)
        yield Launch(merge.lse_kernel(), by_row, arguments)
    else:
        yield Launch(statistics, grid, (*task, scratch.parts))
        yield Launch(merge.merge_kernel(), by_row, (scratch.parts, scratch.bases, *counts))
    yield Launch(votes, grid, (*task, scratch.bases, scratch.sums, scratch.peaks, scratch.row_sums))
    yield Launch(merge.check_kernel(), (1, *grid[1:]), (scratch.row_sums, scratch.errors, *counts))


def _scoring_kernels(scoring: Scoring) -> tuple[Kernel, Kernel]:
    lease, queries = scoring.lease, scoring.queries
    if runs_on_tensor_cores(lease, queries):
        few, many = scores_mma.WARPS
        warps = few if scoring.rows <= few * scores_mma.ROWS else many
        shape = (lease.dtype, lease.k.head_dim, warps)
        return scores_mma.statistics_kernel(*shape), scores_mma.votes_kernel(*shape)
    dtypes = (lease.dtype, queries.dtype)
    return scores_scalar.statistics_kernel(*dtypes), scores_scalar.votes_kernel(*dtypes)


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """One pooling of [rows, length] votes, of which the first `scored` count."""

    rows: int
    length: int
    scored: int
    kernel: int
    kind: str
    scale: float


def pool(pooling_: Pooling, votes: int, pooled: int) -> Launch:
    """votes float32 [rows, length] -> pooled float32 [rows, scored]."""
    grid = (-(-pooling_.scored // pooling.THREADS), pooling_.rows, 1)
    sizes = (pooling_.length, pooling_.scored, pooling_.kernel, pooling_.scale)
    return Launch(pooling.pool_kernel(pooling_.kind), grid, (votes, pooled, *sizes))


def rank_blocks(
    pooling_: Pooling, pooled: int, ranks: tuple[int, int], lease: DeviceLease
) -> Iterator[Launch]:
    """pooled -> ranks[0] float64 [scored] of tokens -> ranks[1] float32 of the lease's blocks."""
    sizes = (pooling_.rows, pooling_.scored)
    token_grid = (-(-pooling_.scored // pooling.THREADS), 1, 1)
    yield Launch(pooling.token_ranks_kernel(), token_grid, (pooled, ranks[0], *sizes))
    count = -(-lease.length // lease.block_size)
    block_grid = (-(-count // pooling.THREADS), 1, 1)
    yield Launch(pooling.block_ranks_kernel(), block_grid, (*ranks, *sizes, lease.block_size, count))


def select(rows: int, shape: selection.SelectShape, scores: int, kept: int) -> Launch:
    """scores float32 [rows, stride] -> kept int32 [rows, shape.kept]."""
    return Launch(selection.select_kernel(), (rows, 1, 1), (scores, kept, *shape))


def mass(rows: int, sizes: tuple[int, int], buffers: tuple[int, int, int]) -> Launch:
    """sizes (length, kept), buffers (values, kept, masses): masses float64 [rows]."""
    return Launch(selection.mass_kernel(), (rows, 1, 1), (*buffers, *sizes))


def compact(lease: DeviceLease, goal: int, kept: int, count: int, in_place: bool) -> Iterator[Launch]:
    """K, V, positions and scores of slots kept int32 [layers, kv_heads, count] to blocks `goal`."""
    grid = (1 if in_place else COLUMN_BLOCKS, lease.kv_heads, lease.layers)
    for plane in (lease.k, lease.v):
        head_bytes = plane.head_dim * ITEM_BYTES[lease.dtype]
        shape = compaction.MoveShape(count, head_bytes, lease.block_size, plane.block_bytes)
        kernel = compaction.compact_kernel(word_bytes(plane.alignment, head_bytes))
        yield Launch(kernel, grid, (plane.bases, lease.table, goal, kept, *shape))
    age = lease.position - lease.length
    sidecar = compaction.SidecarShape(
        count, lease.block_size, lease.compressed_length, lease.observed_length, age
    )
    arguments = (lease.positions, lease.scores, lease.table, goal, kept, *sidecar)
    yield Launch(compaction.sidecar_kernel(), (1, *grid[1:]), arguments)


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


def rotate(lease: DeviceLease, rotation: Rotation) -> Launch:
    """Keys of the rotation's slots turn, in all layers and kv heads."""
    kernel = rope.rotate_kernel(lease.dtype, rotation.style, rotation.originals != 0)
    shape = rope.RotateShape(
        rotation.slot_count, rotation.pairs, lease.k.head_dim, lease.block_size, lease.k.block_bytes
    )
    work = rotation.slot_count * (lease.k.head_dim - rotation.pairs)
    grid = (-(-work // rope.THREADS), lease.kv_heads, lease.layers)
    arguments = (lease.k.bases, rotation.originals, lease.table, rotation.slots, rotation.turns, *shape)
    return Launch(kernel, grid, arguments)


def accumulate(lease: DeviceLease, end: int, observed: int, sums: int) -> Launch:
    """lease.scores += sums float32 [layers, kv_heads, end]; slots from `observed` on start at 0."""
    return _by_slot(observe.accumulate_kernel(), lease, end, (lease.scores, lease.table, sums, end, observed))


def gather_scores(lease: DeviceLease, dense: int) -> Launch:
    """lease.scores in slot order: float32 [layers, kv_heads, length]."""
    arguments = (lease.scores, lease.table, dense, lease.length, lease.observed_length)
    return _by_slot(observe.gather_scores_kernel(), lease, lease.length, arguments)


def _by_slot(kernel: Kernel, lease: DeviceLease, end: int, arguments: tuple[Any, ...]) -> Launch:
    grid = (-(-end // observe.THREADS), lease.kv_heads, lease.layers)
    return Launch(kernel, grid, (*arguments, lease.block_size))


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
