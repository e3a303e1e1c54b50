"""Copies of cached blocks in slots of the tiers: whoever asks for an evicted prefix finds it there.

A cached block is copied while it is cached, and stays as it is meanwhile: findable, evictable. If it is
another block by the time the copy is done, the copy is forgotten. One that has a copy costs nothing to evict.
Copies go, least recently used first, when slots are short; what leases have parked never does.
"""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from kvd.errors import InvalidArgumentError

from .free_runs import IntArray
from .parked import Copy, CopyMove, Name, Promotion, Spill, Tier
from .pool import Pool
from .registry import Registry
from .tiers import slot_bytes

LOOKED_AT = 4096  # copies, the least recently used of a tier: what may go is among them, or nothing goes


def copied_bytes(registry: Registry, tier: Tier) -> int:
    """What copies take of a tier, and would give for what leases park."""
    pools = registry.pools.values()
    return sum(slot_bytes(pool.spec) * registry.copies.count(tier, pool.name) for pool in pools)


def take_slots(registry: Registry, tier: Tier, pool: Pool, count: int) -> IntArray:
    """For what must not be dropped: copies make room. Raises TierFullError."""
    arena, wanted = registry.arenas[tier], count * slot_bytes(pool.spec)
    if wanted and copied_bytes(registry, tier) >= wanted - arena.free_bytes:
        yield_bytes(registry, tier, wanted)
    return arena.take(pool, count)


def yield_bytes(registry: Registry, tier: Tier, wanted: int) -> None:
    """The least recently used copies there are dropped until so many bytes are free."""
    while registry.arenas[tier].free_bytes < wanted and registry.copies.on(tier):
        drop_copy(registry, next(iter(registry.copies.on(tier))))


def drop_copy(registry: Registry, name: Name) -> None:
    copy = registry.copies.pop(name)
    registry.arenas[copy.tier].give(registry.pools[name[0]], np.array([copy.slot], np.int32))


def drop_copies(registry: Registry, tier: Tier, pools: Sequence[str]) -> None:
    for name in [name for name in registry.copies.on(tier) if name[0] in pools]:
        drop_copy(registry, name)


def under_way(registry: Registry) -> set[Name]:
    """Copies that somebody reads right now; better not to touch them."""
    reads: list[CopyMove | Promotion] = [*registry.copy_moves(), *registry.promotions.values()]
    return {name for each in reads for name in each.names}


def room(registry: Registry, tier: Tier, pool: Pool, count: int) -> int:
    """How many slots there are for copies, `count` at most. If there are none, older copies make room.

    Those of blocks that are here do not: they would be copied again, and there would be no end to it.
    """
    arena, size = registry.arenas[tier], slot_bytes(pool.spec)
    if arena.free_bytes < size:
        read = under_way(registry)
        for name in _may_go(registry, tier):
            if name not in read:
                drop_copy(registry, name)
            if arena.free_bytes >= count * size:
                break
    return min(count, max(0, arena.free_bytes) // size)


def _may_go(registry: Registry, tier: Tier) -> list[Name]:
    oldest = islice(registry.copies.on(tier), LOOKED_AT)
    return [name for name in oldest if registry.pools[name[0]].prefixes.find(name[1], name[2]) is None]


def begin_spill(registry: Registry, pool: Pool, count: int) -> Spill | None:
    """Cached blocks without a copy, the longest unused first, as many as there are slots for."""
    arena = registry.arenas[Tier.HOST]
    wanted = uncopied(registry, pool, count)
    blocks = wanted[: room(registry, Tier.HOST, pool, len(wanted))]
    if not blocks:
        return None
    nodes = [pool.prefixes.node(block_id) for block_id in blocks]
    registry.last_move_id += 1
    ids = np.array(blocks, np.int32)
    spill = Spill(
        registry.last_move_id,
        pool.name,
        [node.tenant for node in nodes],
        [node.prefix_hash for node in nodes],
        [node.parent_hash for node in nodes],
        ids,
        pool.blocks.generation[ids],
        arena.take(pool, len(blocks)),
    )
    registry.spills[spill.spill_id] = spill
    return spill


def copyable(registry: Registry, pool: Pool) -> bool:
    """Whether there is a cached block without a copy, and a slot that it could have."""
    return has_room(registry, Tier.HOST, pool) and bool(uncopied(registry, pool, 1))


def has_room(registry: Registry, tier: Tier, pool: Pool) -> bool:
    """Whether a block of that pool could have a copy more there."""
    return registry.arenas[tier].free_bytes >= slot_bytes(pool.spec) or bool(_may_go(registry, tier))


def uncopied(registry: Registry, pool: Pool, count: int) -> list[int]:
    """Cached blocks without a copy, `count` at most, the longest unused first."""
    spills = [each.blocks.tolist() for each in registry.spills.values() if each.pool == pool.name]
    copying = {block_id for blocks in spills for block_id in blocks}
    found: list[int] = []
    for block_id in pool.prefixes.order.by_age().tolist():
        node = pool.prefixes.node(block_id)
        if len(found) == count:
            break
        if block_id not in copying and (pool.name, node.tenant, node.prefix_hash) not in registry.copies:
            found.append(block_id)
    return found


def finish_spill(registry: Registry, spill_id: int, checksums: Sequence[int]) -> int:
    """How many are of use: those whose block is what it was all the time."""
    spill = registry.spills.get(spill_id)
    if spill is None:
        return 0
    if len(checksums) != spill.slots.size:
        raise InvalidArgumentError(f"{len(checksums)} checksums of {spill.slots.size} slots")
    del registry.spills[spill_id]
    pool, kept = registry.pools[spill.pool], 0
    now = pool.blocks.generation[spill.blocks].tolist()
    names = zip(spill.tenants, spill.hashes, spill.parents, strict=True)
    rows = zip(names, spill.blocks.tolist(), spill.generations.tolist(), now, strict=True)
    for index, ((tenant, prefix_hash, parent_hash), block, before, after) in enumerate(rows):
        name, slot = (spill.pool, tenant, prefix_hash), int(spill.slots[index])
        same = before == after and pool.prefixes.find(tenant, prefix_hash) == block
        if same and name not in registry.copies:
            registry.copies.put(name, Copy(parent_hash, slot, checksums[index]))
            kept += 1
        else:
            registry.arenas[Tier.HOST].give(pool, spill.slots[index : index + 1])
    return kept


def abort_spill(registry: Registry, spill_id: int) -> None:
    spill = registry.spills.pop(spill_id, None)
    if spill is not None:
        registry.arenas[Tier.HOST].give(registry.pools[spill.pool], spill.slots)
