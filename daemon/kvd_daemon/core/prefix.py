"""Sealed blocks by the chained hash of their prefix, and the cached ones among them, that can be evicted.

A hash names a block's tokens and all before them, so it implies its parent's. Each tenant has its own
names: nobody finds another tenant's blocks. Which cached block is evicted first is an order's to say (see
eviction), but never a parent before its cached child, which would be unreachable without it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kvd.errors import InvalidArgumentError, PrefixNotFoundError

from .eviction import Order
from .free_runs import IntArray
from .names import Names, Node

ROOT = b""
"""Parent of a sequence's first block."""


class PrefixIndex:
    """Names of sealed blocks; `order` has the cached ones, those without holders."""

    def __init__(self, order: Order, names: Names | None = None) -> None:
        self.order = order
        self.names = names or Names(order.total)
        self._orphans: Counter[tuple[int, bytes]] = Counter()
        for block_id in order.by_age().tolist():
            self._count_orphan(block_id, 1)

    def node(self, block_id: int) -> Node:
        return self.names.node(block_id)

    def has_name(self, block_id: int) -> bool:
        """Whether it was sealed under a name; the blocks of a fork were not."""
        return block_id in self.names

    def find_all(self, tenant: int, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of all hashes, or PrefixNotFoundError saying how many leading ones are here.

        Raises InvalidArgumentError as `find_leading`.
        """
        found = self.find_leading(tenant, hashes)
        if len(found) < len(hashes):
            raise PrefixNotFoundError(
                f"{len(hashes)} prefix blocks wanted, the first {len(found)} are sealed here; ask for those",
                found_count=len(found),
            )
        return found

    def find_leading(self, tenant: int, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of `hashes` that is here.

        Raises InvalidArgumentError where a hash has another parent here than the one before it.
        """
        found = self.names.leading(tenant, hashes)
        here, wanted = self.names.parents(found), [ROOT, *hashes[: len(found)]]
        if here != wanted[:-1]:
            raise _not_chained(next(name for i, name in enumerate(hashes) if here[i] != wanted[i]))
        return found

    def find(self, tenant: int, prefix_hash: bytes) -> int | None:
        """The block of that name, whatever comes before it."""
        return self.names.find(tenant, prefix_hash)

    def twin(self, node: Node) -> int | None:
        """The block sealed under that name before, if any. Raises if it has another parent."""
        block_id = self.names.find(node.tenant, node.prefix_hash)
        if block_id is not None and self.names.parent(block_id) != node.parent_hash:
            raise _not_chained(node.prefix_hash)
        return block_id

    def add(self, block_id: int, node: Node) -> None:
        """Sealed under that name; it has a holder."""
        self.order.named(block_id, self.names.add(block_id, node))
        if self._orphans and self._orphans.pop((node.tenant, node.prefix_hash), 0):
            self.order.used(
                np.array([block_id])
            )  # what follows it stayed here: it may not be due before that is

    def used(self, block_ids: IntArray) -> None:
        """These got one more holder: none of them is cached (any more)."""
        self.order.used(block_ids)

    def cache(self, block_ids: Sequence[int]) -> None:
        """These lost their last holder. Given in sequence order; deeper ones will be evicted first."""
        order, names, fresh = self.order, self.names, set(block_ids)
        for index in range(len(block_ids) - 1, -1, -1):
            block_id, before = block_ids[index], block_ids[index - 1]
            order.enter(block_id)
            if index and names.follows(block_id, before):
                order.outlive(before, block_id)  # as `_outlive` would
            elif not self._outlive(block_id, fresh):
                self._count_orphan(block_id, 1)

    def uncache(self, block_ids: Sequence[int]) -> None:
        """These have a holder again."""
        for block_id in block_ids:
            self.order.leave(block_id)
            if self._orphans:
                self._count_orphan(block_id, -1)

    def evict(self, count: int) -> list[int]:
        """Forget the `count` cached blocks that are due, the first first."""
        order, names, orphans = self.order, self.names, self._orphans
        evicted = [order.pop() for _ in range(count)]
        for block_id in evicted:
            if orphans:
                self._count_orphan(block_id, -1)
            order.evicted(block_id, names.remove(block_id))
        return evicted

    def _outlive(self, block_id: int, fresh: set[int]) -> bool:
        """What comes before the block stays longer than it, up to the first in `fresh`, which enters next.

        False if the one right before it is not here.
        """
        parent = before = self.names.before(block_id)
        while before is not None:
            self.order.outlive(before, block_id)
            if before in fresh:
                break
            before = self.names.before(before)
        return parent is not None

    def _count_orphan(self, block_id: int, change: int) -> None:
        """Cached children whose parent is not here: what counts if it is sealed again."""
        node = self.names.node(block_id)
        if node.parent_hash == ROOT or self.names.find(node.tenant, node.parent_hash) is not None:
            return
        parent = (node.tenant, node.parent_hash)
        self._orphans[parent] += change
        if not self._orphans[parent]:
            del self._orphans[parent]

    def nodes(self) -> Iterator[tuple[int, Node]]:
        yield from self.names

    def cached(self) -> list[int]:
        """Cached blocks, the next to be evicted first."""
        return self.order.listed()


def _not_chained(prefix_hash: bytes) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"prefix hash {prefix_hash.hex()} has another parent here; hashes must be chained"
    )
