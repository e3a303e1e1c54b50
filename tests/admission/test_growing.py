"""Leases that grow pass leases that are to be, but not each other."""

import asyncio

import pytest

from kvd import errors as e

from .room import LONG_S, Room, play, started


def test_leases_that_grow_pass_a_waiting_call_by_no_more_blocks_than_it_wants() -> None:
    async def story() -> None:
        room = Room(blocks=61)
        growing = await room.lease("ann", 1)
        first, second = await room.lease("dan", 10), await room.lease("dan", 30)
        waiting = await started(room.lease("cat", 25, LONG_S))
        await room.extend([growing], 19)
        room.release(first)
        await room.extend([growing], 6)
        with pytest.raises(e.PoolExhaustedError, match=r"4 free, and others come first"):
            await room.extend([growing], 1)
        room.release(second)
        assert len((await waiting).blocks) == 25
        await room.extend([growing], 1)

    play(story())


def test_a_growing_lease_does_not_overtake_another_one() -> None:
    async def story() -> None:
        room = Room()
        first, second = await room.lease("ann", 14), await room.lease("cat", 14)
        waiting = await started(room.extend([first], 5, LONG_S))
        with pytest.raises(e.PoolExhaustedError, match="calls in line: 1"):
            await room.extend([second], 1)
        room.release(second)
        await waiting

    play(story())


def test_growing_leases_stay_in_order_behind_a_lease_that_is_to_be() -> None:
    async def story() -> None:
        room = Room()
        first, second, held = [await room.lease(who, 8) for who in ("ann", "cat", "dan")]
        large = await started(room.lease("dan", 20, LONG_S))
        earlier = await started(room.extend([first], 9, LONG_S))
        later = await started(room.extend([second], 1, LONG_S))
        assert not later.done(), "it passed a lease that waits to grow, too"
        with pytest.raises(e.PoolExhaustedError, match="calls in line: 3"):
            await room.extend([second], 1)
        room.release(held)
        await asyncio.gather(earlier, later)
        assert not large.done()
        room.release(first, second)
        await large

    play(story())


def test_who_waits_to_grow_and_leaves_lets_the_next_one_grow() -> None:
    async def story() -> None:
        room = Room()
        first, second, _ = [await room.lease(who, 8) for who in ("ann", "cat", "dan")]
        large = await started(room.lease("dan", 20, LONG_S))
        earlier = await started(room.extend([first], 9, LONG_S))
        later = await started(room.extend([second], 1, LONG_S))
        earlier.cancel()
        await later
        assert not large.done()
        room.release(first, second)
        await large

    play(story())


def test_growing_leases_of_a_tenant_at_its_maximum_stay_in_order() -> None:
    async def story() -> None:
        room = Room()
        room.admission.set_quotas({"red": {"max_blocks": 12}})
        held, first, second = [await room.lease(who, 3) for who in ("ann", "ann", "ben")]
        large = await started(room.lease("ben", 9, LONG_S))
        earlier = await started(room.extend([first], 5, LONG_S))
        later = await started(room.extend([second], 1, LONG_S))
        assert not later.done(), "it passed a lease that waits to grow, too"
        room.release(held)
        await asyncio.gather(earlier, later)
        room.release(first, second)
        await large

    play(story())


def test_scratch_that_grows_stays_in_order_behind_scratch_that_is_to_be() -> None:
    async def story() -> None:
        room = Room()
        first, second = [await room.lease(who, 2, scratch=True) for who in ("ann", "cat")]
        held = await room.lease("dan", 20)
        large = await started(room.lease("dan", 28, LONG_S, scratch=True))
        earlier = await started(room.extend([first], 9, LONG_S))
        later = await started(room.extend([second], 1, LONG_S))
        assert not later.done(), "it passed scratch that waits to grow, too"
        room.release(held)
        await asyncio.gather(earlier, later)
        room.release(first, second)
        await large

    play(story())
