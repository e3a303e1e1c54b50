"""Make the kernels of a pool ready before the first caller waits for one."""

from collections.abc import Iterator

from kvd_cuda.gpu import keydiff, merge, observe, pooling, selection
from kvd_cuda.gpu.device import KernelDevice
from kvd_cuda.gpu.device_lease import DeviceLease, DeviceQueries
from kvd_cuda.gpu.kernel import Kernel
from kvd_cuda.gpu.launch_moves import Compaction, compact
from kvd_cuda.gpu.launch_scores import Scoring, Scratch, score
from kvd_cuda.gpu.placing import DeviceSidecar, place
from kvd_cuda.gpu.scores_mma import ROWS, WARPS
from kvd_cuda.gpu.scores_scalar import MAX_HEAD_DIM
from kvd_cuda.plan import POOLINGS
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import QUERY_DTYPES

FEW_ROWS, MANY_ROWS = 1, ROWS * WARPS[0] + 1


def warm_up(device: KernelDevice, planes: KVPlanes, sidecar: DeviceSidecar) -> None:
    """Those of leases like `planes`, but for rotations; minutes where nothing is cached yet.

    The device's `on_step` is called after each kernel.
    """
    device.rewind()
    lease = place(device, planes, sidecar)
    for kernel in (*_scoring(lease), *_choosing(), *_moving(lease), *_pruning(lease.dtype)):
        device.ready(kernel)


def _scoring(lease: DeviceLease) -> Iterator[Kernel]:
    """With queries of the pool's own dtype, of few and of many rows."""
    if lease.k.head_dim > MAX_HEAD_DIM:
        return
    nowhere = Scratch(parts=0, bases=0, sums=0, peaks=0, row_sums=0, errors=0)
    dtype = lease.dtype if lease.dtype in QUERY_DTYPES else "bfloat16"
    for rows in (FEW_ROWS, MANY_ROWS):
        queries = DeviceQueries(values=0, dtype=dtype, count=rows, query_heads=lease.kv_heads)
        scoring = Scoring(lease=lease, columns=lease.columns, queries=queries, start=0, stop=rows, end=rows)
        yield from (launch.kernel for launch in score(scoring, nowhere))
    yield merge.lse_kernel()


def _choosing() -> Iterator[Kernel]:
    yield from map(pooling.pool_kernel, POOLINGS)
    yield from (pooling.token_ranks_kernel(), pooling.block_ranks_kernel(), pooling.block_masses_kernel())
    yield from (selection.select_kernel(), selection.mass_kernel(), selection.mass_kernel(True))


def _moving(lease: DeviceLease) -> Iterator[Kernel]:
    move = Compaction(columns=lease.columns, goal=0, kept=0, count=1, in_place=True)
    yield from (launch.kernel for launch in compact(lease, move))
    yield from (observe.accumulate_kernel(), observe.gather_scores_kernel())


def _pruning(dtype: str) -> Iterator[Kernel]:
    """KeyDiff: asked for by the daemon itself when a pool is full, so it had better be there."""
    yield from (keydiff.scales_kernel(dtype), keydiff.parts_kernel(dtype))
    yield from (keydiff.anchors_kernel(), keydiff.distinctness_kernel(dtype))
