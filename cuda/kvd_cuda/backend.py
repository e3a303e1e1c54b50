"""The seam between policies and the machine that runs them."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvd_cuda.dtypes import DoubleArray, FloatArray, IntArray
from kvd_cuda.errors import KernelInputError
from kvd_cuda.plan import CompressPlan, Rope
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries

NOT_FINITE = "accumulated scores are NaN or infinite; observe the lease again"
NO_EXPECTED = "expected attention is scored on the host only so far; compress this lease with snapkv or span"
NAN_KEYS = "keys are NaN or infinite; check what was written"
NAN_VALUES = "values are NaN or infinite; check what was written"
NAN_SCORES = "attention scores are NaN or infinite; check the queries and keys written"
WRONG_LSE = "row_lse is not that of these queries and keys; correct it or leave it out"
LSE_TOLERANCE = 0.05  # a row's attention may miss 1 by this when its log-sum-exp came in low precision


@dataclass(frozen=True)
class TokenSelection:
    """Slots that stay, per layer and kv head.

    kept           int32 [layers, kv_heads, C], ascending (may be a read-only broadcast)
    mass_retained  float32 [layers]: share of the attention seen that the kept slots hold, mean over kv heads;
                   None if the method looked at none (streaming)
    """

    kept: IntArray
    mass_retained: FloatArray | None


@dataclass(frozen=True)
class BlockRanks:
    """What the blocks of a lease are worth.

    ranks   float32 [blocks]: the best token's pooled votes, mean over layers and kv heads; 0 without one
    masses  float64 [layers, blocks]: share of the attention seen that a block holds, mean over kv heads
    """

    ranks: FloatArray
    masses: DoubleArray


class Backend(Protocol):
    """Operations on one lease where its bytes lie. Callers' mistakes raise KernelInputError.

    What can be known without looking at bytes (budgets, windows, shapes) the caller has checked. The window's
    queries are those of the last slots; `plan` says how votes are reduced and pooled, see CompressPlan.
    """

    def top_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """Sinks, the largest pooled votes outside them, and the slots of `queries`; ties to the lower."""
        ...

    def rank_blocks(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> BlockRanks:
        """Pooled votes by block. Slots of `queries` are no candidates, but their attention counts."""
        ...

    def heavy_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """Sinks, the largest accumulated attention (H2O) outside them, and the `recent` last slots."""
        ...

    def distinct_tokens(self, planes: KVPlanes, plan: CompressPlan, recent: int) -> TokenSelection:
        """Sinks, the keys that differ most from all others (KeyDiff) outside them, and the `recent` last."""
        ...

    def expected_tokens(self, planes: KVPlanes, plan: CompressPlan, queries: WindowQueries) -> TokenSelection:
        """Sinks, what queries like these would attend to most outside them, the last `plan.window`."""
        ...

    def observe(self, planes: KVPlanes, queries: WindowQueries) -> None:
        """Add the causal attention of the last `queries.count` tokens to `planes.scores` (H2O).

        Slots from `planes.observed_length` on start at 0. Afterwards observed_length is `length`.
        """
        ...

    def compact(self, planes: KVPlanes, kept: IntArray, destination: IntArray) -> None:
        """Move K, V, positions and scores of slots `kept` [layers, kv_heads, C], ascending, to the front.

        `destination` int32 [ceil(C / block_size)]: blocks disjoint from the source's, or its first ones.
        """
        ...

    def rotate_keys(self, planes: KVPlanes, slots: IntArray, delta: int, rope: Rope) -> None:
        """Rotate the keys of `slots`, all layers and heads, by `delta` positions; fp8 is refused."""
        ...


def check_compaction(planes: KVPlanes, kept: IntArray, destination: IntArray) -> bool:
    """Whether it is in place. Raises KernelInputError for a destination that is neither."""
    layers, kv_heads, count = kept.shape
    assert (layers, kv_heads) == (planes.layers, planes.kv_heads), "kept must be [layers, kv_heads, C]"
    assert count, "something must be kept"
    assert 0 <= kept.min() <= kept.max() < planes.length, "kept slots must be in use"
    assert (kept[:, :, 1:] > kept[:, :, :-1]).all(), "kept slots must ascend"
    needed = -(-count // planes.block_size)
    in_place = np.array_equal(destination, planes.block_table[:needed])
    distinct = np.unique(destination).size == destination.size and destination.min() >= 0
    fits = destination.size == needed and distinct and destination.max() < planes.blocks
    if not fits or not (in_place or not np.isin(destination, planes.block_table).any()):
        raise KernelInputError(
            f"destination must be {needed} distinct blocks in [0, {planes.blocks}), disjoint from the source "
            "blocks or equal to the first of them"
        )
    return in_place
