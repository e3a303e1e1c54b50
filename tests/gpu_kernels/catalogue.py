"""Every specialisation of every kernel that a supported lease can ask for, and what it may take."""

from collections.abc import Iterator
from itertools import product

from kvd_cuda.gpu import (
    blocks,
    compaction,
    keydiff,
    merge,
    observe,
    pooling,
    rope,
    scores_mma,
    scores_scalar,
    selection,
)
from kvd_cuda.gpu.elements import ITEM_BYTES, WRITERS
from kvd_cuda.gpu.kernel import Kernel
from kvd_cuda.plan import POOLINGS, ROPE_STYLES
from kvd_cuda.queries import QUERY_DTYPES

from .assembler import Resources

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
TENSOR_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
REGISTERS = 65536  # of a multiprocessor, on every architecture we know
THREADS = 512  # that must fit beside each other for loads to be hidden
TENSOR_THREADS = 256  # the same where queries lie in registers and copies are asynchronous
SHARED_BYTES = 48 * 1024  # beyond, a kernel must ask for more at launch


def small_kernels() -> Iterator[Kernel]:
    """All that do not score."""
    yield from (merge.merge_kernel(), merge.lse_kernel(), merge.check_kernel())
    yield from map(pooling.pool_kernel, POOLINGS)
    yield from (pooling.token_ranks_kernel(), pooling.block_ranks_kernel())
    yield from (selection.select_kernel(), selection.mass_kernel(), selection.mass_kernel(True))
    yield from (compaction.sidecar_kernel(), pooling.block_masses_kernel())
    yield from (observe.accumulate_kernel(), observe.gather_scores_kernel(), blocks.scrub_kernel())
    for word in compaction.WORDS:
        yield from (compaction.compact_kernel(word), blocks.copy_kernel(word))


def keydiffs() -> Iterator[Kernel]:
    """All dtypes."""
    yield keydiff.anchors_kernel()
    for dtype in ITEM_BYTES:
        yield from (
            keydiff.scales_kernel(dtype),
            keydiff.parts_kernel(dtype),
            keydiff.distinctness_kernel(dtype),
        )


def rotations() -> Iterator[Kernel]:
    """All dtypes, styles and sources."""
    for arguments in product(WRITERS, ROPE_STYLES, (False, True)):
        yield rope.rotate_kernel(*arguments)


def scalar_scores() -> Iterator[Kernel]:
    """All dtypes of keys and queries."""
    for dtypes in product(ITEM_BYTES, QUERY_DTYPES):
        yield from (scores_scalar.statistics_kernel(*dtypes), scores_scalar.votes_kernel(*dtypes))


def tensor_scores() -> Iterator[Kernel]:
    """All dtypes, head dims and numbers of warps."""
    for shape in product(TENSOR_DTYPES, HEAD_DIMS, scores_mma.WARPS):
        yield from (scores_mma.statistics_kernel(*shape), scores_mma.votes_kernel(*shape))


def check_budget(kernel: Kernel, resources: Resources) -> None:
    """AssertionError if `kernel` spills, or leaves no room for enough of its blocks."""
    assert resources.stack_bytes == 0, f"{kernel.name} spills {resources.stack_bytes} bytes"
    threads = TENSOR_THREADS if "_mma_" in kernel.name else THREADS
    allowed = min(255, REGISTERS // max(kernel.threads, threads))
    assert resources.registers <= allowed, f"{kernel.name} takes {resources.registers} of {allowed} registers"
    assert resources.shared_bytes <= SHARED_BYTES, (
        f"{kernel.name} takes {resources.shared_bytes} shared bytes"
    )
