"""Lease and extend: blocks out, all or none."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvd.errors import InvalidArgumentError, LimitExceededError
from kvd.limits import HASH_BYTES
from kvd.policy import Dense, Streaming

from . import forking, pinning, quotas
from .free_runs import NO_BLOCKS, IntArray, runs_of
from .lease import BlockTable, Lease, Mark, with_sinks
from .pins import Pin
from .pool import Pool
from .quotas import Need
from .registry import Registry, check_hashes, check_tokens, commit, distinct
from .results import Change, Extended, Granted, LeaseWish, Progress
from .scrubbing import begin_scrub
from .session import Session
from .streaming import Recycling, recycle


class _Entry(NamedTuple):
    """A wish that was checked: its shared blocks, the number of its own ones, the pin it takes over."""

    wish: LeaseWish
    shared: IntArray
    own_count: int
    pin: Pin | None = None


def grant(
    registry: Registry, session: Session, pool: Pool, wishes: Sequence[LeaseWish], now_ns: int
) -> Granted:
    """New leases, or an error and none."""
    entries, need = _entries(registry, session, pool, wishes)
    quotas.require(registry, session.tenant, [(pool, need)])
    tenant = registry.tenants[session.identity.tenant]
    for entry in entries:  # all of them before any block is granted, or granting might evict one
        if entry.pin is not None:
            pinning.forget(registry, entry.pin)
        elif entry.shared.size:
            pool.share(entry.shared, tenant)
    leases: list[Lease] = []
    foreign: dict[int, IntArray] = {}
    for entry in entries:
        lease = _admit(registry, session, pool, entry, now_ns)
        _append(pool, lease, entry.own_count, tenant, foreign)
        leases.append(lease)
    return Granted(leases, begin_scrub(leases, foreign, {}) if foreign else [])


def need_of_lease(registry: Registry, session: Session, pool: Pool, wishes: Sequence[LeaseWish]) -> Need:
    """What `grant` would take. Raises what it raises, except that blocks are short."""
    return _entries(registry, session, pool, wishes)[1]


def _entries(
    registry: Registry, session: Session, pool: Pool, wishes: Sequence[LeaseWish]
) -> tuple[list[_Entry], Need]:
    _check_lease_limits(registry, session, wishes)
    entries: list[_Entry] = []
    ordinary = scratch = 0
    shared: set[int] = set()
    pins: set[int] = set()
    for wish in wishes:
        entry = _entry(registry, session, pool, wish)
        entries.append(entry)
        if wish.scratch:
            scratch += entry.own_count
        else:
            ordinary += entry.own_count
        if entry.shared.size:
            shared.update(entry.shared.tolist())
        if entry.pin is not None:
            _add_distinct(pins, entry.pin)
    woken = sum([1 for block_id in shared if pool.blocks.holders[block_id] == 0]) if shared else 0
    return entries, Need(ordinary, scratch, woken)


def _check_lease_limits(registry: Registry, session: Session, wishes: Sequence[LeaseWish]) -> None:
    registry.at_most(wishes, registry.limits.items_per_call, "leases")
    registry.fences.require(len(wishes))
    count = len(session.leases) + len(wishes)
    if count > registry.limits.leases_per_session:
        raise LimitExceededError(
            f"{count} leases in one session, {registry.limits.leases_per_session} allowed; release some",
            limit=registry.limits.leases_per_session,
        )


def _entry(registry: Registry, session: Session, pool: Pool, wish: LeaseWish) -> _Entry:
    spec, pin, shared = pool.spec, None, NO_BLOCKS
    check_tokens(0, wish.tokens)
    if wish.floor:
        check_tokens(0, wish.floor)
    if wish.scratch and not isinstance(wish.policy, Dense):
        raise InvalidArgumentError("a scratch lease has neither a policy nor a prefix; leave both away")
    if wish.prefix_hashes or wish.pin_id:
        _check_may_share(wish)
        pin = pinning.taken(registry, session, pool, wish) if wish.pin_id else None
        shared = pin.blocks if pin is not None else _shared(registry, session, pool, wish.prefix_hashes)
    if isinstance(wish.policy, Streaming):
        return _Entry(wish, shared, wish.policy.capacity_blocks(spec.block_size))
    return _Entry(wish, shared, max(0, spec.blocks_for(wish.tokens) - shared.size), pin)


def _check_may_share(wish: LeaseWish) -> None:
    if wish.scratch:
        raise InvalidArgumentError("a scratch lease has neither a policy nor a prefix; leave both away")
    if isinstance(wish.policy, Streaming):
        raise InvalidArgumentError("a streaming lease recycles its blocks, so it can share no prefix")


def _add_distinct(pins: set[int], pin: Pin) -> None:
    if pin.pin_id in pins:
        raise InvalidArgumentError("a pin is named twice in one call; it becomes one lease's prefix")
    pins.add(pin.pin_id)


def _shared(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> IntArray:
    registry.at_most(hashes, registry.limits.hashes_per_call, "prefix hashes")
    check_hashes(hashes, HASH_BYTES)
    tenant = registry.tenants[session.identity.tenant]
    return np.array(pool.prefixes.find_all(tenant, hashes), np.int32)


def _admit(registry: Registry, session: Session, pool: Pool, entry: _Entry, now_ns: int) -> Lease:
    registry.last_lease_id += 1
    length = entry.shared.size * pool.spec.block_size
    identity, wish = session.identity, entry.wish
    lease = Lease(  # by place where that is clear: each name costs as much as its value
        registry.last_lease_id,
        pool.name,
        identity.session_id,
        identity.tenant,
        wish.policy,
        wish.scratch,
        pool.spec.block_size,
        now_ns,
        BlockTable(entry.shared),
        length=length,
        position=length,
        sealed_blocks=entry.shared.size,
        fence_slot=registry.fences.take(),
    )
    if wish.floor:
        lease.floor = with_sinks(wish.floor, wish.policy)
    registry.fences.show(lease)
    registry.leases[lease.lease_id] = session.leases[lease.lease_id] = lease
    pool.leases.add(lease.lease_id)
    return lease


def _append(pool: Pool, lease: Lease, count: int, tenant: int, foreign: dict[int, IntArray]) -> None:
    """`foreign` gets the new blocks that hold another tenant's bytes, if there are any."""
    if count:
        runs, dirty = pool.grant(count, tenant)
        lease.blocks.append(runs)
        if dirty.size:
            foreign[lease.lease_id] = dirty


class _Growth(NamedTuple):
    """An extend item that was checked."""

    lease: Lease
    pool: Pool
    progress: Progress
    new_blocks: int
    recycling: Recycling
    diverges: bool = False


def extend(registry: Registry, session: Session, items: Sequence[tuple[Progress, int]]) -> Extended:
    """Room for more tokens in each lease, or an error and no change. All leases lie in one device."""
    growths = _growths(registry, session, items)
    quotas.require(registry, session.tenant, _needs(growths))
    tenant = registry.tenants[session.identity.tenant]
    before: dict[int, Mark] = {}
    foreign: dict[int, IntArray] = {}
    copies: dict[int, tuple[int, int]] = {}
    changes: list[Change] = []
    for growth in growths:
        lease, blocks = growth.lease, growth.lease.blocks
        before[lease.lease_id] = Mark(
            blocks, len(blocks), lease.generation, lease.length, lease.position, lease.sealed_blocks
        )
        if growth.diverges:
            changes.append(_diverge(registry, growth, tenant, foreign, copies))
            continue
        _append(growth.pool, lease, growth.new_blocks, tenant, foreign)
        changes.append(_carry_out(registry, growth))
    if not foreign and not copies:
        return Extended(changes, [])
    scrub = begin_scrub([growth.lease for growth in growths], foreign, before, copies)
    return Extended(changes, scrub, [*copies.values()])


def _diverge(
    registry: Registry,
    growth: _Growth,
    tenant: int,
    foreign: dict[int, IntArray],
    copies: dict[int, tuple[int, int]],
) -> Change:
    """A lease whose tail is shared since a fork gets one of its own; `copies` has what goes into it."""
    lease, pool = growth.lease, growth.pool
    commit(lease, growth.progress)
    if not forking.needs_copy(pool, lease):
        kept_blocks = len(lease.blocks)
        forking.take_back(pool, lease)
        _append(pool, lease, growth.new_blocks, tenant, foreign)
        return Change(lease, kept_blocks)
    runs, dirty = pool.grant(growth.new_blocks, tenant)
    if dirty.size:
        foreign[lease.lease_id] = dirty
    copies[lease.lease_id] = forking.diverge(pool, lease, runs)
    registry.fences.show(lease)
    return Change(lease, lease.sealed_blocks)


def needs_of_extend(
    registry: Registry, session: Session, items: Sequence[tuple[Progress, int]]
) -> list[tuple[Pool, Need]]:
    """What `extend` would take, by pool. Raises what it raises, except that blocks are short."""
    return _needs(_growths(registry, session, items))


def _growths(registry: Registry, session: Session, items: Sequence[tuple[Progress, int]]) -> list[_Growth]:
    registry.at_most(items, registry.limits.items_per_call, "leases")
    distinct([progress.lease_id for progress, _ in items])
    return [_growth(registry, session, progress, tokens) for progress, tokens in items]


def _growth(registry: Registry, session: Session, progress: Progress, tokens: int) -> _Growth:
    lease = registry.standing(session, progress)
    check_tokens(progress.length, tokens)
    pool = registry.pools[lease.pool]
    if isinstance(lease.policy, Streaming):
        recycling = recycle(lease.policy, lease.block_size, progress.length, tokens)
        return _Growth(lease, pool, progress, 0, recycling)
    new_blocks = max(0, pool.spec.blocks_for(progress.length + tokens) - len(lease.blocks))
    diverges = bool(lease.sealed_blocks and tokens and lease.shares_tail)
    if diverges:
        new_blocks += forking.needs_copy(pool, lease)
    return _Growth(lease, pool, progress, new_blocks, Recycling(0, progress.length, 0, 0), diverges)


def _needs(growths: list[_Growth]) -> list[tuple[Pool, Need]]:
    wanted: dict[Pool, list[int]] = {}
    for growth in growths:
        ordinary_and_scratch = wanted.setdefault(growth.pool, [0, 0])
        ordinary_and_scratch[growth.lease.scratch] += growth.new_blocks
    return [(pool, Need(*blocks)) for pool, blocks in wanted.items()]


def _carry_out(registry: Registry, growth: _Growth) -> Change:
    lease, recycling = growth.lease, growth.recycling
    kept_blocks = len(lease.blocks) - growth.new_blocks
    commit(lease, growth.progress)
    if recycling.blocks:
        kept_blocks = lease.sink_block_count
        table, ring = lease.table, lease.table[kept_blocks:]
        lease.blocks = BlockTable(np.concatenate((table[:kept_blocks], np.roll(ring, -recycling.blocks))))
        growth.pool.blocks.reassign(runs_of(ring[: recycling.blocks]))
        lease.generation += 1
        registry.fences.show(lease)
    lease.length = recycling.length
    lease.position += recycling.skipped
    return Change(lease, kept_blocks, recycling.skip_after)
