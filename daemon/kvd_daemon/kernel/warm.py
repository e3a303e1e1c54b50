"""Compile every kernel before the first caller waits for one: tiny leases of each dtype, each method."""

from collections.abc import Callable

import numpy as np

from kvd_cuda.compress import compress
from kvd_cuda.dtypes import STORAGE
from kvd_cuda.host import HostBackend
from kvd_cuda.plan import CompressPlan
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import QUERY_DTYPES, WindowQueries

BLOCKS = 4  # of BLOCK_SIZE tokens, HEADS kv heads and HEAD_DIM elements: sizes do not matter to the compiler
BLOCK_SIZE = 4
HEADS = 1
HEAD_DIM = 8
WINDOW = 2  # queries


def warm_up(on_step: Callable[[], None]) -> None:
    """Takes seconds; minutes where nothing is cached yet. `on_step` after each method of each dtype."""
    for dtype in STORAGE:
        query_dtype = dtype if dtype in QUERY_DTYPES else "bfloat16"
        planes = _planes(dtype)
        queries = _queries(query_dtype)
        HostBackend().observe(planes, queries)
        on_step()
        for method, pooling, reduce in (("snapkv", "avg", "mean"), ("span", "max", "max")):
            plan = CompressPlan(
                method=method,
                target_tokens=2 * BLOCK_SIZE,
                window=WINDOW,
                kernel=3,
                pooling=pooling,
                reduce=reduce,
            )
            compress(HostBackend(), planes, plan, queries)
            on_step()


def _planes(dtype: str) -> KVPlanes:
    shape = (BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM)
    sidecar = (BLOCKS, 1, HEADS, BLOCK_SIZE)
    return KVPlanes(
        k=[np.zeros(shape, STORAGE[dtype])],
        v=[np.zeros(shape, STORAGE[dtype])],
        dtype=dtype,
        block_table=np.arange(BLOCKS, dtype=np.int32),
        length=BLOCKS * BLOCK_SIZE,
        position=BLOCKS * BLOCK_SIZE,
        positions=np.zeros(sidecar, np.int32),
        scores=np.zeros(sidecar, np.float32),
    )


def _queries(dtype: str) -> WindowQueries:
    return WindowQueries(np.zeros((1, WINDOW, 2 * HEADS, HEAD_DIM), STORAGE[dtype]), dtype)
