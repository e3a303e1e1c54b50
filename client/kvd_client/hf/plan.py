"""What one forward pass reads and writes: block ids and offsets, the same for every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvd.policy import Streaming

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Visible:
    """The slots that the new tokens' queries may see, before the new tokens themselves.

    They are [0, sinks) and [start, length) of `blocks`, in table order. `position` is that of the
    first new token; the slots from `start` on have the positions right before it.
    """

    blocks: Ids
    length: int
    position: int
    sinks: int = 0
    start: int = 0
    rotated: bool = False

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """Consecutive blocks as (index in the table, first block id, number of blocks)."""
        if self.blocks.size == 0:
            return []
        starts = np.concatenate(([0], np.flatnonzero(np.diff(self.blocks) != 1) + 1))
        counts = np.diff(np.concatenate((starts, [self.blocks.size])))
        return list(zip(starts.tolist(), self.blocks[starts].tolist(), counts.tolist(), strict=True))

    @property
    def count(self) -> int:
        """Visible slots."""
        return self.sinks + self.length - self.start

    @property
    def sink_shift(self) -> int:
        """Positions the sink keys move forward so that they end where the window starts."""
        window_position = self.position - (self.length - self.start)
        return window_position - self.sinks if self.rotated else 0

    def positions(self) -> Ids:
        """Of the visible slots, [count]."""
        window = np.arange(self.position - (self.length - self.start), self.position)
        return np.concatenate((np.arange(self.sinks), window))


def window_visible(everything: Visible, policy: Streaming) -> Visible:
    """The sinks, and what the first new token's window (itself included) reaches."""
    sinks = min(policy.sinks, everything.length)
    start = max(sinks, everything.length - (policy.window - 1))
    return replace(everything, sinks=sinks, start=start, rotated=policy.rope == "cache")


@dataclass(frozen=True)
class Target:
    """Where new tokens are stored: columns[i] of row rows[i] at offset offsets[i] of block blocks[i]."""

    rows: Ids
    columns: Ids
    blocks: Ids
    offsets: Ids

    @classmethod
    def of_slots(cls, row: int, columns: Ids, slots: Ids, block_size: int) -> "Target":
        """From one pool slot for each new token of a row; those in the null block are stored nowhere."""
        stored = slots >= block_size
        slots, columns = slots[stored], columns[stored]
        return cls(np.full(slots.size, row), columns, slots // block_size, slots % block_size)

    @classmethod
    def joined(cls, parts: "Sequence[Target]") -> "Target":
        """Those of several rows as one."""
        ids = ((part.rows, part.columns, part.blocks, part.offsets) for part in parts)
        return cls(*(np.concatenate(each) for each in zip(*ids, strict=True)))
