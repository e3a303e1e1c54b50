"""Copies of cached blocks on both tiers: which ones move, which ones make room, and what stays."""

import pytest

from kvd.errors import TierFullError
from kvd_daemon.core import Tier
from kvd_daemon.core.parked import Copy
from kvd_daemon.core.tiers import slot_bytes
from kvd_daemon.journal.codec import SCHEMA, Decoder, encode

from .desk import SPEC, Desk

SLOT = slot_bytes(SPEC)
BLOCK = SPEC.block_size
ALL = 1 << 40  # bytes; more than there is


def desk_with(host_slots: int, disk_slots: int, blocks: int = 64) -> Desk:
    desk = Desk(blocks)
    desk.device.set_tiers(host_slots * SLOT, disk_slots * SLOT)
    return desk


def copied(desk: Desk, blocks: int, text: int = 0) -> list[bytes]:
    """Names of blocks that are cached and have copies in the host tier; the last one is the oldest copy."""
    names = desk.names(blocks, text)
    lease = desk.prefill(blocks * BLOCK)
    desk.seal(lease, names)
    desk.device.release("ann", [lease.lease_id])
    spill = desk.device.begin_spill("pool", blocks)
    assert spill is not None
    assert desk.device.finish_spill(spill.spill_id, [100 + i for i in range(blocks)]) == blocks
    return names


def demoted(desk: Desk, slots: int) -> list[bytes]:
    move = desk.device.begin_demotion(slots * SLOT)
    assert move is not None
    desk.device.finish_move(move.move_id, [])
    return list(move.hashes)


def evict(desk: Desk) -> None:
    """Somebody needs all of the pool for a moment."""
    lease = desk.lease(desk.pool.usable * BLOCK, scratch=True)
    desk.device.release("ann", [lease.lease_id])


def on(desk: Desk, tier: Tier) -> set[bytes]:
    return {name for (_, _, name), copy in desk.device.copies.items() if copy.tier is tier}


def suspend(desk: Desk, blocks: int) -> int:
    lease = desk.prefill(blocks * BLOCK)
    plan = desk.device.begin_suspend("ann", desk.progress(lease), desk.now)
    desk.device.finish_suspend(lease.lease_id, [7] * plan.slots.size)
    return lease.lease_id


def test_the_least_recently_used_copies_go_to_disk_and_the_first_ones_of_a_prefix_come_back() -> None:
    desk = desk_with(host_slots=8, disk_slots=8)
    names = copied(desk, 6)
    assert demoted(desk, 2) == [names[5], names[4]]
    assert demoted(desk, 4) == [names[3], names[2], names[1], names[0]]
    evict(desk)
    move = desk.device.begin_recall("ann", "pool", names, 4 * SLOT)
    assert list(move.hashes) == names[:4]
    assert desk.device.finish_move(move.move_id, [])
    assert on(desk, Tier.HOST) == set(names[:4])
    assert desk.device.missing("ann", "pool", names) == 4
    desk.device.check()


def test_a_damaged_copy_is_forgotten_and_ends_what_is_found() -> None:
    desk = desk_with(host_slots=8, disk_slots=8)
    names = copied(desk, 4)
    demoted(desk, 4)
    evict(desk)
    move = desk.device.begin_recall("ann", "pool", names, ALL)
    assert not desk.device.finish_move(move.move_id, [1])
    assert on(desk, Tier.HOST) == {names[0], names[2], names[3]}
    assert desk.device.missing("ann", "pool", names) == 1
    assert desk.device.recallable("ann", "pool", names) == []
    desk.device.check()


def test_on_a_full_disk_copies_of_evicted_blocks_make_room_and_no_others() -> None:
    desk = desk_with(host_slots=4, disk_slots=4)
    gone = copied(desk, 4)
    demoted(desk, 4)
    evict(desk)
    here = copied(desk, 4, text=1)
    assert demoted(desk, 2) == [here[3], here[2]]
    assert on(desk, Tier.DISK) == {gone[0], gone[1], here[3], here[2]}
    demoted(desk, 2)
    copied(desk, 4, text=2)
    assert not desk.device.demotable()
    assert desk.device.begin_demotion(ALL) is None
    assert on(desk, Tier.DISK) == set(here)
    desk.device.check()


def test_copies_on_disk_make_room_for_parcels() -> None:
    desk = desk_with(host_slots=8, disk_slots=4)
    copied(desk, 4)
    demoted(desk, 3)
    parcel = suspend(desk, 4)
    move = desk.device.begin_move(parcel, False, Tier.DISK)
    assert on(desk, Tier.DISK) == set()
    desk.device.finish_move(move.move_id, [])
    assert desk.device.begin_demotion(ALL) is None
    with pytest.raises(TierFullError):
        desk.device.begin_move(suspend(desk, 1), False, Tier.DISK)
    desk.device.check()


def test_what_can_not_be_had_drops_no_copy() -> None:
    desk = desk_with(host_slots=8, disk_slots=8)
    names = copied(desk, 6)
    parcel = suspend(desk, 4)
    assert len(on(desk, Tier.HOST)) == 4
    desk.device.set_tiers(6 * SLOT, 8 * SLOT)
    lease = desk.prefill(3 * BLOCK)
    with pytest.raises(TierFullError):
        desk.device.begin_suspend("ann", desk.progress(lease), desk.now)
    assert on(desk, Tier.HOST) == set(names[:4])
    assert desk.device.leases[parcel].parked is not None


def test_a_copy_that_is_being_fetched_stays_where_it_is() -> None:
    desk = desk_with(host_slots=8, disk_slots=8)
    names = copied(desk, 4)
    move = desk.device.begin_demotion(ALL)
    evict(desk)
    promotion = desk.device.begin_promotion("ann", "pool", names)
    assert desk.device.finish_move(move.move_id, [])
    assert on(desk, Tier.HOST) == set(names)
    assert desk.device.arenas[Tier.DISK].used_bytes == 0
    assert desk.device.finish_promotion(promotion.promotion_id, []) == 4
    desk.device.check()


def test_a_move_of_what_was_dropped_and_copied_again_is_forgotten() -> None:
    desk = desk_with(host_slots=4, disk_slots=8)
    names = copied(desk, 2)
    move = desk.device.begin_demotion(ALL)
    desk.device.drop_copies(Tier.HOST, 4 * SLOT)
    spill = desk.device.begin_spill("pool", 2)
    desk.device.finish_spill(spill.spill_id, [200, 201])
    assert desk.device.finish_move(move.move_id, [])
    assert on(desk, Tier.HOST) == set(names)
    assert {copy.checksum for copy in desk.device.copies.values()} == {200, 201}
    assert desk.device.arenas[Tier.DISK].used_bytes == 0
    desk.device.check()


def test_a_dropped_pool_takes_its_copies_and_their_moves_along() -> None:
    desk = desk_with(host_slots=8, disk_slots=8)
    names = copied(desk, 6)
    demoted(desk, 3)
    evict(desk)
    desk.device.begin_demotion(SLOT)
    assert desk.device.begin_recall("ann", "pool", names, ALL) is not None
    desk.device.drop_pool("pool")
    assert [arena.used_bytes for arena in desk.device.arenas.values()] == [0, 0]
    assert not desk.device.copies
    desk.device.check()


def test_copies_that_an_earlier_version_wrote_lie_in_the_host_tier() -> None:
    earlier = [(name, [each for each in names if name != "Copy" or each != "tier"]) for name, names in SCHEMA]
    code = next(i for i, (name, _) in enumerate(SCHEMA) if name == "Copy")
    written = b"o" + bytes([code]) + encode(b"parent") + encode(3) + encode(9)
    assert Decoder(earlier).decode(written) == Copy(b"parent", 3, 9, Tier.HOST)
