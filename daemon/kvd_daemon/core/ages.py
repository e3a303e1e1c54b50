"""Cached blocks by age, in rings: a block enters as the newest, leaves from anywhere; the oldest is known.

Twelve bytes a block, none of them touched before the block is; every step is a few of them.
"""

from typing import Any

import numpy as np

from .free_runs import IntArray

FIRST_STAMP = 1  # 0: not cached
MAX_STAMP = (1 << 32) - 1  # then all are counted anew; at a million a second that is once in 70 minutes
Stamps = np.ndarray[Any, np.dtype[np.uint32]]


class Ages:
    """`rings` circular lists through block ids below `total`; ring r's ends meet in id total + r.

    `sizes` says how many blocks are in each ring.
    """

    def __init__(self, total: int, rings: int) -> None:
        self._before = np.zeros(total + rings, np.int32).data
        self._after = np.zeros(total + rings, np.int32).data
        self.stamps: Stamps = np.zeros(total, np.uint32)
        self._stamp_of = self.stamps.data
        self._total = total
        self._next_stamp = FIRST_STAMP
        self.sizes = [0] * rings
        for ring in range(total, total + rings):
            self._before[ring] = self._after[ring] = ring

    def __contains__(self, block_id: int) -> bool:
        return self._stamp_of[block_id] != 0

    def stamp(self, block_id: int) -> int:
        """Later ones are larger; the largest of all for the end of a ring."""
        return self._stamp_of[block_id] if block_id < self._total else self._next_stamp

    def oldest(self, ring: int) -> int:
        """Its end, which is no block, if the ring is empty."""
        return self._after[self._total + ring]

    def append(self, ring: int, block_id: int) -> None:
        if self._next_stamp == MAX_STAMP:
            self._count_anew()
        end = self._total + ring
        newest = self._before[end]
        self._after[newest] = self._before[end] = block_id
        self._before[block_id], self._after[block_id] = newest, end
        self._stamp_of[block_id] = self._next_stamp
        self._next_stamp += 1
        self.sizes[ring] += 1

    def remove(self, ring: int, block_id: int) -> None:
        assert self._stamp_of[block_id], f"block {block_id} is not cached"
        before, after = self._before[block_id], self._after[block_id]
        self._after[before], self._before[after] = after, before
        self._stamp_of[block_id] = 0
        self.sizes[ring] -= 1

    def _count_anew(self) -> None:
        cached = by_age(self.stamps)
        self.stamps[cached] = np.arange(FIRST_STAMP, FIRST_STAMP + cached.size)
        self._next_stamp = FIRST_STAMP + cached.size


def by_age(stamps: Stamps) -> IntArray:
    """Blocks of all rings, the oldest first, by `Ages.stamps` or a copy of them."""
    ids = np.flatnonzero(stamps)
    ordered: IntArray = ids[np.argsort(stamps[ids])].astype(np.int32)
    return ordered
