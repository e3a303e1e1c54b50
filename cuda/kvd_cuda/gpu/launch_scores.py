"""Scoring a lease with queries: kernels, grids and arguments. All layers of the columns in one launch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvd_cuda.gpu import merge, scores_mma, scores_scalar
from kvd_cuda.gpu.device_lease import Columns, DeviceLease, DeviceQueries, Launch
from kvd_cuda.gpu.elements import ITEM_BYTES
from kvd_cuda.gpu.kernel import Kernel
from kvd_cuda.gpu.scores import SEGMENT, ScoreTask

LOG2_E = math.log2(math.e)
LSE_BYTES = 4  # float32


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
    """Attention of queries [start, stop) of those given to the first `end` slots, the last ones their own."""

    lease: DeviceLease
    columns: Columns
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
        columns = self.columns.count
        part = columns * self.segments * self.rows
        slots = columns * self.end
        sizes = {"parts": 2 * part, "bases": 2 * columns * self.rows, "sums": slots, "peaks": slots}
        return sizes | {"row_sums": part, "errors": columns}

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.queries.query_heads // self.lease.kv_heads

    @property
    def lse(self) -> int:
        """Address of the first row's log-sum-exp."""
        first = self.start * self.queries.query_heads + self.columns.head * self.group
        return self.queries.row_lse + first * LSE_BYTES

    def task(self) -> ScoreTask:
        """What the scoring kernels are told."""
        lease, queries = self.lease, self.queries
        skipped = self.start * queries.query_heads + self.columns.head * self.group
        return ScoreTask(
            queries=queries.values + skipped * lease.k.head_dim * ITEM_BYTES[queries.dtype],
            key_bases=lease.bases(lease.k, self.columns),
            table=lease.table,
            end=self.end,
            window=self.stop - self.start,
            query_count=queries.count,
            group=self.group,
            kv_heads=lease.kv_heads,
            first_head=self.columns.head,
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
    columns = scoring.columns
    grid = columns.grid(scoring.segments)
    by_row = columns.grid(-(-scoring.rows // merge.THREADS))
    counts = (scoring.segments, scoring.rows)
    task = scoring.task()
    if scoring.queries.row_lse:
        sizes = (task.window, task.query_count, task.group, scoring.queries.query_heads)
        yield Launch(merge.lse_kernel(), by_row, (scoring.lse, scratch.bases, *sizes))
    else:
        yield Launch(statistics, grid, (*task, scratch.parts))
        yield Launch(merge.merge_kernel(), by_row, (scratch.parts, scratch.bases, *counts))
    yield Launch(votes, grid, (*task, scratch.bases, scratch.sums, scratch.peaks, scratch.row_sums))
    yield Launch(merge.check_kernel(), columns.grid(1), (scratch.row_sums, scratch.errors, *counts))


def _scoring_kernels(scoring: Scoring) -> tuple[Kernel, Kernel]:
    lease, queries = scoring.lease, scoring.queries
    if runs_on_tensor_cores(lease, queries):
        few, many = scores_mma.WARPS
        warps = few if scoring.rows <= few * scores_mma.ROWS else many
        shape = (lease.dtype, lease.k.head_dim, warps)
        return scores_mma.statistics_kernel(*shape), scores_mma.votes_kernel(*shape)
    dtypes = (lease.dtype, queries.dtype)
    return scores_scalar.statistics_kernel(*dtypes), scores_scalar.votes_kernel(*dtypes)
