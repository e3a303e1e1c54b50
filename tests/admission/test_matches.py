"""Who wakes cached blocks takes them from those who wait for blocks, and stands behind them."""

from collections.abc import Sequence

import pytest

from kvd import errors as e
from kvd_daemon.access.gate import Gate, Guarding
from kvd_daemon.core import Lease, Progress, Quota
from kvd_daemon.engine.sharing import Sharing

from .room import LONG_S, Room, play, settled, started

NAMES = [bytes([depth]) * 32 for depth in range(20)]
HOST_BYTES = 1 << 20
MATCH_TTL = 1_000_000_000  # ns


class Cached(Room):
    """`cat` of blue has sealed and released 20 of 31 blocks; `dan` holds `held` of the others."""

    sharing: Sharing
    other: Lease

    @classmethod
    async def made(cls, held: int = 8) -> "Cached":
        room = cls()
        room.device.set_quotas({}, Quota(pin_blocks=20))
        room.sharing = Sharing(room.device, Gate(Guarding(), "room"), room.admission)
        lease = await room.lease("cat", 20)
        room.device.seal("cat", Progress(lease.lease_id, 1, lease.capacity, lease.capacity), NAMES)
        room.release(lease)
        room.other = await room.lease("dan", held)
        return room

    def found(self, who: str = "cat", names: Sequence[bytes] = NAMES) -> int:
        return self.sharing.match(self.holders[who], "pool", names, MATCH_TTL).found


def test_a_match_that_would_take_what_others_wait_for_finds_nothing() -> None:
    async def story() -> None:
        room = await Cached.made()
        waiting = await started(room.lease("ann", 24, LONG_S))
        assert room.found() == 0
        assert not room.device.pins
        with pytest.raises(e.PoolExhaustedError, match="others come first"):
            await room.lease("cat", 20, prefix_hashes=NAMES)
        room.release(room.other)
        await settled()
        assert waiting.done()
        assert room.found() > 0

    play(story())


def test_a_match_is_found_where_nobody_waits_for_that_pool() -> None:
    async def story() -> None:
        room = await Cached.made()
        assert room.found() == 20

    play(story())


def test_a_match_of_blocks_that_are_held_anyway_takes_nothing_and_is_found() -> None:
    async def story() -> None:
        room = await Cached.made()
        holder = await room.lease("cat", 20, prefix_hashes=NAMES)
        waiting = await started(room.lease("ann", 24, LONG_S))
        assert room.found() == 20
        room.release(holder)
        waiting.cancel()
        await settled()

    play(story())


def test_a_match_within_its_tenants_guarantee_is_found() -> None:
    async def story() -> None:
        room = await Cached.made(held=11)
        waiting = await started(room.lease("ann", 24, LONG_S))
        room.admission.set_quotas({"blue": {"guaranteed_blocks": 5}})
        assert room.found(names=NAMES[:6]) == 0
        assert room.found(names=NAMES[:5]) == 5
        waiting.cancel()
        await settled()

    play(story())


def test_a_pin_stands_behind_those_who_wait() -> None:
    async def story() -> None:
        room = await Cached.made()
        waiting = await started(room.lease("ann", 24, LONG_S))
        with pytest.raises(e.PoolExhaustedError, match="others come first") as caught:
            room.sharing.pin(room.holders["cat"], "pool", NAMES)
        assert caught.value.retry_after_ns
        waiting.cancel()
        await settled()
        room.sharing.pin(room.holders["cat"], "pool", NAMES)
        with pytest.raises(e.QuotaExceededError, match="unpin others"):
            room.sharing.pin(room.holders["cat"], "pool", NAMES[:1])

    play(story())


def test_copies_do_not_come_back_into_blocks_that_others_wait_for() -> None:
    async def story() -> None:
        room = await Cached.made()
        room.device.set_tiers(HOST_BYTES, 0)
        spill = room.device.begin_spill("pool", 20)
        assert spill is not None
        room.device.finish_spill(spill.spill_id, [0] * 20)
        room.release(await room.lease("dan", 23))  # all others: the prefix is evicted
        assert room.found() == 0
        waiting = await started(room.lease("ann", 24, LONG_S))
        with pytest.raises(e.PoolExhaustedError):
            room.sharing.begin_promotion(room.holders["cat"], "pool", NAMES)
        waiting.cancel()
        await settled()
        promotion = room.sharing.begin_promotion(room.holders["cat"], "pool", NAMES)
        assert promotion is not None
        assert len(promotion.hashes) == 20
        room.device.check()

    play(story())
