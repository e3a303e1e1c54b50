"""What is parked moves between tiers: to disk when host memory is short, and back before it is fetched.

Nobody waits for that but who wants it back. Until a move is finished everything is where it was.
"""

from dataclasses import replace

from .copies import take_slots
from .fetching import lose_parked
from .lease import Lease
from .parked import Fetching, Move, Parked, Tier
from .registry import Registry


def parcel(lease: Lease, is_checkpoint: bool) -> Parked | None:
    return lease.checkpoint if is_checkpoint else lease.parked


def begin_move(registry: Registry, lease_id: int, is_checkpoint: bool, tier: Tier) -> Move:
    """Take slots there."""
    lease = registry.leases[lease_id]
    parked = parcel(lease, is_checkpoint)
    assert parked is not None, f"lease {lease_id} has no such thing to move"
    assert parked.tier is not tier, "it is there"
    pool, count = registry.pool_of(lease), parked.slots.size
    on_disk = tier is Tier.DISK
    slots = registry.arenas[tier].take(pool, count) if on_disk else take_slots(registry, pool, count)
    registry.last_move_id += 1
    move = Move(registry.last_move_id, lease.pool, lease_id, is_checkpoint, parked, tier, slots)
    registry.moves[move.move_id] = move
    return move


def is_current(registry: Registry, move: Move) -> bool:
    """Whether what was moved is still wanted, and where it was. What is being fetched stays."""
    lease = registry.leases.get(move.lease_id)
    if lease is None or isinstance(lease.job, Fetching):
        return False
    now, then = parcel(lease, move.is_checkpoint), move.parked
    if now is None or now.tier is not then.tier or now.slots.size != then.slots.size:
        return False
    return bool((now.slots == then.slots).all() and (now.checksums == then.checksums).all())


def finish_move(registry: Registry, move_id: int) -> bool:
    """The bytes are in the slots; whether they are of use."""
    move = registry.moves.get(move_id)
    if move is None or not is_current(registry, move):
        return _forget(registry, move)
    del registry.moves[move_id]
    lease = registry.leases[move.lease_id]
    registry.arenas[move.parked.tier].give(registry.pool_of(lease), move.parked.slots)
    moved = replace(move.parked, tier=move.tier, slots=move.slots)
    if move.is_checkpoint:
        lease.checkpoint = moved
    else:
        lease.parked = moved
    return True


def abort_move(registry: Registry, move_id: int, lost: bool) -> bool:
    """They are not. Lost: what should be moved is damaged or gone. Whether that took something away."""
    move = registry.moves.get(move_id)
    _forget(registry, move)
    if move is None or not lost or not is_current(registry, move):
        return False
    lease = registry.leases[move.lease_id]
    if move.is_checkpoint:
        registry.drop_checkpoint(lease)
    else:
        lose_parked(registry, lease)
    return True


def _forget(registry: Registry, move: Move | None) -> bool:
    if move is not None:
        del registry.moves[move.move_id]
        registry.arenas[move.tier].give(registry.pools[move.pool], move.slots)
    return False


def forget_moves(registry: Registry, pool: str | None = None) -> None:
    """Those of a pool that ends, or of a daemon that has ended: all."""
    for move in list(registry.moves.values()):
        if pool in (None, move.pool):
            _forget(registry, move)
