"""Which accesses have no order: two threads, one byte, at least one write, no barrier between."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError

Array = NDArray[Any]
NOBODY = -1
SEVERAL = -2


@dataclass(frozen=True)
class Who:
    """Threads of one access.

    thread, block  their numbers within the launch
    epoch          barriers their blocks have passed, counted over all launches
    launch_epoch   the epoch at which the launch began: whatever is older is ordered by the launch
    """

    thread: Array
    block: Array
    epoch: Array
    launch_epoch: int


class AccessLog:
    """The last writer and the readers of each byte. Blocks are never ordered within a launch."""

    def __init__(self, size: int) -> None:
        self._writer = _Last(size)
        self._reader = _Last(size)
        self._adder = _Last(size)

    def extend(self, count: int) -> None:
        """More bytes that nobody has accessed."""
        for last in (self._writer, self._reader, self._adder):
            last.extend(count)

    def read(self, index: Array, who: Who) -> None:
        """Threads read bytes index [threads, width]."""
        if (self._writer.conflicts(index, who) | self._adder.conflicts(index, who)).any():
            raise PtxError("race: read of what another thread wrote, and no barrier between")
        self._reader.add(index, who)

    def write(self, index: Array, who: Who) -> None:
        """Threads write bytes index [threads, width]."""
        if np.unique(index).size != index.size:
            raise PtxError("race: two threads write one byte at once")
        if (self._writer.conflicts(index, who) | self._adder.conflicts(index, who)).any():
            raise PtxError("race: write over what another thread wrote, and no barrier between")
        if self._reader.conflicts(index, who).any():
            raise PtxError("race: write to what another thread read, and no barrier between")
        self._writer.replace(index, who)

    def add(self, index: Array, who: Who) -> None:
        """Threads add atomically to bytes index [threads, width]; they race with all but each other."""
        if (self._writer.conflicts(index, who) | self._reader.conflicts(index, who)).any():
            raise PtxError("race: atomic beside another thread's access, and no barrier between")
        self._adder.add(index, who)


class _Last:
    def __init__(self, size: int) -> None:
        self._thread = np.full(size, NOBODY, np.int32)
        self._block = np.full(size, NOBODY, np.int32)
        self._epoch = np.full(size, NOBODY, np.int32)

    def extend(self, count: int) -> None:
        more = np.full(count, NOBODY, np.int32)
        self._thread, self._block, self._epoch = (
            np.concatenate([known, more]) for known in (self._thread, self._block, self._epoch)
        )

    def conflicts(self, index: Array, who: Who) -> Array:
        """Which accesses have no order with the last ones."""
        ordered = (self._block[index] == who.block[:, None]) & (self._epoch[index] != who.epoch[:, None])
        ordered |= self._epoch[index] < who.launch_epoch
        conflict: Array = (self._thread[index] != who.thread[:, None]) & ~ordered
        return conflict

    def replace(self, index: Array, who: Who) -> None:
        self._thread[index] = who.thread[:, None]
        self._block[index] = who.block[:, None]
        self._epoch[index] = who.epoch[:, None]

    def add(self, index: Array, who: Who) -> None:
        """Join the readers that have no order with these; forget the others."""
        beside = self.conflicts(index, who)
        other_block = beside & (self._block[index] != who.block[:, None])
        self.replace(index, who)
        alone = (self._thread[index] == who.thread[:, None]) & ~beside
        shared = index[~alone]
        self._thread[shared] = SEVERAL
        distant = other_block | (self._block[index] != who.block[:, None])
        self._block[index[distant]] = SEVERAL
