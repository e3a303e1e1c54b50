"""Pooling votes, ranking blocks, selecting slots, adding up what was kept: grids and arguments."""

from dataclasses import dataclass

from kvd_cuda.gpu import pooling, selection
from kvd_cuda.gpu.device_lease import Columns, DeviceLease, Launch


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


def rank_tokens(pooling_: Pooling, pooled: int, ranks: int, begun: bool) -> Launch:
    """ranks float64 [scored] += pooled; they begin with these rows unless `begun`."""
    grid = (-(-pooling_.scored // pooling.THREADS), 1, 1)
    arguments = (pooled, ranks, pooling_.rows, pooling_.scored, int(begun))
    return Launch(pooling.token_ranks_kernel(), grid, arguments)


def rank_blocks(lease: DeviceLease, scored: int, ranks: int, block_ranks: int) -> Launch:
    """ranks float64 [scored], of all columns -> float32 of the lease's blocks."""
    count = lease.block_count
    sizes = (lease.columns.count, scored, lease.block_size, count)
    grid = (-(-count // pooling.THREADS), 1, 1)
    return Launch(pooling.block_ranks_kernel(), grid, (ranks, block_ranks, *sizes))


def block_masses(lease: DeviceLease, columns: Columns, sums: int, masses: int) -> Launch:
    """sums float32 [layers, heads, length] -> float64 [layers, blocks]."""
    grid = (-(-lease.block_count // pooling.THREADS), 1, columns.layers)
    arguments = (sums, masses, columns.heads, lease.length, lease.block_size)
    return Launch(pooling.block_masses_kernel(), grid, arguments)


def select(rows: int, shape: selection.SelectShape, scores: int, kept: int) -> Launch:
    """scores float32 [rows, stride] -> kept int32 [rows, shape.kept]."""
    return Launch(selection.select_kernel(), (rows, 1, 1), (scores, kept, *shape))


def mass(rows: int, sizes: tuple[int, int], buffers: tuple[int, int, int]) -> Launch:
    """masses float64 [rows]: sizes (length, kept), buffers (values, kept, masses); kept 0: of all slots."""
    return Launch(selection.mass_kernel(buffers[1] == 0), (rows, 1, 1), (*buffers, *sizes))
