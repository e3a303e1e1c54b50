"""Which block is sealed under which name. A hash is kept once: a parent's name is the parent's own.

From a name to its block leads a table of block ids: 8 to 16 bytes for a block of the pool, none of them
touched before it is used. A dict would take 55 to 88, and now and then a while to grow. Lists grow with the
highest block named, so a pool of which little is sealed has small ones.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .blocks import NULL_BLOCK

KEY_PRIME = (1 << 64) - 59  # names that differ in any bits have other keys, also where engines pad with zeros
KEY_FACTOR = 0x9E3779B97F4A7C15  # spreads names that are near each other
UNNAMED = b""
PLACES_PER_BLOCK = 2  # at least: then whoever is looked for is met at the second place or earlier
TENANT_STEP = 0x9E3779B1  # places between the same name of two tenants


class Node(NamedTuple):
    """A sealed block's name: its own hash, the one before it, and whose it is."""

    tenant: int
    prefix_hash: bytes
    parent_hash: bytes

    @property
    def key(self) -> int:
        return key_of(self.tenant, self.prefix_hash)


def key_of(tenant: int, prefix_hash: bytes) -> int:
    """64 bits that tell a name from others, the same in every process."""
    name = int.from_bytes(prefix_hash, "little") + (tenant << 8 * len(prefix_hash))
    return name * KEY_FACTOR % KEY_PRIME


@dataclass(frozen=True)
class NamesImage:
    """By block id, shared with nobody."""

    hashes: list[bytes]
    parents: list[bytes]
    tenants: "array[int]"

    def plain(self) -> dict[str, Any]:
        """Values that a journal can write."""
        blocks = [block_id for block_id, name in enumerate(self.hashes) if name is not UNNAMED]
        return {
            "node_blocks": blocks,
            "node_tenants": [self.tenants[block_id] for block_id in blocks],
            "node_hashes": [self.hashes[block_id] for block_id in blocks],
            "node_parents": [self.parents[block_id] for block_id in blocks],
        }


class Names:
    """Blocks below `total` by tenant and hash, and back.

    A name's hash says at which place of the table its block is, or behind which: the next one was empty.
    `hash` of bytes differs from process to process, so nobody can choose names that all meet at one place.
    `_after` has the block that was last sealed after each: where a lookup of a run goes on, if it is right.
    """

    def __init__(self, total: int) -> None:
        self._hashes: list[bytes] = []
        self._parents: list[bytes] = []
        self._tenants = array("h")
        self._after = array("i")
        self._places = np.zeros(1 << (PLACES_PER_BLOCK * total - 1).bit_length(), np.int32).data
        self._last_place = len(self._places) - 1
        self._last_added = NULL_BLOCK
        self._grow(1)

    @classmethod
    def of(cls, total: int, nodes: Mapping[int, Node]) -> "Names":
        """With these nodes by block id."""
        made = cls(total)
        made._grow(max(nodes, default=NULL_BLOCK))
        for block_id, (tenant, prefix_hash, _) in nodes.items():
            made._put(block_id, tenant, prefix_hash)
        for block_id, (tenant, _, parent_hash) in nodes.items():
            before = made.find(tenant, parent_hash) or NULL_BLOCK if parent_hash else NULL_BLOCK
            made._after[before] = block_id
            made._parents[block_id] = made._hashes[before] or parent_hash
        return made

    def __contains__(self, block_id: int) -> bool:
        return block_id < len(self._hashes) and self._hashes[block_id] is not UNNAMED

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        for block_id, name in enumerate(self._hashes):
            if name is not UNNAMED:
                yield block_id, self.node(block_id)

    def node(self, block_id: int) -> Node:
        return Node(self._tenants[block_id], self._hashes[block_id], self._parents[block_id])

    def parent(self, block_id: int) -> bytes:
        return self._parents[block_id]

    def parents(self, block_ids: Sequence[int]) -> list[bytes]:
        return list(map(self._parents.__getitem__, block_ids))

    def follows(self, block_id: int, before: int) -> bool:
        """Whether it is sealed as the next one; both are of one tenant."""
        return self._parents[block_id] == self._hashes[before]

    def before(self, block_id: int) -> int | None:
        """The block of its parent, if that is here."""
        parent_hash = self._parents[block_id]
        return self.find(self._tenants[block_id], parent_hash) if parent_hash else None

    def find(self, tenant: int, prefix_hash: bytes) -> int | None:
        places, hashes, last = self._places, self._hashes, self._last_place
        place = hash(prefix_hash) + tenant * TENANT_STEP & last
        while block_id := places[place]:
            if hashes[block_id] == prefix_hash and self._tenants[block_id] == tenant:
                return block_id
            place = place + 1 & last
        return None

    def leading(self, tenant: int, prefix_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest leading run of these that is here."""
        hashes, tenants, after = self._hashes, self._tenants, self._after
        found: list[int] = []
        block_id = NULL_BLOCK
        for prefix_hash in prefix_hashes:
            block_id = after[block_id]
            if hashes[block_id] != prefix_hash or tenants[block_id] != tenant:
                block_id = self.find(tenant, prefix_hash) or NULL_BLOCK
                if block_id == NULL_BLOCK:
                    break
            found.append(block_id)
        return found

    def add(self, block_id: int, node: Node) -> int:
        """It has that name; answers the name's key."""
        missing = block_id + 1 - len(self._hashes)
        if missing > 0:
            self._grow(missing)
        assert self._hashes[block_id] is UNNAMED, "sealed twice"
        assert block_id != NULL_BLOCK, "nobody seals the null block"
        tenant, prefix_hash, parent_hash = node
        before = self._last_added if parent_hash else NULL_BLOCK
        if parent_hash and self._hashes[before] is not parent_hash:  # mostly one is sealed after the other
            before = self.find(tenant, parent_hash) or NULL_BLOCK
        self._after[before] = self._last_added = block_id
        self._parents[block_id] = self._hashes[before] or parent_hash
        self._put(block_id, tenant, prefix_hash)
        return key_of(tenant, prefix_hash)

    def _put(self, block_id: int, tenant: int, prefix_hash: bytes) -> None:
        self._hashes[block_id], self._tenants[block_id] = prefix_hash, tenant
        places, last = self._places, self._last_place
        place = hash(prefix_hash) + tenant * TENANT_STEP & last
        while places[place]:
            place = place + 1 & last
        places[place] = block_id

    def _grow(self, count: int) -> None:
        self._hashes += [UNNAMED] * count
        self._parents += [UNNAMED] * count
        self._tenants.frombytes(bytes(count * self._tenants.itemsize))
        self._after.frombytes(bytes(count * self._after.itemsize))

    def remove(self, block_id: int) -> int:
        """Its name is free; answers the key that it had."""
        places, hashes, tenants, last = self._places, self._hashes, self._tenants, self._last_place
        tenant, prefix_hash = tenants[block_id], hashes[block_id]
        place = hash(prefix_hash) + tenant * TENANT_STEP & last
        while places[place] != block_id:
            place = place + 1 & last
        other = place + 1 & last
        while behind := places[other]:  # whoever had to pass by the place moves up to it
            home = hash(hashes[behind]) + tenants[behind] * TENANT_STEP
            if other - home & last >= other - place & last:
                places[place], place = behind, other
            other = other + 1 & last
        places[place] = NULL_BLOCK
        hashes[block_id] = self._parents[block_id] = UNNAMED
        return key_of(tenant, prefix_hash)

    def image(self) -> NamesImage:
        """All of it, copied."""
        return NamesImage(self._hashes.copy(), self._parents.copy(), self._tenants[:])
