"""What a worker may look up without asking: whether the table of its lease may still be used.

One word per lease. The daemon writes the words, workers map them read-only: a worker that was stopped, cut
off or is slow sees what became of its lease before it trusts what it has read.
"""

import heapq
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvd.errors import LimitExceededError

from .lease import Lease

FIRST_WORDS = 64  # words; few leases, few bytes. Memory that is shared is as large as it may become at once
NO_SLOT = 0  # belongs to nobody and always shows 0

Words = npt.NDArray[np.uint64]


class Fences:
    """A slot per lease, the lowest free one first: which are free follows from the leases alone."""

    def __init__(self, limit: int) -> None:
        self._lie_in(np.zeros(FIRST_WORDS, np.uint64))
        self._limit = limit
        self._free: list[int] = []  # a heap
        self._next = NO_SLOT + 1

    def _lie_in(self, words: Words) -> None:
        self.words = words
        self._cells = words.data  # the same memory: numpy takes longer to store a single word

    def require(self, count: int) -> None:
        """Raises LimitExceededError if there are not so many slots."""
        left = self._limit - self._next + len(self._free)
        if count > left:
            raise LimitExceededError(
                f"{count} leases wanted, {left} more are possible on this device; release some",
                limit=self._limit - 1,
            )

    def take(self) -> int:
        """A slot that shows 0."""
        if self._free:
            return heapq.heappop(self._free)
        slot, self._next = self._next, self._next + 1
        if slot == self.words.size:
            self._lie_in(np.concatenate((self.words, np.zeros(slot, np.uint64))))
        return slot

    def give(self, slot: int) -> None:
        self._cells[slot] = 0
        heapq.heappush(self._free, slot)

    def show(self, lease: Lease) -> None:
        """Call after every change of what `Lease.fence` follows from."""
        self._cells[lease.fence_slot] = lease.fence

    def restore(self, leases: Iterable[Lease]) -> None:
        """As it is when just these leases have their slots."""
        slots = {lease.fence_slot: lease for lease in leases}
        self._next = max(slots, default=NO_SLOT) + 1
        self._free = [slot for slot in range(NO_SLOT + 1, self._next) if slot not in slots]
        self._lie_in(np.zeros(max(FIRST_WORDS, self._next), np.uint64))
        for lease in slots.values():
            self.show(lease)

    def move_to(self, words: Words) -> None:
        """From now on the words are there, `limit` of them. What others see changes only where it must."""
        assert words.size == self._limit, "all words there may ever be"
        stale = np.flatnonzero(words[self._next :]) + self._next
        words[stale] = 0
        words[: self._next] = self.words[: self._next]
        self._lie_in(words)

    def shown(self) -> dict[int, int]:
        """Every slot that shows something, with its word."""
        slots = np.flatnonzero(self.words[: self._next])
        return dict(zip(slots.tolist(), self.words[slots].tolist(), strict=True))
