"""Sealed blocks by the chained hash of their prefix, and the order in which cached ones are evicted.

A hash names a block's tokens and all before them, so it implies its parent's. Each tenant has its own
names: nobody finds another tenant's blocks. The least recently used cached block is evicted first, and a
cached parent never before its cached child, which would be unreachable without it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.errors import InvalidArgumentError, PrefixNotFoundError

ROOT = b""
"""Parent of a sequence's first block."""


@dataclass(frozen=True, slots=True)
class Node:
    """A sealed block's name: its own hash, the one before it, and whose it is."""

    tenant: int
    prefix_hash: bytes
    parent_hash: bytes


class PrefixIndex:
    """Names of sealed blocks, and the cached ones (those without holders) in eviction order."""

    def __init__(self) -> None:
        self._block_of: dict[int, dict[bytes, int]] = {}
        self._nodes: dict[int, Node] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @classmethod
    def of(cls, tenants: Sequence[int], nodes: dict[int, Node], cached: Sequence[int]) -> "PrefixIndex":
        """That of which `tenants`, `nodes` and `cached` tell."""
        made = cls()
        made._block_of = {tenant: {} for tenant in tenants}
        for block_id, node in nodes.items():
            made.add(block_id, node)
        made._cached = OrderedDict.fromkeys(cached)
        return made

    def node(self, block_id: int) -> Node:
        return self._nodes[block_id]

    def has_name(self, block_id: int) -> bool:
        """Whether it was sealed under a name; the blocks of a fork were not."""
        return block_id in self._nodes

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
        known, nodes, found, parent = self._block_of.get(tenant, {}), self._nodes, list[int](), ROOT
        for prefix_hash in hashes:
            block_id = known.get(prefix_hash)
            if block_id is None:
                break
            if nodes[block_id].parent_hash != parent:
                raise _not_chained(prefix_hash)
            found.append(block_id)
            parent = prefix_hash
        return found

    def find(self, tenant: int, prefix_hash: bytes) -> int | None:
        """The block of that name, whatever comes before it."""
        return self._block_of.get(tenant, {}).get(prefix_hash)

    def twin(self, node: Node) -> int | None:
        """The block sealed under that name before, if any. Raises if it has another parent."""
        block_id = self._block_of.get(node.tenant, {}).get(node.prefix_hash)
        if block_id is not None and self._nodes[block_id].parent_hash != node.parent_hash:
            raise _not_chained(node.prefix_hash)
        return block_id

    def add(self, block_id: int, node: Node) -> None:
        assert block_id not in self._nodes, "sealed twice"
        self._nodes[block_id] = node
        self._block_of.setdefault(node.tenant, {})[node.prefix_hash] = block_id

    def cache(self, block_ids: Sequence[int]) -> None:
        """These lost their last holder. Given in sequence order; deeper ones will be evicted first."""
        fresh = set(block_ids)
        for block_id in reversed(block_ids):
            self._cached[block_id] = None
            self._touch_ancestors(block_id, fresh)

    def uncache(self, block_ids: Sequence[int]) -> None:
        """These have a holder again."""
        for block_id in block_ids:
            del self._cached[block_id]

    def evict(self, count: int) -> list[int]:
        """Forget the `count` cached blocks that are due, oldest and deepest first."""
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count)]
        for block_id in evicted:
            node = self._nodes.pop(block_id)
            names = self._block_of[node.tenant]
            del names[node.prefix_hash]
            if not names:
                del self._block_of[node.tenant]
        return evicted

    def _touch_ancestors(self, block_id: int, fresh: set[int]) -> None:
        """Cached ancestors become more recent than their descendant, up to one in `fresh`."""
        node = self._nodes[block_id]
        names = self._block_of[node.tenant]
        while (parent := names.get(node.parent_hash)) is not None and parent not in fresh:
            if parent in self._cached:
                self._cached.move_to_end(parent)
            node = self._nodes[parent]

    def nodes(self) -> Iterator[tuple[int, Node]]:
        yield from self._nodes.items()

    def tenants(self) -> list[int]:
        """Who has names here."""
        return list(self._block_of)

    def cached(self) -> list[int]:
        """Cached blocks, the next to be evicted first."""
        return list(self._cached)


def _not_chained(prefix_hash: bytes) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"prefix hash {prefix_hash.hex()} has another parent here; hashes must be chained"
    )
