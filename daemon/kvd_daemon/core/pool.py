"""A named region of a device for one KV spec: its blocks and the moves between their states.

Every method here is sure to work: callers check first (all or nothing), so a failed one is a bug.
"""

from dataclasses import dataclass

import numpy as np

from kvd.errors import PoolExhaustedError
from kvd.limits import scratch_reserve
from kvd.spec import KVSpec

from .blocks import BlockCounts, Blocks, BlockSet, BlockState
from .free_runs import FreeRuns, IntArray, ids_of, runs_of
from .prefix import Node, PrefixIndex

FREE, LEASED, SEALED, CACHED = BlockState.FREE, BlockState.LEASED, BlockState.SEALED, BlockState.CACHED


@dataclass
class PoolTotals:
    """Since the pool was created."""

    compressions: int = 0
    blocks_saved: int = 0
    tokens_dropped: int = 0


@dataclass(frozen=True)
class Need:
    """Blocks a call wants: for ordinary leases, for scratch leases, and cached ones it wakes up."""

    ordinary: int = 0
    scratch: int = 0
    woken: int = 0


class Pool:
    """`leasable` blocks and the null block."""

    def __init__(self, name: str, pool_id: str, spec: KVSpec, leasable: int) -> None:
        self.name = name
        self.pool_id = pool_id
        self.spec = spec
        self.reserve = scratch_reserve(leasable)
        self.totals = PoolTotals()
        self.leases: set[int] = set()
        self.blocks = Blocks(leasable + 1)
        self.free_runs = FreeRuns(1, leasable)
        self.prefixes = PrefixIndex()

    @property
    def blocks_total(self) -> int:
        """Blocks, the null block included."""
        return self.blocks.total

    @property
    def counts(self) -> BlockCounts:
        return self.blocks.counts

    @property
    def usable(self) -> int:
        """Blocks nobody holds: free ones, and cached ones that can be evicted."""
        return self.blocks.count(FREE) + self.blocks.count(CACHED)

    @property
    def blocks_reserved(self) -> int:
        """Usable blocks that only scratch leases may take."""
        return min(self.reserve, self.usable)

    def require(self, need: Need) -> None:
        """Raises PoolExhaustedError if `need` does not fit now."""
        wanted = need.ordinary + need.scratch
        usable = self.usable - need.woken
        reserved = self.reserve if need.ordinary else 0
        if wanted > usable or need.ordinary > max(0, usable - reserved):
            raise PoolExhaustedError(
                f"{wanted} blocks wanted in pool {self.name}, {max(0, usable - reserved)} free; "
                "release a lease, compress one, or retry later",
                wanted_blocks=wanted,
                free_blocks=max(0, usable - reserved),
                pool_blocks=self.blocks.total - 1 - reserved,
                pool=self.name,
            )

    def grant(self, count: int, tenant: int) -> tuple[IntArray, IntArray]:
        """FREE -> LEASED; answers the blocks, and those of them that hold another tenant's bytes."""
        missing = count - self.blocks.count(FREE)
        if missing > 0:
            self._evict(missing)
        runs = self.free_runs.take(count)
        taken = BlockSet.of(ids_of(runs), runs)
        self.blocks.move(taken, FREE, LEASED)
        self.blocks.reassign(taken.where)
        return taken.ids, self.blocks.claim(taken, tenant)

    def give_back(self, ids: IntArray, source: BlockState) -> None:
        """`source` (LEASED, QUARANTINED or CACHED) -> FREE."""
        runs = runs_of(np.sort(ids))
        self.blocks.move(BlockSet.of(ids, runs), source, FREE)
        self.free_runs.give(runs)

    def quarantine(self, ids: IntArray) -> None:
        """LEASED -> QUARANTINED."""
        self.blocks.move(BlockSet(ids, ids), LEASED, BlockState.QUARANTINED)

    def share(self, ids: IntArray) -> None:
        """One more holder of sealed blocks; cached ones wake up."""
        woken = self.blocks.hold(ids)
        self.blocks.move(BlockSet(woken, woken), CACHED, SEALED)
        self.prefixes.uncache(woken.tolist())

    def unshare(self, ids: IntArray) -> None:
        """One holder less of sealed blocks, given in sequence order; those without one are cached."""
        left = self.blocks.unhold(ids)
        self.blocks.move(BlockSet(left, left), SEALED, CACHED)
        self.prefixes.cache(left.tolist())

    def seal(self, ids: IntArray, nodes: list[Node]) -> None:
        """LEASED -> SEALED with one holder, findable by name."""
        self.blocks.move(BlockSet(ids, ids), LEASED, SEALED)
        self.blocks.hold(ids)
        for block_id, node in zip(ids.tolist(), nodes, strict=True):
            self.prefixes.add(block_id, node)

    def _evict(self, count: int) -> None:
        ids = np.array(self.prefixes.evict(count), np.int32)
        self.give_back(ids, CACHED)
