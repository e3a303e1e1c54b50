"""A named region of a device for one KV spec: its blocks and the moves between their states.

Every method here is sure to work: callers check first (all or nothing), so a failed one is a bug.
"""

from dataclasses import dataclass

import numpy as np

from kvd.limits import scratch_reserve
from kvd.spec import KVSpec

from .blocks import BlockCounts, Blocks, BlockState
from .eviction import Lru, restored
from .free_runs import FreeRuns, IntArray, Run, runs_of
from .names import Node
from .prefix import PrefixIndex
from .quotas import Holdings, Quotas

FREE, LEASED, SEALED, CACHED = BlockState.FREE, BlockState.LEASED, BlockState.SEALED, BlockState.CACHED


@dataclass
class PoolTotals:
    """Since the pool was created."""

    compressions: int = 0
    blocks_saved: int = 0
    tokens_dropped: int = 0


class Pool:
    """`leasable` blocks and the null block."""

    def __init__(self, name: str, pool_id: str, spec: KVSpec, leasable: int, quotas: Quotas) -> None:
        self.name = name
        self.pool_id = pool_id
        self.spec = spec
        self.reserve = scratch_reserve(leasable)
        self.totals = PoolTotals()
        self.leases: set[int] = set()
        self.blocks = Blocks(leasable + 1)
        self.free_runs = FreeRuns(1, leasable)
        self.prefixes = PrefixIndex(Lru(leasable + 1))
        self.holdings = Holdings(quotas, leasable - self.reserve)

    def evict_by(self, order: str) -> None:
        """Cached blocks go in the order of that name from now on; what the one before knew is taken over."""
        before = self.prefixes.order
        if before.name != order:
            now = restored(order, self.blocks_total, before.image().plain())
            self.prefixes = PrefixIndex(now, self.prefixes.names)

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
        return self.free_runs.count + self.blocks.count(CACHED)

    @property
    def blocks_reserved(self) -> int:
        """Usable blocks that only scratch leases may take."""
        return min(self.reserve, self.usable)

    def grant(self, count: int, tenant: int) -> tuple[list[Run], IntArray]:
        """FREE -> LEASED; answers the blocks, and those of them that hold another tenant's bytes."""
        missing = count - self.free_runs.count
        if missing > 0:
            self._evict(missing)
        runs = self.free_runs.take(count)
        self.blocks.move(runs, FREE, LEASED)
        self.blocks.reassign(runs)
        self.holdings.count(tenant, count)
        return runs, self.blocks.claim(runs, tenant)

    def give_back(self, runs: list[Run], source: BlockState, tenant: int) -> None:
        """`source` (LEASED or QUARANTINED) -> FREE; `tenant` held them."""
        self.holdings.count(tenant, -self._free(runs, source))

    def _free(self, runs: list[Run], source: BlockState) -> int:
        """Answers their number."""
        count = self.blocks.move(runs, source, FREE)
        self.free_runs.give(runs)
        return count

    def quarantine(self, runs: list[Run]) -> None:
        """LEASED -> QUARANTINED."""
        self.blocks.move(runs, LEASED, BlockState.QUARANTINED)

    def share(self, ids: IntArray, tenant: int) -> None:
        """One more holder of sealed blocks of `tenant`'s; cached ones wake up."""
        woken = self.blocks.hold(ids)
        if woken.size:
            self.blocks.move(runs_of(woken), CACHED, SEALED)
            self.holdings.count(tenant, woken.size)
            self.prefixes.uncache(woken.tolist())
        self.prefixes.used(ids)

    def unshare(self, ids: IntArray, tenant: int) -> None:
        """One holder less of sealed blocks of `tenant`'s, in sequence order.

        Those without one are cached by their names; without a name they are free.
        """
        left = self.blocks.unhold(ids)
        if left.size:
            listed = left.tolist()
            named = [block_id for block_id in listed if self.prefixes.has_name(block_id)]
            if len(named) < len(listed):
                nameless = np.sort(left[~np.isin(left, named)])
                self._free(runs_of(nameless), SEALED)
                left = np.array(named, np.int32)
            self.blocks.move(runs_of(left), SEALED, CACHED)
            self.holdings.count(tenant, -len(listed))
            self.prefixes.cache(named)

    def freeze(self, ids: IntArray) -> None:
        """LEASED -> SEALED with one holder, without a name."""
        self.blocks.move(runs_of(ids), LEASED, SEALED)
        self.blocks.hold(ids)

    def thaw(self, ids: IntArray) -> None:
        """SEALED without a name and with one holder -> LEASED."""
        left = self.blocks.unhold(ids)
        assert left.size == ids.size, "another lease has the block"
        self.blocks.move(runs_of(ids), SEALED, LEASED)

    def give_names(self, ids: IntArray, nodes: list[Node]) -> None:
        """Sealed blocks get names: they can be found from now on."""
        for block_id, node in zip(ids.tolist(), nodes, strict=True):
            self.prefixes.add(block_id, node)

    def _evict(self, count: int) -> None:
        ids = np.array(self.prefixes.evict(count), np.int32)
        self._free(runs_of(np.sort(ids)), CACHED)
