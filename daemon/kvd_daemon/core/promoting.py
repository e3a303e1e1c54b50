"""Copies of cached blocks come back into blocks, for who asks for their prefix; and what ends all copying.

Only what lies in host memory: what is on disk moves there first (see moving).
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from . import pinning, quotas
from .blocks import BlockState
from .copies import abort_spill, drop_copies, drop_copy
from .free_runs import ids_of, runs_of
from .names import Node
from .parked import Name, Promotion, Tier
from .pool import Pool
from .prefix import ROOT
from .quotas import Need
from .registry import Registry
from .session import Session


def missing(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> list[Name]:
    """Those of `hashes` that follow what is in blocks and have copies. Raises as `pinning.leading`."""
    tenant = registry.tenants[session.tenant]
    here = len(pinning.leading(registry, session, pool, hashes))
    found, parent = list[Name](), hashes[here - 1] if here else ROOT
    for prefix_hash in hashes[here:]:
        copy = registry.copies.get((pool.name, tenant, prefix_hash))
        if copy is None or copy.parent_hash != parent or pool.prefixes.find(tenant, prefix_hash) is not None:
            break
        found.append((pool.name, tenant, prefix_hash))
        parent = prefix_hash
    return found


def at_hand(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> list[Name]:
    """The first ones of `missing`, those in host memory."""
    there = registry.copies.on(Tier.HOST)
    return [*takewhile(there.__contains__, missing(registry, session, pool, hashes))]


def need(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> Need:
    """What bringing those back would take: a block each, and what lies before them stays."""
    woken = pinning.need(registry, session, pool, hashes).woken
    return Need(ordinary=len(at_hand(registry, session, pool, hashes)), woken=woken)


def begin_promotion(
    registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]
) -> Promotion | None:
    """Take blocks for what is at hand; None if that is nothing."""
    names = at_hand(registry, session, pool, hashes)
    if not names:
        return None
    tenant = registry.tenants[session.tenant]
    quotas.require(registry, session.tenant, [(pool, need(registry, session, pool, hashes))])
    leading = np.array(pinning.leading(registry, session, pool, hashes), np.int32)
    registry.copies.used(names)
    copies = [registry.copies[name] for name in names]
    pool.share(leading, tenant)  # so that they are not what is evicted
    runs, _ = pool.grant(len(names), tenant)  # all of them are written over
    pool.unshare(leading, tenant)
    registry.last_move_id += 1
    promotion = Promotion(
        registry.last_move_id,
        pool.name,
        tenant,
        [prefix_hash for _, _, prefix_hash in names],
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
    name, slot = promotion.names[index], promotion.slots[index]
    copy = registry.copies.on(Tier.HOST).get(name)
    if copy is not None and (copy.slot, copy.checksum) == (slot, promotion.checksums[index]):
        drop_copy(registry, name)


def abort_promotion(registry: Registry, promotion_id: int) -> None:
    promotion = registry.promotions.pop(promotion_id, None)
    if promotion is not None:
        blocks = runs_of(np.sort(promotion.blocks))
        registry.pools[promotion.pool].give_back(blocks, BlockState.LEASED, promotion.tenant)


def forget_pool(registry: Registry, pool: str | None = None) -> None:
    """Nothing is copied there or back any more (None: anywhere); with a pool its copies go too."""
    for spill in [spill for spill in registry.spills.values() if pool in (None, spill.pool)]:
        abort_spill(registry, spill.spill_id)
    for promotion in [each for each in registry.promotions.values() if pool in (None, each.pool)]:
        abort_promotion(registry, promotion.promotion_id)
    if pool is not None:
        for tier in Tier:
            drop_copies(registry, tier, [pool])
