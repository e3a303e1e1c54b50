"""What is known of every block of a pool: 11 bytes each, changed in bulk, every change checked."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .free_runs import IntArray, Run

NEVER_WRITTEN = 0  # tenant index of a block nobody wrote: zeros
UNKNOWN_TENANT = 32_767  # tenant index of a block that may hold anybody's bytes: differs from all
NULL_BLOCK = 0  # padding entries of block tables point there; never leased


class BlockState(IntEnum):
    FREE = 0
    LEASED = 1
    SEALED = 2
    CACHED = 3
    QUARANTINED = 4
    NULL = 5


class BlockCounts(NamedTuple):
    """Blocks per state; they sum up to the pool's total."""

    free: int
    leased: int
    sealed: int
    cached: int
    quarantined: int
    null: int


class BlockSet(NamedTuple):
    """Distinct blocks, and the cheapest way to index arrays with them: a slice where they are one run."""

    ids: IntArray
    where: slice | IntArray

    @classmethod
    def of(cls, ids: IntArray, runs: list[Run]) -> "BlockSet":
        if len(runs) == 1:
            start, count = runs[0]
            return cls(ids, slice(start, start + count))
        return cls(ids, ids)


class Blocks:
    """State, generation, last tenant and number of holders by block id."""

    def __init__(self, total: int) -> None:
        self.state: npt.NDArray[np.uint8] = np.zeros(total, np.uint8)
        self.generation: npt.NDArray[np.uint32] = np.zeros(total, np.uint32)
        self.tenant: npt.NDArray[np.int16] = np.zeros(total, np.int16)
        self.holders: IntArray = np.zeros(total, np.int32)
        self.state[NULL_BLOCK] = BlockState.NULL
        self._counts = [total - 1, 0, 0, 0, 0, 1]

    @property
    def total(self) -> int:
        return self.state.size

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(*self._counts)

    def count(self, state: BlockState) -> int:
        return self._counts[state]

    def move(self, blocks: BlockSet, source: BlockState, target: BlockState) -> None:
        """Every block goes from `source` to `target`; it is a bug if one is in another state."""
        state, count = self.state, blocks.ids.size
        # plain ints: numpy takes five times as long to compare with an IntEnum
        right = np.count_nonzero(state[blocks.where] == source.value)
        assert right == count, f"not every block was {source.name}"
        state[blocks.where] = target.value
        self._counts[source] -= count
        self._counts[target] += count

    def reassign(self, where: slice | IntArray) -> None:
        """Their content is about to be another one: fence whoever remembers the old one."""
        self.generation[where] += np.uint32(1)

    def claim(self, blocks: BlockSet, tenant: int) -> IntArray:
        """Note that `tenant` will write these; answers those that hold another tenant's bytes.

        They count as unknown until `cleaned`, so that they are never handed out unscrubbed.
        """
        last = self.tenant[blocks.where]
        if np.count_nonzero(last == tenant) == last.size:
            return blocks.ids[:0]
        foreign = (last != tenant) & (last != NEVER_WRITTEN)
        self.tenant[blocks.where] = np.where(foreign, UNKNOWN_TENANT, tenant)
        result: IntArray = blocks.ids[foreign]
        return result

    def cleaned(self, ids: IntArray, tenant: int) -> None:
        """These hold bytes of `tenant` or zeros, nothing else."""
        self.tenant[ids] = tenant

    def hold(self, ids: IntArray) -> IntArray:
        """One more holder each; answers those that had none."""
        woken: IntArray = ids[self.holders[ids] == 0]
        self.holders[ids] += 1
        return woken

    def unhold(self, ids: IntArray) -> IntArray:
        """One holder less each; answers those that have none left, in the order given."""
        self.holders[ids] -= 1
        left = self.holders[ids]
        assert (left >= 0).all(), "a block without holders lost one"
        freed: IntArray = ids[left == 0]
        return freed
