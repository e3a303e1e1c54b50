"""Which block is sealed under which name. A hash is kept once: a parent's name is the parent's own.

Lists grow with the highest block named, so a pool of which little is sealed has small ones.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

KEY_PRIME = (1 << 64) - 59  # names that differ in any bits have other keys, also where engines pad with zeros
KEY_FACTOR = 0x9E3779B97F4A7C15  # spreads names that are near each other
UNNAMED = b""


@dataclass(frozen=True, slots=True)
class Node:
    """A sealed block's name: its own hash, the one before it, and whose it is."""

    tenant: int
    prefix_hash: bytes
    parent_hash: bytes

    @property
    def key(self) -> int:
        """64 bits that tell it from others, the same in every process."""
        name = int.from_bytes(self.prefix_hash, "little") + (self.tenant << 8 * len(self.prefix_hash))
        return name * KEY_FACTOR % KEY_PRIME


@dataclass(frozen=True)
class NamesImage:
    """By block id, shared with nobody; `order` is that of the tenants."""

    hashes: list[bytes]
    parents: list[bytes]
    tenants: "array[int]"
    order: list[int]

    def plain(self) -> dict[str, Any]:
        """Values that a journal can write."""
        blocks = [block_id for block_id, name in enumerate(self.hashes) if name is not UNNAMED]
        return {
            "node_blocks": blocks,
            "node_tenants": [self.tenants[block_id] for block_id in blocks],
            "node_hashes": [self.hashes[block_id] for block_id in blocks],
            "node_parents": [self.parents[block_id] for block_id in blocks],
            "node_order": self.order,
        }


class Names:
    """Blocks by tenant and hash, and back."""

    def __init__(self) -> None:
        self.block_of: dict[int, dict[bytes, int]] = {}
        self._hashes: list[bytes] = []
        self._parents: list[bytes] = []
        self._tenants = array("h")

    @classmethod
    def of(cls, nodes: dict[int, Node], order: Sequence[int]) -> "Names":
        """With these nodes by block id; tenants in this order."""
        made = cls()
        made.block_of = {tenant: {} for tenant in order}
        for block_id, node in nodes.items():
            made.add(block_id, node)
        for block_id, node in nodes.items():
            made._parents[block_id] = made._kept(node.tenant, node.parent_hash)
        return made

    def __contains__(self, block_id: int) -> bool:
        return block_id < len(self._hashes) and self._hashes[block_id] is not UNNAMED

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        for names in self.block_of.values():
            for block_id in names.values():
                yield block_id, self.node(block_id)

    def node(self, block_id: int) -> Node:
        return Node(self._tenants[block_id], self._hashes[block_id], self._parents[block_id])

    def parent(self, block_id: int) -> bytes:
        return self._parents[block_id]

    def before(self, block_id: int) -> int | None:
        """The block of its parent, if that is here."""
        return self.block_of[self._tenants[block_id]].get(self._parents[block_id])

    def find(self, tenant: int, prefix_hash: bytes) -> int | None:
        return self.block_of.get(tenant, {}).get(prefix_hash)

    def add(self, block_id: int, node: Node) -> None:
        assert block_id not in self, "sealed twice"
        missing = block_id + 1 - len(self._hashes)
        if missing > 0:
            self._hashes += [UNNAMED] * missing
            self._parents += [UNNAMED] * missing
            self._tenants.extend(bytes(missing))
        self._hashes[block_id] = node.prefix_hash
        self._parents[block_id] = self._kept(node.tenant, node.parent_hash)
        self._tenants[block_id] = node.tenant
        self.block_of.setdefault(node.tenant, {})[node.prefix_hash] = block_id

    def _kept(self, tenant: int, prefix_hash: bytes) -> bytes:
        """The same hash, as the very object that names its block."""
        block_id = self.find(tenant, prefix_hash)
        return prefix_hash if block_id is None else self._hashes[block_id]

    def remove(self, block_id: int) -> Node:
        """Its name is free; answers what it was."""
        node = self.node(block_id)
        names = self.block_of[node.tenant]
        del names[node.prefix_hash]
        if not names:
            del self.block_of[node.tenant]
        self._hashes[block_id] = self._parents[block_id] = UNNAMED
        return node

    def image(self) -> NamesImage:
        """All of it, copied."""
        return NamesImage(self._hashes.copy(), self._parents.copy(), self._tenants[:], list(self.block_of))
