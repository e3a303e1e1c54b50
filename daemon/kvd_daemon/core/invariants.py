"""Everything that is derived, recounted from what it is derived from."""

from collections import Counter
from itertools import pairwise

import numpy as np

from kvd.policy import Streaming

from .blocks import NULL_BLOCK, BlockState
from .lease import LIVE, Compacting, Ending, Lease, LeaseState, Lending, Scrubbing
from .parked import Fetching, Promotion, Tier
from .pins import Pin
from .pool import Pool
from .registry import Registry
from .session import SessionState
from .tiers import slot_bytes

HAVE_BLOCKS = (LeaseState.ACTIVE, LeaseState.RESTING)  # of the living; a suspended lease has slots


class InvariantError(AssertionError):
    """A bug in kvd: the books do not add up."""


def check(registry: Registry, memory_bytes: int) -> None:
    """Raises InvariantError naming what is wrong."""
    used = sum(pool.spec.pool_bytes(pool.blocks_total) for pool in registry.pools.values())
    _hold(used <= memory_bytes, f"pools take {used} of {memory_bytes} bytes")
    for lease in registry.leases.values():
        _check_lease(registry, lease)
    for pin in registry.pins.values():
        _check_pin(registry, pin)
    for session in registry.sessions.values():
        for lease_id in session.leases:
            _hold(lease_id in registry.leases, f"session {session.session_id} owns unknown lease {lease_id}")
    for pool in registry.pools.values():
        leases = [registry.leases[lease_id] for lease_id in pool.leases]
        promoted = [each for each in registry.promotions.values() if each.pool == pool.name]
        _check_states(
            pool, leases, promoted, [pin for pin in registry.pins.values() if pin.pool == pool.name]
        )
        _check_free(pool)
        _check_prefixes(pool)
        _check_holdings(registry, pool, leases)
    _check_shelf(registry)
    _check_fences(registry)
    _check_totals(registry)
    _check_slots(registry)
    _check_copies(registry)
    listed = [lease_id for pool in registry.pools.values() for lease_id in pool.leases]
    poolless = registry.leases.keys() - listed
    _hold(len(listed) + len(poolless) == len(registry.leases), "every lease is listed by its pool, once")
    for lease in map(registry.leases.__getitem__, poolless):
        gone = lease.fate is not LeaseState.ACTIVE and not lease.blocks
        _hold(gone, f"lease {lease.lease_id} has blocks of a pool that is no more")


def _check_holdings(registry: Registry, pool: Pool, leases: list[Lease]) -> None:
    """What tenants hold follows from their leases and from the sealed blocks that have holders."""
    held: Counter[int] = Counter()
    nameless: dict[int, int] = {}
    for promotion in registry.promotions.values():
        if promotion.pool == pool.name:
            held[promotion.tenant] += promotion.blocks.size
    for lease in leases:
        tenant = registry.tenants[lease.tenant]
        held[tenant] += len(_own_blocks(lease))
        shared = [*lease.sealed.tolist(), *_copied(lease)]
        nameless.update((block, tenant) for block in shared if not pool.prefixes.has_name(block))
    held.update(nameless.values())
    for block_id, node in pool.prefixes.nodes():
        held[node.tenant] += int(pool.blocks.holders[block_id] > 0)
    _hold(pool.holdings.held == +held, f"pool {pool.name}: tenants hold {held}, not {pool.holdings.held}")
    owed = pool.holdings.recounted_owed()
    _hold(pool.holdings.owed_blocks == owed, f"pool {pool.name}: {owed} blocks are owed to guarantees")


def _check_totals(registry: Registry) -> None:
    held: Counter[int] = Counter()
    for pool in registry.pools.values():
        held.update(pool.holdings.held)
    _hold(registry.quotas.held == dict(held), f"tenants hold {dict(held)}, not {registry.quotas.held}")


def _check_fences(registry: Registry) -> None:
    slots = {lease.fence_slot: lease.fence for lease in registry.leases.values()}
    _hold(len(slots) == len(registry.leases), "two leases have one fence")
    expected = {slot: word for slot, word in slots.items() if word}
    _hold(registry.fences.shown() == expected, "the fences show what no lease is")


def _hold(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(what)


def _check_lease(registry: Registry, lease: Lease) -> None:
    name, session = f"lease {lease.lease_id}", registry.sessions.get(lease.session_id)
    if session is None:
        settled = lease.ending is Ending.RECLAIM and lease.job is not None
        _hold(settled or lease.fate is LeaseState.SHELVED, f"{name} outlived its session")
    else:
        _hold(session.leases.get(lease.lease_id) is lease, f"{name} is not listed by its session")
        settled = lease.fate not in LIVE or lease.job is not None
        _hold(session.state is not SessionState.EXPIRED or settled, f"{name} outlived its session's TTL")
    _hold(lease.ending is None or lease.job is not None, f"{name} is idle but waits to end")
    if lease.fate in (*HAVE_BLOCKS, LeaseState.LOST, LeaseState.SHELVED):
        _hold(lease.length <= lease.capacity, f"{name} has {lease.length} slots in use of {lease.capacity}")
    _hold(lease.length <= lease.position, f"{name} has more slots in use than positions")
    _hold(lease.compressed_length <= lease.length, f"{name}: more explicit positions than slots in use")
    _hold(lease.observed_length <= lease.length, f"{name}: more running scores than slots in use")
    _hold(lease.sealed_blocks <= lease.used_blocks, f"{name}: a sealed block holds no token")
    if lease.shares_tail and lease.blocks:
        pool = registry.pools[lease.pool]
        named = pool.prefixes.has_name(int(lease.sealed[-1]))
        _hold(not named, f"{name}: a block that is not full has a name")
    _hold(len(set(lease.table.tolist())) == len(lease.blocks), f"{name} has a block twice")
    suspended = lease.fate is LeaseState.SUSPENDED
    _hold(suspended == (lease.parked is not None), f"{name} is suspended by half")
    _hold(not (suspended and lease.blocks), f"{name} is suspended and has blocks")
    if isinstance(lease.job, Lending):
        _hold(lease.job.borrower_lease_id in registry.leases, f"{name} lends queries to nobody")
    if isinstance(lease.policy, Streaming) and lease.fate in HAVE_BLOCKS:
        wanted = lease.policy.capacity_blocks(lease.block_size)
        _hold(len(lease.blocks) == wanted, f"{name} streams in {len(lease.blocks)} blocks, not {wanted}")


def _check_shelf(registry: Registry) -> None:
    """A published lease is on the shelf, has no session and no job; every other one is not."""
    for lease in registry.leases.values():
        shelved, name = lease.shelved, f"lease {lease.lease_id}"
        _hold((lease.fate is LeaseState.SHELVED) == (shelved is not None), f"{name} is shelved by half")
        if shelved is not None:
            place = lease.tenant, lease.pool, shelved.key
            _hold(registry.shelf.get(place) is lease, f"{name} is not on the shelf")
            _hold(lease.session_id == "" and lease.job is None, f"{name} has two owners")
    shelved_leases = [lease for lease in registry.leases.values() if lease.shelved is not None]
    _hold(len(registry.shelf) == len(shelved_leases), "the shelf has a lease that is no more")
    for tenant, count in Counter(lease.tenant for lease in shelved_leases).items():
        _hold(registry.shelf.count(tenant) == count, f"tenant {tenant} has {count} leases on the shelf")


def _check_pin(registry: Registry, pin: Pin) -> None:
    name = f"pin {pin.pin_id}"
    _hold(pin.pool in registry.pools, f"{name} is of a pool that is no more")
    _hold(pin.blocks.size > 0, f"{name} holds nothing")
    _hold(pin.is_hard == (pin.session_id == ""), f"{name} is neither hard nor a session's")
    if not pin.is_hard:
        session = registry.sessions.get(pin.session_id)
        listed = session is not None and session.pins.get(pin.pin_id) is pin
        _hold(listed, f"{name} is not listed by its session")
    listed_pins = sum(len(session.pins) for session in registry.sessions.values())
    soft = sum(not pin.is_hard for pin in registry.pins.values())
    _hold(listed_pins == soft, "a session has a pin that is no more")


def _check_states(pool: Pool, leases: list[Lease], promoted: list[Promotion], pins: list[Pin]) -> None:
    """Every block's state follows from who has it."""
    expected = np.full(pool.blocks_total, BlockState.FREE, np.uint8)
    expected[NULL_BLOCK] = BlockState.NULL
    writers: Counter[int] = Counter()
    holders = np.zeros(pool.blocks_total, np.int32)
    for lease in leases:
        own = _own_blocks(lease)
        writers.update(own)
        fenced = lease.fate in (LeaseState.REVOKED, LeaseState.EXPIRED)
        expected[own] = BlockState.QUARANTINED if fenced else BlockState.LEASED
        holders[lease.sealed] += 1
        holders[_copied(lease)] += 1
    for promotion in promoted:
        writers.update(promotion.blocks.tolist())
        expected[promotion.blocks] = BlockState.LEASED
    for pin in pins:
        holders[pin.blocks] += 1
    expected[np.flatnonzero(holders)] = BlockState.SEALED
    named = [block_id for block_id, _ in pool.prefixes.nodes()]
    expected[named] = np.where(holders[named] > 0, BlockState.SEALED, BlockState.CACHED)
    twice = [block_id for block_id, count in writers.items() if count > 1]
    _hold(not twice, f"pool {pool.name}: blocks {twice[:5]} have two writers")
    sealed = [*named, *np.flatnonzero(holders).tolist()]
    _hold(not any(writers[block_id] for block_id in sealed), f"pool {pool.name}: a sealed block has a writer")
    _hold(bool((pool.blocks.holders == holders).all()), f"pool {pool.name}: holders do not add up")
    wrong = np.flatnonzero(pool.blocks.state != expected)
    _hold(wrong.size == 0, f"pool {pool.name}: blocks {wrong[:5].tolist()} are in the wrong state")
    counted = tuple(int(np.count_nonzero(expected == state)) for state in BlockState)
    _hold(tuple(pool.counts) == counted, f"pool {pool.name}: counts {pool.counts} are not {counted}")
    _hold(sum(pool.counts) == pool.blocks_total, f"pool {pool.name}: blocks were lost or made")


def _copied(lease: Lease) -> list[int]:
    """The shared block that a copy for this lease is made of, which it has let go of otherwise."""
    job = lease.job
    return [job.copy[0]] if isinstance(job, Scrubbing) and job.copy is not None else []


def _own_blocks(lease: Lease) -> list[int]:
    own: list[int] = lease.writable.tolist()
    if isinstance(lease.job, Compacting) and not lease.job.target.in_place:
        own += lease.job.destination.tolist()
    if isinstance(lease.job, Fetching):
        own += lease.job.destination.tolist()
    return own


def _check_slots(registry: Registry) -> None:
    """Slots in use are those that leases, copies and jobs have, each of one."""
    for tier, arena in registry.arenas.items():
        found: dict[str, list[int]] = {}
        for lease in registry.leases.values():
            for _, slots in [each for each in lease.slots() if each[0] is tier]:
                found.setdefault(lease.pool, []).extend(slots.tolist())
        for move in [move for move in registry.moves.values() if move.tier is tier]:
            found.setdefault(move.pool, []).extend(move.slots.tolist())
        for (name, _, _), copy in registry.copies.on(tier).items():
            found.setdefault(name, []).append(copy.slot)
        if tier is Tier.HOST:
            for spill in registry.spills.values():
                found.setdefault(spill.pool, []).extend(spill.slots.tolist())
        expected = {pool: set(slots) for pool, slots in found.items() if slots}
        _hold(
            sum(map(len, found.values())) == sum(map(len, expected.values())),
            f"{tier}: a slot is taken twice",
        )
        _hold(dict(arena.used()) == expected, f"{tier}: slots in use are not those that somebody has")
        used = sum(slot_bytes(registry.pools[pool].spec) * len(slots) for pool, slots in expected.items())
        _hold(arena.used_bytes == used, f"{tier}: {arena.used_bytes} bytes in use, {used} counted")


def _check_copies(registry: Registry) -> None:
    """Each name has one, where its place says, and they are counted by pool."""
    for tier in registry.arenas:
        there = registry.copies.on(tier)
        _hold(all(copy.tier is tier for copy in there.values()), f"{tier}: a copy lies elsewhere")
        for pool in registry.pools:
            counted = sum(name[0] == pool for name in there)
            _hold(registry.copies.count(tier, pool) == counted, f"{tier}: copies of {pool} are miscounted")
    names = [name for tier in registry.arenas for name in registry.copies.on(tier)]
    _hold(len(names) == len(set(names)), "a block has two copies")


def _check_free(pool: Pool) -> None:
    runs = sorted(pool.free_runs.runs())
    listed = np.zeros(pool.blocks_total, bool)
    for start, count in runs:
        _hold(not listed[start : start + count].any(), f"pool {pool.name}: free runs overlap at {start}")
        listed[start : start + count] = True
    free = pool.blocks.state == BlockState.FREE
    _hold(bool((listed == free).all()), f"pool {pool.name}: free runs are not the free blocks")
    _hold(pool.free_runs.count == int(free.sum()), f"pool {pool.name}: free blocks are miscounted")
    apart = all(start + count < after for (start, count), (after, _) in pairwise(runs))
    _hold(apart, f"pool {pool.name}: neighbouring free runs did not melt")


def _check_prefixes(pool: Pool) -> None:
    """The cached blocks are those in eviction order, children before their parents."""
    order = {block_id: rank for rank, block_id in enumerate(pool.prefixes.cached())}
    cached = set(np.flatnonzero(pool.blocks.state == BlockState.CACHED).tolist())
    _hold(set(order) == cached, f"pool {pool.name}: the eviction order is not of the cached blocks")
    names = {(node.tenant, node.prefix_hash): block_id for block_id, node in pool.prefixes.nodes()}
    for block_id, node in pool.prefixes.nodes():
        found = pool.prefixes.find(node.tenant, node.prefix_hash)
        _hold(found == block_id, f"pool {pool.name}: block {block_id} is not found by its name")
        parent = names.get((node.tenant, node.parent_hash))
        if block_id in order and parent in order:
            _hold(order[block_id] < order[parent], f"pool {pool.name}: a parent is evicted before its child")
