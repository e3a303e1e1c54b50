"""cp.async: bytes arrive no earlier than the wait that covers their group, so a missing wait shows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Pending:
    """Copies of one instruction: threads (numbers), shared offsets, bytes [threads, 16], group of each."""

    threads: Array
    offsets: Array
    values: Array
    groups: Array

    def part(self, chosen: Array) -> "Pending":
        """Those of `chosen`, a mask."""
        return Pending(self.threads[chosen], self.offsets[chosen], self.values[chosen], self.groups[chosen])


class AsyncCopies:
    """Copies of all threads that nobody has waited for."""

    def __init__(self, thread_count: int) -> None:
        self._committed = np.zeros(thread_count, np.int64)
        self._pending: list[Pending] = []

    def start(self, threads: Array, offsets: Array, values: Array) -> None:
        """Part of each thread's next group."""
        self._pending.append(Pending(threads, offsets, values, self._committed[threads]))

    def commit(self, active: Array) -> None:
        """Close the active threads' (a mask) current group."""
        self._committed += active

    def waited_for(self, active: Array, may_remain: int) -> list[Pending]:
        """What is complete once all but the newest `may_remain` groups of each active thread are."""
        complete, remaining = [], []
        for copy in self._pending:
            done = active[copy.threads] & (copy.groups < self._committed[copy.threads] - may_remain)
            complete.append(copy.part(done))
            remaining.append(copy.part(~done))
        self._pending = [copy for copy in remaining if copy.threads.size]
        return [copy for copy in complete if copy.threads.size]
