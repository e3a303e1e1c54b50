"""Fences: what a worker sees of its lease without asking."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import LimitExceededError
from kvd.policy import SnapKV, Streaming
from kvd_daemon.core import Device, Lease, Limits, Progress
from kvd_daemon.core.fences import Fences

from .desk import TTL, Desk

VOTE = SnapKV(window=32, kernel=3, keep=0.5)


def shown(device: Device, lease: Lease) -> int:
    return int(device.fences.words[lease.fence_slot])


def word(lease: Lease) -> int:
    return lease.lease_id << 24 | lease.generation


def test_a_fence_tells_lease_and_generation_as_long_as_the_table_may_be_used() -> None:
    desk = Desk()
    ring = desk.lease(0, Streaming(sinks=4, window=28))
    assert shown(desk.device, ring) == word(ring)
    full = ring.capacity
    desk.device.extend("ann", [(Progress(ring.lease_id, 1, 0, 0), full)], 0)
    desk.device.extend("ann", [(Progress(ring.lease_id, 1, full, full), 16)], 0)
    assert ring.generation == 2
    assert shown(desk.device, ring) == word(ring)


@pytest.mark.parametrize("end", ["release", "revoke", "expire", "close_session", "session_gone"])
def test_a_fence_is_down_as_soon_as_the_lease_ends(end: str) -> None:
    desk = Desk()
    lease, other = desk.prefill(64), desk.prefill(64, who="ben")
    slot = lease.fence_slot
    ends = {
        "release": lambda: desk.device.release("ann", [lease.lease_id]),
        "revoke": lambda: desk.device.revoke(lease.lease_id),
        "expire": lambda: desk.device.expire(TTL),
        "close_session": lambda: desk.device.close_session("ann"),
        "session_gone": lambda: desk.device.session_gone("ann"),
    }
    desk.device.renew("ben", (), TTL // 2)
    ends[end]()
    assert desk.device.fences.words[slot] == 0
    assert shown(desk.device, other) == word(other)
    desk.device.check()


def test_a_fence_is_down_while_tokens_move_within_the_leases_own_blocks() -> None:
    desk = Desk(blocks=16)
    lease = desk.prefill(256)
    assert desk.compress(lease, VOTE).in_place
    assert shown(desk.device, lease) == 0
    desk.device.finish_compress(lease.lease_id, 128)
    assert shown(desk.device, lease) == word(lease)
    assert desk.compress(lease, VOTE).in_place is False
    assert shown(desk.device, lease) == word(lease)
    desk.device.finish_compress(lease.lease_id, 64)
    assert lease.generation == 3
    assert shown(desk.device, lease) == word(lease)


def test_a_lost_leases_fence_stays_down() -> None:
    desk = Desk(blocks=16)
    lease = desk.prefill(256)
    desk.compress(lease, VOTE)
    desk.device.abort_compress(lease.lease_id, lost=True)
    assert shown(desk.device, lease) == 0


def test_a_busy_lease_of_an_expired_session_is_fenced_before_its_job_ends() -> None:
    desk = Desk()
    lease = desk.prefill(256)
    desk.compress(lease, VOTE)
    assert shown(desk.device, lease) == word(lease)
    desk.device.expire(TTL)
    assert shown(desk.device, lease) == 0


def test_a_slot_is_used_again_by_another_lease_and_shows_that_one() -> None:
    desk = Desk()
    first = desk.lease(16)
    desk.device.release("ann", [first.lease_id])
    second = desk.lease(16)
    assert second.fence_slot == first.fence_slot
    assert shown(desk.device, second) == word(second) != word(first)


def test_more_leases_than_fences_are_refused_and_nothing_is_taken() -> None:
    desk = Desk(limits=Limits(leases=3))
    leases = [desk.lease(16) for _ in range(3)]
    with pytest.raises(LimitExceededError, match="0 more are possible"):
        desk.lease(16)
    desk.device.release("ann", [leases[0].lease_id])
    assert desk.lease(16).fence_slot == leases[0].fence_slot
    desk.device.check()


@given(st.lists(st.booleans(), max_size=200))
def test_moved_words_show_the_same_and_forget_what_stood_there(takes: list[bool]) -> None:
    desk = Desk(limits=Limits(leases=255))
    leases: list[Lease] = []
    for take in takes:
        if take or not leases:
            leases.append(desk.lease(0))
        else:
            desk.device.release("ann", [leases.pop(len(leases) // 2).lease_id])
    memory = np.full(256, 7, np.uint64)
    desk.device.fences.move_to(memory)
    expected = {lease.fence_slot: word(lease) for lease in leases}
    assert {slot: int(memory[slot]) for slot in np.flatnonzero(memory)} == expected
    assert desk.device.fences.shown() == expected


@given(st.sets(st.integers(1, 200)), st.integers(0, 20))
def test_restored_fences_give_the_slots_that_the_old_ones_would(held: set[int], more: int) -> None:
    desk = Desk()
    leases = [desk.lease(0) for _ in range(200)]
    gone = [lease.lease_id for lease in leases if lease.fence_slot not in held]
    desk.device.release("ann", gone)
    left = [lease for lease in leases if lease.fence_slot in held]
    restored = Fences(desk.device.limits.leases + 1)
    restored.restore(left)
    assert restored.shown() == desk.device.fences.shown()
    assert [restored.take() for _ in range(more)] == [desk.device.fences.take() for _ in range(more)]
