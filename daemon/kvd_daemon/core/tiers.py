"""Room for what is not in blocks: slots, each of one block's bytes and sidecar entries.

A tier has so many bytes for all pools of the device. Slots are numbered by pool, the lowest free one is taken
first: so which are free follows from those in use, and what lies behind the last one takes no room.
"""

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from kvd.errors import TierFullError
from kvd.spec import KVSpec

from .free_runs import IntArray
from .parked import Tier
from .pool import Pool

SLOT_ALIGNMENT = 4096  # bytes; pages are what memory is taken and given back by, and what disks read directly

RETRY_AFTER_NS = 500_000_000  # ns; others resume, release, or are moved to disk meanwhile

WORDS = {Tier.HOST: ("host tier", "--host-tier"), Tier.DISK: ("disk tier", "--spill-size")}

OnGive = Callable[[Pool, IntArray], None]


def content_bytes(spec: KVSpec) -> int:
    """Of a slot: a block's bytes, then its positions and its scores."""
    return spec.pool_bytes(1) + spec.sidecar_bytes(1)


def slot_bytes(spec: KVSpec) -> int:
    """From one slot to the next."""
    return -(-content_bytes(spec) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class _Slots:
    """Of one pool."""

    def __init__(self) -> None:
        self._free: list[int] = []  # a heap
        self._next = 0

    def take(self, count: int) -> IntArray:
        taken = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        taken += range(self._next, self._next + count - len(taken))
        self._next = max(self._next, taken[-1] + 1 if taken else 0)
        return np.array(taken, np.int32)

    def give(self, slots: IntArray) -> None:
        for slot in slots.tolist():
            heapq.heappush(self._free, slot)

    def used(self) -> set[int]:
        return set(range(self._next)) - set(self._free)

    def claim(self, slots: IntArray) -> None:
        """These are in use, in an image."""
        used = self.used() | set(slots.tolist())
        self._next = max(used, default=-1) + 1
        self._free = sorted(set(range(self._next)) - used)


class Arena:
    """The slots of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.budget_bytes = 0
        self.used_bytes = 0
        self._pools: dict[str, _Slots] = {}
        self._on_give: OnGive | None = None

    @property
    def free_bytes(self) -> int:
        """Negative where the budget became smaller than what is in use."""
        return self.budget_bytes - self.used_bytes

    def on_give(self, listener: OnGive) -> None:
        """`listener` is told of slots that are free again, in the midst of a change: only take note."""
        self._on_give = listener

    def require(self, pool: Pool, count: int) -> None:
        """Raises TierFullError if there is no room for so many slots more."""
        wanted, free = count * slot_bytes(pool.spec), max(0, self.free_bytes)
        if wanted <= free:
            return
        numbers = {"wanted_bytes": wanted, "free_bytes": free, "budget_bytes": self.budget_bytes}
        where, option = WORDS[self.tier]
        if wanted > self.budget_bytes:
            raise TierFullError(
                f"{wanted} bytes wanted of the {where}, which has {self.budget_bytes} in all; start kvd "
                f"with a larger {option}, or keep the lease where it is",
                **numbers,
            )
        raise TierFullError(
            f"{wanted} bytes wanted of the {where}, {numbers['free_bytes']} of {self.budget_bytes} free; "
            f"resume or release a suspended lease, or start kvd with a larger {option}",
            retry_after_ns=RETRY_AFTER_NS,
            **numbers,
        )

    def take(self, pool: Pool, count: int) -> IntArray:
        """Slots for so many blocks of `pool`. Raises TierFullError."""
        self.require(pool, count)
        self.used_bytes += count * slot_bytes(pool.spec)
        return self._pools.setdefault(pool.name, _Slots()).take(count)

    def give(self, pool: Pool, slots: IntArray) -> None:
        if slots.size:
            self.used_bytes -= slots.size * slot_bytes(pool.spec)
            self._pools[pool.name].give(slots)
            if self._on_give is not None:
                self._on_give(pool, slots)

    def claim(self, pool: Pool, slots: IntArray) -> None:
        """As an image tells: these are in use."""
        self.used_bytes += slots.size * slot_bytes(pool.spec)
        self._pools.setdefault(pool.name, _Slots()).claim(slots)

    def used_of(self, pool: str) -> set[int]:
        """Slots in use."""
        return self._pools[pool].used() if pool in self._pools else set()

    def used(self) -> Iterator[tuple[str, set[int]]]:
        """Slots in use, by pool that has some."""
        for pool, slots in sorted(self._pools.items()):
            if used := slots.used():
                yield pool, used

    def forget(self, pool: str) -> None:
        """The pool is no more; none of its slots is in use."""
        self._pools.pop(pool, None)
