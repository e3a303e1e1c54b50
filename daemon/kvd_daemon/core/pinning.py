"""Match and pin: blocks that are found by their hashes stay where they are, for a while or for good."""

from collections.abc import Sequence

import numpy as np

from kvd.errors import (
    InvalidArgumentError,
    LimitExceededError,
    PinNotFoundError,
    PoolInUseError,
    QuotaExceededError,
)
from kvd.limits import HASH_BYTES

from . import quotas
from .free_runs import IntArray
from .limits import MAX_PIN_TTL_NS
from .pins import Pin
from .pool import Pool
from .quotas import Need
from .registry import Registry, check_hashes
from .results import LeaseWish, Matched
from .session import Session

MAX_PINS_NAMED = 5  # pins in an error's text; `kvctl pin list` has them all


def leading(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> list[int]:
    """The blocks of the longest leading run of `hashes` that is here.

    Raises InvalidArgumentError if they are no chain, LimitExceededError.
    """
    registry.at_most(hashes, registry.limits.hashes_per_call, "prefix hashes")
    check_hashes(hashes, HASH_BYTES)
    return pool.prefixes.find_leading(registry.tenants[session.tenant], hashes)


def match(
    registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes], expires_ns: int
) -> Matched:
    """Pin what is here of `hashes` until then. Nothing here: no pin."""
    blocks = leading(registry, session, pool, hashes)
    if not blocks:
        return Matched(None, 0)
    limit = registry.limits.pins_per_session
    if len(session.pins) >= limit:
        raise LimitExceededError(
            f"a session may have {limit} matches at a time; lease by them or end some", limit=limit
        )
    held = np.array(blocks, np.int32)
    pin = Pin(0, session.tenant, pool.name, session.session_id, held, expires_ns)
    _hold(registry, pool, pin)
    session.pins[pin.pin_id] = pin
    return Matched(pin, len(blocks))


def end_of(ttl_ns: int, now_ns: int) -> int:
    """When a soft pin of now ends. Raises InvalidArgumentError."""
    if not 0 < ttl_ns <= MAX_PIN_TTL_NS:
        raise InvalidArgumentError(
            f"a match pins for {ttl_ns / 1e9:g} s; more than 0 and at most {MAX_PIN_TTL_NS // 10**9} s are "
            "possible, a hard pin lasts longer"
        )
    return now_ns + ttl_ns


def pin(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> Pin:
    """A hard pin of all `hashes`, or an error and none."""
    if not hashes:
        raise InvalidArgumentError("no hashes to pin; name at least one")
    registry.at_most(hashes, registry.limits.hashes_per_call, "prefix hashes")
    check_hashes(hashes, HASH_BYTES)
    blocks = pool.prefixes.find_all(registry.tenants[session.tenant], hashes)
    _check_budget(registry, session.tenant, len(blocks))
    pin = Pin(0, session.tenant, pool.name, "", np.array(blocks, np.int32), None)
    _hold(registry, pool, pin)
    return pin


def _check_budget(registry: Registry, tenant: str, wanted: int) -> None:
    """Every hard pin counts its blocks, also those that another pin has."""
    budget = registry.quotas.of(registry.tenants[tenant]).pin_blocks
    pinned = hard_pinned(registry, tenant)
    if pinned + wanted > budget:
        way_out = "unpin others" if budget else "none is given by default"
        raise QuotaExceededError(
            f"{wanted} blocks to be pinned by tenant {tenant}, which may pin {budget} and has pinned {pinned}"
            f"; {way_out}, or have pin_blocks of the tenant raised in kvd.toml",
            tenant=tenant,
            wanted_blocks=wanted,
            pinned_blocks=pinned,
            pin_blocks=budget,
        )


def hard_pinned(registry: Registry, tenant: str) -> int:
    """Blocks of the tenant's hard pins, in all pools."""
    return sum(pin.blocks.size for pin in registry.pins.values() if pin.is_hard and pin.tenant == tenant)


def check_unpinned(registry: Registry, pool: str) -> None:
    """Raises PoolInUseError where somebody wants blocks of that pool kept for good."""
    hard = [pin for pin in registry.pins.values() if pin.is_hard and pin.pool == pool]
    if hard:
        shown = ", ".join(f"{pin.pin_id} of tenant {pin.tenant}" for pin in hard[:MAX_PINS_NAMED])
        others = f" and {len(hard) - MAX_PINS_NAMED} more" if len(hard) > MAX_PINS_NAMED else ""
        raise PoolInUseError(
            f"pool {pool} has hard pins, {shown}{others}; end them first (kvctl pin drop ID), or drop "
            "the pool with them (--with-pins)"
        )


def woken(pool: Pool, blocks: IntArray) -> int:
    """How many of these sealed blocks nobody holds."""
    return int(np.count_nonzero(pool.blocks.holders[blocks] == 0))


def need(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> Need:
    """What keeping those that `leading` finds would take."""
    return Need(woken=woken(pool, np.array(leading(registry, session, pool, hashes), np.int32)))


def _hold(registry: Registry, pool: Pool, pin: Pin) -> None:
    """It holds its blocks from now on; raises as a lease that shares them would."""
    quotas.require(registry, pin.tenant, [(pool, Need(woken=woken(pool, pin.blocks)))])
    pool.share(pin.blocks, registry.tenants[pin.tenant])
    registry.last_pin_id += 1
    pin.pin_id = registry.last_pin_id
    registry.pins[pin.pin_id] = pin


def owned(registry: Registry, session: Session, pin_id: int) -> Pin:
    """A soft pin of that session's, or a hard one of its tenant's. Raises PinNotFoundError."""
    pin = known(registry, pin_id)
    if pin.tenant != session.tenant or pin.session_id not in ("", session.session_id):
        raise _no_pin(pin_id)
    return pin


def known(registry: Registry, pin_id: int) -> Pin:
    """Anybody's pin. Raises PinNotFoundError."""
    pin = registry.pins.get(pin_id)
    if pin is None:
        raise _no_pin(pin_id)
    return pin


def _no_pin(pin_id: int) -> PinNotFoundError:
    """One answer for all, so that nobody learns of another's pins."""
    return PinNotFoundError(
        f"no pin {pin_id} (any more): it ended, or was never yours; match again", pin_id=pin_id
    )


def taken(registry: Registry, session: Session, pool: Pool, wish: LeaseWish) -> Pin:
    """The pin a lease is to take over. Raises if it may not, or its blocks are others than the wish names."""
    pin, hashes = owned(registry, session, wish.pin_id), wish.prefix_hashes
    if pin.is_hard:
        raise InvalidArgumentError(f"pin {pin.pin_id} is a hard one and stays; lease by its hashes")
    if pin.pool != pool.name:
        raise InvalidArgumentError(f"pin {pin.pin_id} is of pool {pin.pool}; lease there")
    names = [pool.prefixes.node(block_id).prefix_hash for block_id in pin.blocks.tolist()] if hashes else []
    if list(hashes) != names:
        raise InvalidArgumentError(f"pin {pin.pin_id} has other hashes; name the same, or none")
    return pin


def forget(registry: Registry, pin: Pin) -> None:
    """The pin is no more; its blocks keep their holder, which is somebody else's now."""
    del registry.pins[pin.pin_id]
    if pin.session_id in registry.sessions:
        registry.sessions[pin.session_id].pins.pop(pin.pin_id)


def drop(registry: Registry, pin: Pin) -> Pin:
    """The pin ends, its blocks lose a holder."""
    forget(registry, pin)
    registry.pools[pin.pool].unshare(pin.blocks, registry.tenants[pin.tenant])
    return pin


def expire_pins(registry: Registry, now_ns: int) -> list[Pin]:
    """Soft pins past their TTL end."""
    due = [pin for pin in registry.pins.values() if pin.expires_ns is not None and pin.expires_ns <= now_ns]
    return [drop(registry, pin) for pin in due]


def postpone(registry: Registry, stood_ns: int) -> None:
    """Nobody could be heard for so long: soft pins last so much longer."""
    for pin in registry.pins.values():
        if pin.expires_ns is not None:
            pin.expires_ns += stood_ns


def outlast(registry: Registry, until_ns: int) -> None:
    """Soft pins end no earlier than that: their owners have to come back first."""
    for pin in registry.pins.values():
        if pin.expires_ns is not None:
            pin.expires_ns = max(pin.expires_ns, until_ns)
