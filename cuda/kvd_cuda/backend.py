"""The seam between policies and the machine that runs them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvd_cuda.dtypes import FloatArray, IntArray
from kvd_cuda.plan import Rope
from kvd_cuda.planes import HeadRange, KVPlanes
from kvd_cuda.queries import WindowQueries


@dataclass(frozen=True)
class WindowScores:
    """What the window's queries look at, for a range of kv heads.

    votes  float32 [heads, length]: per slot, reduced over the group's heads and the queries, not pooled
    mass   float32 [heads, length]: mean attention over the same; sums to 1 over all slots, window included
    """

    votes: FloatArray
    mass: FloatArray


class Backend(Protocol):
    """Operations on one lease where its bytes lie. Callers' mistakes raise KernelInputError."""

    def head_ranges(self, planes: KVPlanes) -> Iterator[HeadRange]:
        """All kv heads of all layers, in order, in ranges whose scores fit the workspace."""
        ...

    def score_window(
        self, planes: KVPlanes, queries: WindowQueries, heads: HeadRange, reduce: str
    ) -> WindowScores:
        """Attention of the window's queries over all slots. `reduce`: "mean" or "max"; see CompressPlan."""
        ...

    def pool(self, votes: FloatArray, kernel: int, kind: str) -> FloatArray:
        """Stride 1, same length, along the last axis: "avg" (zeros outside count) or "max"."""
        ...

    def select(self, scores: FloatArray, count: int) -> IntArray:
        """Ascending indices of the `count` largest per row, ties to the lower index; int32 [heads, count]."""
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
