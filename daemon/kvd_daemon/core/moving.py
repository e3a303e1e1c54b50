"""What lies in slots moves between tiers: to disk when host memory is short, and back before it is wanted.

Parcels, that leases have parked, and copies of cached blocks. Nobody waits for a move but who wants back what
is moved. Until it is finished everything is where it was; what is not where it was any more has not moved.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from .copies import LOOKED_AT, drop_copy, has_room, room, take_slots, under_way
from .fetching import lose_parked
from .lease import Lease
from .parked import Copy, CopyMove, Fetching, Move, Name, Parked, Tier
from .pool import Pool
from .promoting import missing
from .registry import Registry
from .session import Session
from .tiers import slot_bytes


def parcel(lease: Lease, is_checkpoint: bool) -> Parked | None:
    return lease.checkpoint if is_checkpoint else lease.parked


def begin_move(registry: Registry, lease_id: int, is_checkpoint: bool, tier: Tier) -> Move:
    """Take slots there, also those of copies."""
    lease = registry.leases[lease_id]
    parked = parcel(lease, is_checkpoint)
    assert parked is not None, f"lease {lease_id} has no such thing to move"
    assert parked.tier is not tier, "it is there"
    slots = take_slots(registry, tier, registry.pool_of(lease), parked.slots.size)
    registry.last_move_id += 1
    move = Move(registry.last_move_id, lease.pool, lease_id, is_checkpoint, parked, tier, slots)
    registry.moves[move.move_id] = move
    return move


def to_leave(registry: Registry, most_bytes: int) -> list[Name]:
    """Copies in host memory, least recently used, of one pool: so many bytes of them, but one at least."""
    read, found = under_way(registry), list[Name]()
    for name in islice(registry.copies.on(Tier.HOST), LOOKED_AT):
        if name not in read and (not found or name[0] == found[0][0]):
            found.append(name)
            if (len(found) + 1) * slot_bytes(registry.pools[name[0]].spec) > most_bytes:
                break
    return found


def demotable(registry: Registry) -> bool:
    """Whether there is a copy to leave, and a slot on disk that it could have."""
    leaving = to_leave(registry, most_bytes=1)
    return bool(leaving) and has_room(registry, Tier.DISK, registry.pools[leaving[0][0]])


def begin_demotion(registry: Registry, most_bytes: int) -> CopyMove | None:
    """They go to disk, where older copies may have to go for them. None if there is no room."""
    return _begin(registry, to_leave(registry, most_bytes), Tier.DISK)


def to_come(registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes]) -> list[Name]:
    """Those on disk that would be found in host memory. Raises as `missing`."""
    on_disk = registry.copies.on(Tier.DISK)
    return [name for name in missing(registry, session, pool, hashes) if name in on_disk]


def begin_recall(
    registry: Registry, session: Session, pool: Pool, hashes: Sequence[bytes], most_bytes: int
) -> CopyMove | None:
    """They come back, the first ones first, as many as there is room for. None if there is none."""
    wanted = missing(registry, session, pool, hashes)
    registry.copies.used(wanted)  # so that they are not what makes room
    coming = to_come(registry, session, pool, hashes)[: max(1, most_bytes // slot_bytes(pool.spec))]
    read = under_way(registry)
    return _begin(registry, [name for name in coming if name not in read], Tier.HOST)


def _begin(registry: Registry, names: list[Name], tier: Tier) -> CopyMove | None:
    if not names:
        return None
    pool = registry.pools[names[0][0]]
    names = names[: room(registry, tier, pool, len(names))]
    copies = [registry.copies[name] for name in names]
    if not names:
        return None
    registry.last_move_id += 1
    move = CopyMove(
        registry.last_move_id,
        pool.name,
        [tenant for _, tenant, _ in names],
        [prefix_hash for _, _, prefix_hash in names],
        copies,
        tier,
        registry.arenas[tier].take(pool, len(names)),
    )
    registry.moves[move.move_id] = move
    return move


def finish_move(registry: Registry, move_id: int, damaged: Sequence[int]) -> bool:
    """The bytes are in the slots, but for those of damaged ones. False if somebody lost something by that.

    A parcel with damaged slots in host memory stays there: whoever fetches it is told.
    """
    move = registry.moves.pop(move_id, None)
    match move:
        case CopyMove():
            return _copies_moved(registry, move, set(damaged))
        case Move() if not damaged and is_current(registry, move):
            return _parcel_moved(registry, move)
        case Move():
            _give(registry, move)
            return not (damaged and move.parked.tier is Tier.DISK and _lost(registry, move))
    return True


def is_current(registry: Registry, move: Move) -> bool:
    """Whether what was moved is still wanted, and where it was. What is being fetched stays."""
    lease = registry.leases.get(move.lease_id)
    if lease is None or isinstance(lease.job, Fetching):
        return False
    now, then = parcel(lease, move.is_checkpoint), move.parked
    if now is None or now.tier is not then.tier or now.slots.size != then.slots.size:
        return False
    return bool((now.slots == then.slots).all() and (now.checksums == then.checksums).all())


def _parcel_moved(registry: Registry, move: Move) -> bool:
    lease = registry.leases[move.lease_id]
    registry.arenas[move.parked.tier].give(registry.pool_of(lease), move.parked.slots)
    moved = replace(move.parked, tier=move.tier, slots=move.slots)
    if move.is_checkpoint:
        lease.checkpoint = moved
    else:
        lease.parked = moved
    return True


def _lost(registry: Registry, move: Move) -> bool:
    """What was moved is damaged. Whether anybody has it still."""
    if not is_current(registry, move):
        return False
    lease = registry.leases[move.lease_id]
    if move.is_checkpoint:
        registry.drop_checkpoint(lease)
    else:
        lose_parked(registry, lease)
    return True


def _copies_moved(registry: Registry, move: CopyMove, damaged: set[int]) -> bool:
    """What is being fetched stays, as of a parcel."""
    fetched = {name for promotion in registry.promotions.values() for name in promotion.names}
    pool, intact = registry.pools[move.pool], True
    rows = zip(move.names, move.copies, move.slots.tolist(), strict=True)
    for index, (name, copy, slot) in enumerate(rows):
        left, tier = slot, move.tier
        if name not in fetched and registry.copies.get(name) == copy:
            if index in damaged:
                drop_copy(registry, name)
                intact = False
            else:
                registry.copies.pop(name)
                registry.copies.put(name, Copy(copy.parent_hash, slot, copy.checksum, move.tier))
                left, tier = copy.slot, copy.tier
        registry.arenas[tier].give(pool, np.array([left], np.int32))
    return intact


def abort_move(registry: Registry, move_id: int) -> None:
    """They are not: everything is where it was."""
    move = registry.moves.pop(move_id, None)
    if move is not None:
        _give(registry, move)


def _give(registry: Registry, move: Move | CopyMove) -> None:
    registry.arenas[move.tier].give(registry.pools[move.pool], move.slots)


def forget_moves(registry: Registry, pool: str | None = None) -> None:
    """Those of a pool that ends, or of a daemon that has ended: all."""
    for move in list(registry.moves.values()):
        if pool in (None, move.pool):
            abort_move(registry, move.move_id)
