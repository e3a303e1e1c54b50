"""Copies of cached blocks in slots of the host tier: whoever asks for an evicted prefix finds it there.

A cached block is copied while it is cached, and stays as it is meanwhile: findable, evictable. If it is
another block by the time the copy is done, the copy is forgotten. One that has a copy costs nothing to evict.
Copies go, least recently used first, when slots are short; what leases have parked never does.
"""

from collections.abc import Sequence

import numpy as np

from kvd.errors import InvalidArgumentError

from . import pinning, quotas
from .blocks import BlockState
from .free_runs import IntArray, ids_of, runs_of
from .names import Node
from .parked import Copy, Promotion, Spill, Tier
from .pool import Pool
from .prefix import ROOT
from .quotas import Need
from .registry import Registry
from .session import Session
from .tiers import slot_bytes

Name = tuple[str, int, bytes]
"""Pool, tenant and prefix hash."""


def copied_bytes(registry: Registry) -> int:
    """What copies take of the host tier, and would give for what leases park."""
    return sum(slot_bytes(registry.pools[pool].spec) for pool, _, _ in registry.copies)


def take_slots(registry: Registry, pool: Pool, count: int) -> IntArray:
    """For what must not be dropped: copies make room. Raises TierFullError."""
    arena, wanted = registry.arenas[Tier.HOST], count * slot_bytes(pool.spec)
    short = wanted - max(0, arena.budget_bytes - arena.used_bytes)
    if short > 0 and copied_bytes(registry) >= short:
        while arena.budget_bytes - arena.used_bytes < wanted and registry.copies:
            drop_copy(registry, next(iter(registry.copies)))
    return arena.take(pool, count)


def drop_copy(registry: Registry, name: Name) -> None:
    copy = registry.copies.pop(name)
    registry.arenas[Tier.HOST].give(registry.pools[name[0]], np.array([copy.slot], np.int32))


def forget_pool(registry: Registry, pool: str | None = None) -> None:
    """Nothing is copied there or back any more (None: anywhere); with a pool its copies go too."""
    for spill in [spill for spill in registry.spills.values() if pool in (None, spill.pool)]:
        abort_spill(registry, spill.spill_id)
    for promotion in [each for each in registry.promotions.values() if pool in (None, each.pool)]:
        abort_promotion(registry, promotion.promotion_id)
    if pool is not None:
        drop_copies(registry, [pool])


def drop_copies(registry: Registry, pools: Sequence[str]) -> None:
    for name in [name for name in registry.copies if name[0] in pools]:
        drop_copy(registry, name)


def begin_spill(registry: Registry, pool: Pool, count: int) -> Spill | None:
    """Cached blocks without a copy, the longest unused first, as many as there are slots for.

    Copies of blocks that are not here any more make room, but not those of blocks that are: else there would
    be no end to it.
    """
    arena = registry.arenas[Tier.HOST]
    wanted = _uncopied(registry, pool, count)
    _make_room(registry, pool, len(wanted))
    room = max(0, arena.budget_bytes - arena.used_bytes) // slot_bytes(pool.spec)
    blocks = wanted[:room]
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
    arena = registry.arenas[Tier.HOST]
    room = arena.budget_bytes - arena.used_bytes >= slot_bytes(pool.spec)
    gone = any(registry.pools[name[0]].prefixes.find(name[1], name[2]) is None for name in registry.copies)
    return (room or gone) and bool(_uncopied(registry, pool, 1))


def _uncopied(registry: Registry, pool: Pool, count: int) -> list[int]:
    spills = [each.blocks.tolist() for each in registry.spills.values() if each.pool == pool.name]
    under_way = {block_id for blocks in spills for block_id in blocks}
    found: list[int] = []
    for block_id in pool.prefixes.order.by_age().tolist():
        node = pool.prefixes.node(block_id)
        if len(found) == count:
            break
        if block_id not in under_way and (pool.name, node.tenant, node.prefix_hash) not in registry.copies:
            found.append(block_id)
    return found


def _make_room(registry: Registry, pool: Pool, count: int) -> None:
    arena, wanted = registry.arenas[Tier.HOST], count * slot_bytes(pool.spec)
    for name in list(registry.copies):
        if arena.budget_bytes - arena.used_bytes >= wanted:
            return
        if registry.pools[name[0]].prefixes.find(name[1], name[2]) is None:
            drop_copy(registry, name)


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
            registry.copies[name] = Copy(parent_hash, slot, checksums[index])
            kept += 1
        else:
            registry.arenas[Tier.HOST].give(pool, spill.slots[index : index + 1])
    return kept


def abort_spill(registry: Registry, spill_id: int) -> None:
    spill = registry.spills.pop(spill_id, None)
    if spill is not None:
        registry.arenas[Tier.HOST].give(registry.pools[spill.pool], spill.slots)


def missing(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> list[bytes]:
    """Those of `hashes` that follow what is in blocks and have copies. Raises as `pinning.leading`."""
    tenant = registry.tenants[session.tenant]
    here = len(pinning.leading(registry, session, pool, hashes))
    found, parent = list[bytes](), hashes[here - 1] if here else ROOT
    for prefix_hash in hashes[here:]:
        copy = registry.copies.get((pool.name, tenant, prefix_hash))
        if copy is None or copy.parent_hash != parent or pool.prefixes.find(tenant, prefix_hash) is not None:
            break
        found.append(prefix_hash)
        parent = prefix_hash
    return found


def begin_promotion(
    registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]
) -> Promotion | None:
    """Take blocks for what `missing` tells; None if that is nothing."""
    wanted = missing(registry, session, pool, hashes)
    if not wanted:
        return None
    tenant = registry.tenants[session.tenant]
    leading = np.array(pinning.leading(registry, session, pool, hashes), np.int32)
    woken = int(np.count_nonzero(pool.blocks.holders[leading] == 0))
    quotas.require(registry, session.tenant, [(pool, Need(ordinary=len(wanted), woken=woken))])
    names = [(pool.name, tenant, prefix_hash) for prefix_hash in wanted]
    copies = [registry.copies.pop(name) for name in names]
    registry.copies |= dict(zip(names, copies, strict=True))  # the most recently used ones
    pool.share(leading, tenant)  # so that they are not what is evicted
    runs, _ = pool.grant(len(wanted), tenant)  # all of them are written over
    pool.unshare(leading, tenant)
    registry.last_move_id += 1
    promotion = Promotion(
        registry.last_move_id,
        pool.name,
        tenant,
        wanted,
        [copy.parent_hash for copy in copies],
        ids_of(runs),
        np.array([copy.slot for copy in copies], np.int32),
        np.array([copy.checksum for copy in copies], np.uint32),
    )
    registry.promotions[promotion.promotion_id] = promotion
    return promotion


def finish_promotion(registry: Registry, promotion_id: int, damaged: Sequence[int]) -> int:
    """Blocks before the first damaged one are cached under their names; how many. A damaged copy is none."""
    promotion = registry.promotions.pop(promotion_id, None)
    if promotion is None:
        return 0
    pool, tenant = registry.pools[promotion.pool], promotion.tenant
    for index in damaged:
        _drop_damaged(registry, promotion, index)
    pool.blocks.cleaned(np.delete(promotion.blocks, list(damaged)), tenant)
    good = min(damaged, default=len(promotion.hashes))
    fresh = [i for i in range(good) if pool.prefixes.find(tenant, promotion.hashes[i]) is None]
    ids = promotion.blocks[fresh]
    rest = np.delete(promotion.blocks, fresh)
    if rest.size:
        pool.give_back(runs_of(np.sort(rest)), BlockState.LEASED, tenant)
    if ids.size:
        nodes = [Node(tenant, promotion.hashes[i], promotion.parents[i]) for i in fresh]
        pool.freeze(ids)
        pool.give_names(ids, nodes)
        pool.unshare(ids, tenant)
    return len(fresh)


def _drop_damaged(registry: Registry, promotion: Promotion, index: int) -> None:
    """Unless it is another copy by now."""
    name = promotion.pool, promotion.tenant, promotion.hashes[index]
    copy = registry.copies.get(name)
    if (
        copy is not None
        and copy.slot == promotion.slots[index]
        and copy.checksum == promotion.checksums[index]
    ):
        drop_copy(registry, name)


def abort_promotion(registry: Registry, promotion_id: int) -> None:
    promotion = registry.promotions.pop(promotion_id, None)
    if promotion is not None:
        blocks = runs_of(np.sort(promotion.blocks))
        registry.pools[promotion.pool].give_back(blocks, BlockState.LEASED, promotion.tenant)
