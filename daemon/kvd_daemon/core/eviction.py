"""Which cached block is evicted next. One class per order, by its name in ORDERS.

Every order keeps what it is told: an ancestor is newer than its cached descendants, so that no block becomes
unreachable by the eviction of one before it. All steps are a few reads and writes of arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .ages import Ages, Stamps, by_age
from .free_runs import NO_BLOCKS, IntArray

DEFAULT_EVICTION = "2q"
ONCE, AGAIN = 0, 1  # rings of blocks that were used once, and more than once
Names = np.ndarray[Any, np.dtype[np.uint32]]
NO_NAMES: Names = np.zeros(0, np.uint32)


@dataclass(frozen=True)
class OrderImage:
    """All that decides which block goes next, shared with nobody.

    stamps      uint32 by block id, larger for later, 0 for blocks that are not cached
    again       ids of named blocks that were used more than once
    remembered  names of evicted blocks, as `TwoQueues` keeps them
    """

    stamps: Stamps
    again: IntArray
    remembered: Names

    def plain(self) -> dict[str, Any]:
        """Values that a journal can write."""
        return {"cached": by_age(self.stamps), "again": self.again, "remembered": self.remembered}


class Lru:
    """The least recently used block goes first."""

    name: ClassVar[str] = "lru"

    def __init__(self, total: int) -> None:
        self.total = total
        self._ages = Ages(total, 1)

    def __len__(self) -> int:
        return self._ages.sizes[0]

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._ages

    def named(self, block_id: int, key: int) -> None:
        """It was sealed under a name: `key` is 64 bits of it."""

    def used(self, block_ids: IntArray) -> None:
        """These have one more holder."""

    def enter(self, block_id: int) -> None:
        """It lost its last holder: the newest of all."""
        self._ages.append(0, block_id)

    def leave(self, block_id: int) -> None:
        """It has a holder again."""
        self._ages.remove(0, block_id)

    def outlive(self, block_id: int, descendant: int) -> None:
        """It comes before `descendant`, which has just entered, in a sequence; cached or not."""
        if block_id in self._ages:
            self._ages.remove(0, block_id)
            self._ages.append(0, block_id)

    def pop(self) -> int:
        """The next one leaves for good; `evicted` says what its name was."""
        block_id = self._ages.oldest(0)
        self._ages.remove(0, block_id)
        return block_id

    def evicted(self, block_id: int, key: int) -> None:
        """It has no name any more; it was `key`."""

    def listed(self) -> list[int]:
        """Cached blocks, the next one first."""
        listed: list[int] = self.by_age().tolist()
        return listed

    def by_age(self) -> IntArray:
        """Cached blocks, the longest unused first."""
        return by_age(self._ages.stamps)

    def image(self) -> OrderImage:
        return OrderImage(self._ages.stamps.copy(), NO_BLOCKS, NO_NAMES)

    @classmethod
    def of(cls, total: int, cached: IntArray, again: IntArray, remembered: Names) -> "Lru":
        """With these cached blocks by age, those used more than once, and the names that are remembered."""
        made = cls(total)
        made._restore(cached, again, remembered)
        return made

    def _restore(self, cached: IntArray, again: IntArray, remembered: Names) -> None:
        for block_id in cached.tolist():
            self.enter(block_id)


class TwoQueues(Lru):
    """Blocks used more than once outlive those used once, which are never more than about half.

    The oldest of those used once goes while they are more than the others; else the oldest of all. Names of
    about half as many evicted blocks as the pool has are remembered: one that comes back was used before. It
    is 2Q (Johnson and Shasha 1994) with LRU in both queues. Chosen on a production trace, see
    benchmarks/trace_replay: long prompts that are read once do not drive out what conversations come back to.
    """

    name: ClassVar[str] = "2q"

    def __init__(self, total: int) -> None:
        self.total = total
        self._ages = Ages(total, 2)
        self._again = np.zeros(total, np.uint8)
        self._again_of = self._again.data
        self._remembered = np.zeros(1 << max(total - 1, 1).bit_length() - 1, np.uint32)
        self._name_of = self._remembered.data
        self._last_slot = len(self._name_of) - 1

    def __len__(self) -> int:
        return sum(self._ages.sizes)

    def named(self, block_id: int, key: int) -> None:
        """See Lru. If the name is remembered, the block was used before."""
        self._again_of[block_id] = self._name_of[key & self._last_slot] == _mark(key)

    def used(self, block_ids: IntArray) -> None:
        self._again[block_ids] = AGAIN

    def enter(self, block_id: int) -> None:
        self._ages.append(self._again_of[block_id], block_id)

    def leave(self, block_id: int) -> None:
        self._ages.remove(self._again_of[block_id], block_id)

    def outlive(self, block_id: int, descendant: int) -> None:
        """See Lru. What comes before a block used more than once was itself."""
        cached = block_id in self._ages
        if cached:
            self.leave(block_id)
        self._again_of[block_id] |= self._again_of[descendant]
        if cached:
            self.enter(block_id)

    def pop(self) -> int:
        ages = self._ages
        once, again = ages.sizes
        older = 0 < once <= again and ages.stamp(ages.oldest(ONCE)) < ages.stamp(ages.oldest(AGAIN))
        ring = ONCE if once > again or older else AGAIN
        block_id = ages.oldest(ring)
        ages.remove(ring, block_id)
        return block_id

    def evicted(self, block_id: int, key: int) -> None:
        self._again_of[block_id] = ONCE
        self._name_of[key & self._last_slot] = _mark(key)

    def listed(self) -> list[int]:
        cached = self.by_age()
        is_again = self._again[cached] == AGAIN
        rank = np.empty(cached.size, np.int64)
        rank[is_again], rank[~is_again] = np.flatnonzero(is_again), np.flatnonzero(~is_again)
        once, again = cached[~is_again].tolist(), cached[is_again].tolist()
        return _merged(once, again, rank[~is_again].tolist(), rank[is_again].tolist())

    def image(self) -> OrderImage:
        again = np.flatnonzero(self._again).astype(np.int32)
        return OrderImage(self._ages.stamps.copy(), again, self._remembered.copy())

    def _restore(self, cached: IntArray, again: IntArray, remembered: Names) -> None:
        self._again[again] = AGAIN
        self._remembered[: remembered.size] = remembered
        super()._restore(cached, again, remembered)


def _mark(key: int) -> int:
    """32 bits of a name, never 0: two names that share them take each other's place, no more."""
    return (key >> 32) | 1


def _merged(once: list[int], again: list[int], once_ages: list[int], again_ages: list[int]) -> list[int]:
    """Blocks in the order in which `TwoQueues.pop` would give them."""
    merged: list[int] = []
    i = j = 0
    while i < len(once) or j < len(again):
        more_once = len(once) - i > len(again) - j
        if more_once or (i < len(once) and once_ages[i] < again_ages[j]):
            merged.append(once[i])
            i += 1
        else:
            merged.append(again[j])
            j += 1
    return merged


Order = Lru
ORDERS: dict[str, type[Order]] = {order.name: order for order in (Lru, TwoQueues)}


def restored(name: str, total: int, plain: Mapping[str, Any]) -> Order:
    """An order of that name for blocks below `total` that goes on where the one of this image was.

    `plain` is that of an OrderImage, also of one of another order: what that did not know is new.
    """
    cached = np.asarray(plain["cached"], np.int32)  # an image of version 2 has a list, and no more than that
    return ORDERS[name].of(total, cached, plain.get("again", NO_BLOCKS), plain.get("remembered", NO_NAMES))
