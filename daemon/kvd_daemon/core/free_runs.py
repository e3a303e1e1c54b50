"""Free blocks as maximal runs.

Boundary tags (Knuth, TAOCP 1, 2.5, algorithm C): the first and the last block of every free run hold
its length, so both neighbours of a returned run are found in O(1). Runs wait in size classes by powers
of two, so a run that is long enough is found in O(1) too. No operation looks at the pool as a whole.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Run = tuple[int, int]
"""First block id and number of blocks."""


FEW_BLOCKS = 32  # blocks; below this a loop over ints beats numpy's fixed cost
NO_BLOCKS = np.zeros(0, np.int32)


def runs_of(block_ids: IntArray) -> list[Run]:
    """Consecutive ascending ids become one run each, in the order given."""
    if block_ids.size <= FEW_BLOCKS:
        return _few_runs(block_ids.tolist())
    breaks = np.flatnonzero(np.diff(block_ids) != 1) + 1
    firsts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((firsts, [block_ids.size])))
    return list(zip(block_ids[firsts].tolist(), counts.tolist(), strict=True))


def _few_runs(block_ids: list[int]) -> list[Run]:
    runs: list[Run] = []
    start = count = 0
    for block_id in block_ids:
        if count and block_id == start + count:
            count += 1
            continue
        if count:
            runs.append((start, count))
        start, count = block_id, 1
    return [*runs, (start, count)] if count else runs


def ids_of(runs: list[Run]) -> IntArray:
    """The block ids the runs stand for, in order."""
    if len(runs) == 1:
        start, count = runs[0]
        return np.arange(start, start + count, dtype=np.int32)
    if not runs:
        return NO_BLOCKS
    starts, counts = np.array(runs, np.int32).T
    before = np.cumsum(counts, dtype=np.int32) - counts  # ids of earlier runs
    ids: IntArray = np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int32)
    return ids


class FreeRuns:
    """The free blocks among `[first, first + count)`; at the beginning all of them."""

    def __init__(self, first: int, count: int) -> None:
        self._tags = array("i", [0]) * (first + count + 1)  # one more: the last block has a neighbour
        self._classes: list[dict[int, None]] = [{} for _ in range(count.bit_length())]
        self._filled = 0  # bit k: size class k (runs of 2**k to 2**(k+1) - 1 blocks) is not empty
        self.count = 0
        self.give([(first, count)])

    def take(self, count: int) -> list[Run]:
        """Remove `count` blocks: one run where one is long enough, else the longest ones first."""
        assert 0 <= count <= self.count, "the caller looks before it takes"
        taken: list[Run] = []
        while count:
            start, length = self._pop(count)
            if length > count:
                self._link(start + count, length - count)
                length = count
            taken.append((start, length))
            count -= length
        return taken

    def give(self, runs: list[Run]) -> None:
        """Return runs; each melts with its free neighbours."""
        tags = self._tags
        for first, count in runs:
            assert count > 0, "an empty run"
            assert not tags[first], "a block returned twice"
            assert not tags[first + count - 1], "a block returned twice"
            start, length = first, count
            if before := tags[first - 1]:
                self._unlink(first - before, before)
                start, length = first - before, length + before
            if after := tags[first + count]:
                self._unlink(first + count, after)
                length += after
            self._link(start, length)

    @classmethod
    def of(cls, total: int, starts: Sequence[IntArray], counts: Sequence[IntArray]) -> "FreeRuns":
        """Those of `layout`, among `total` blocks: what is taken next is the same."""
        made = cls(1, 1)
        tags = np.zeros(total + 1, np.int32)
        for first, count in zip(starts, counts, strict=True):
            tags[first] = tags[first + count - 1] = count
        made._tags = array("i", tags.tobytes())
        made._classes = [dict.fromkeys(first.tolist()) for first in starts]
        made._filled = sum(1 << rank for rank, members in enumerate(made._classes) if members)
        made.count = sum(int(count.sum()) for count in counts)
        return made

    def layout(self) -> tuple[list[list[int]], list[IntArray]]:
        """First blocks and lengths of all runs, by size class, in the order that decides what is taken."""
        tags = np.frombuffer(self._tags, np.int32)
        starts = [list(members) for members in self._classes]
        return starts, [tags[first] for first in starts]

    def runs(self) -> Iterator[Run]:
        """Every free run, in no order."""
        for members in self._classes:
            for start in members:
                yield start, self._tags[start]

    def _pop(self, count: int) -> Run:
        """Remove a run of at least `count` blocks by its size class, else one of the longest class."""
        enough = (count - 1).bit_length()
        longer = self._filled >> enough
        rank = enough + (longer & -longer).bit_length() - 1 if longer else self._filled.bit_length() - 1
        members = self._classes[rank]
        start, _ = members.popitem()  # popitem stays O(1) whatever was removed before
        if not members:
            self._filled &= ~(1 << rank)
        length = self._tags[start]
        self._tags[start] = self._tags[start + length - 1] = 0
        self.count -= length
        return start, length

    def _link(self, start: int, count: int) -> None:
        self._tags[start] = self._tags[start + count - 1] = count
        rank = count.bit_length() - 1
        self._classes[rank][start] = None
        self._filled |= 1 << rank
        self.count += count

    def _unlink(self, start: int, count: int) -> None:
        self._tags[start] = self._tags[start + count - 1] = 0
        rank = count.bit_length() - 1
        del self._classes[rank][start]
        if not self._classes[rank]:
            self._filled &= ~(1 << rank)
        self.count -= count
