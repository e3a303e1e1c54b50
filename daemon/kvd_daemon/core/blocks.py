"""What is known of every block of a pool: 11 bytes each, changed in bulk, every change checked."""

from array import array
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .free_runs import NO_BLOCKS, IntArray, Run, ids_of

NEVER_WRITTEN = 0  # tenant index of a block nobody wrote: zeros
UNKNOWN_TENANT = 32_767  # tenant index of a block that may hold anybody's bytes: differs from all
MAX_REASSIGNED = 256  # runs that wait to be counted; a tenth of a millisecond once in so many calls
FEW_RUNS = 16  # runs; below this a loop over them beats numpy's fixed cost
NULL_BLOCK = 0  # padding entries of block tables point there; never leased


class BlockState(IntEnum):
    FREE = 0
    LEASED = 1
    SEALED = 2
    CACHED = 3
    QUARANTINED = 4
    NULL = 5


_ONE = np.array(1, np.uint32)  # an array: numpy would make one of a number at every use
_BYTE_OF = [bytes((state.value,)) for state in BlockState]


class BlockCounts(NamedTuple):
    """Blocks per state; they sum up to the pool's total."""

    free: int
    leased: int
    sealed: int
    cached: int
    quarantined: int
    null: int


class Blocks:
    """State, generation, last tenant and number of holders by block id.

    Most calls touch a run or a few. There, plain ints and bytes of a view of the same memory take a tenth of
    the time that numpy takes to begin; many runs are one array of ids.
    """

    def __init__(self, total: int) -> None:
        self.state: npt.NDArray[np.uint8] = np.zeros(total, np.uint8)
        self._generation: npt.NDArray[np.uint32] = np.zeros(total, np.uint32)
        self._reassigned: list[Run] = []
        self.tenant: npt.NDArray[np.int16] = np.zeros(total, np.int16)
        self.holders: IntArray = np.zeros(total, np.int32)
        self.state[NULL_BLOCK] = BlockState.NULL
        self._counts = [total - 1, 0, 0, 0, 0, 1]
        self._view()

    def _view(self) -> None:
        """The same memory, for plain ints and bytes."""
        self._states, self._tenants = self.state.data, self.tenant.data

    @classmethod
    def of(
        cls,
        state: "npt.NDArray[np.uint8]",
        generation: "npt.NDArray[np.uint32]",
        tenant: "npt.NDArray[np.int16]",
        holders: IntArray,
    ) -> "Blocks":
        """With these arrays."""
        made = cls(1)
        made.state, made._generation, made.tenant, made.holders = state, generation, tenant, holders
        made._counts = np.bincount(made.state, minlength=len(BlockState)).tolist()
        made._view()
        return made

    @property
    def total(self) -> int:
        return self.state.size

    @property
    def counts(self) -> BlockCounts:
        return BlockCounts(*self._counts)

    def count(self, state: BlockState) -> int:
        return self._counts[state]

    def move(self, runs: list[Run], source: BlockState, target: BlockState) -> int:
        """Every block goes from `source` to `target`; answers how many. A bug if one is in another state."""
        moved = 0
        if len(runs) > FEW_RUNS:
            moved = self._move_many(ids_of(runs), source, target)
        else:
            for first, count in runs:
                states = self._states[first : first + count]
                assert states.tobytes() == _BYTE_OF[source] * count, f"not every block was {source.name}"
                states[:] = _BYTE_OF[target] * count
                moved += count
        self._counts[source] -= moved
        self._counts[target] += moved
        return moved

    def _move_many(self, ids: IntArray, source: BlockState, target: BlockState) -> int:
        # plain ints: numpy takes five times as long to compare with an IntEnum
        right = np.count_nonzero(self.state[ids] == source.value)
        assert right == ids.size, f"not every block was {source.name}"
        self.state[ids] = target.value
        return ids.size

    def reassign(self, runs: list[Run]) -> None:
        """Their content is about to be another one: fence whoever remembers the old one."""
        if len(runs) > FEW_RUNS:
            self._generation[ids_of(runs)] += _ONE
            return
        self._reassigned += runs
        if len(self._reassigned) > MAX_REASSIGNED:
            self._count_reassigned()

    @property
    def generation(self) -> "npt.NDArray[np.uint32]":
        """How often each block was reassigned. Looked at so seldom that runs are counted many at a time."""
        self._count_reassigned()
        return self._generation

    def _count_reassigned(self) -> None:
        for first, count in self._reassigned:
            self._generation[first : first + count] += _ONE
        self._reassigned.clear()

    def claim(self, runs: list[Run], tenant: int) -> IntArray:
        """Note that `tenant` will write these; answers those that hold another tenant's bytes.

        They count as unknown until `cleaned`, so that they are never handed out unscrubbed.
        """
        own = array("h", (tenant,)).tobytes()
        for first, count in runs:
            if self._tenants[first : first + count].tobytes() != own * count:
                return self._claim_many(ids_of(runs), tenant)
        return NO_BLOCKS

    def _claim_many(self, ids: IntArray, tenant: int) -> IntArray:
        last = self.tenant[ids]
        foreign = (last != tenant) & (last != NEVER_WRITTEN)
        self.tenant[ids] = np.where(foreign, UNKNOWN_TENANT, tenant)
        result: IntArray = ids[foreign]
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
