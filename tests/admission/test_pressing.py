"""Resting leases are pruned for calls that wait, if that helps them, and no more than it takes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvd.errors import KernelWorkerUnavailableError
from kvd.policy import Policy
from kvd_daemon.core import Lease, Progress
from kvd_daemon.engine.exhaustion import Exhaustion
from kvd_daemon.engine.pressing import Pressing

from .room import LONG_S, Room, settled, started

FLOOR = 32  # tokens, two blocks


class Pruner:
    """Prunes as told, without a kernel worker: no byte has to move. `before` is called first."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.pruned: list[int] = []
        self.before: Callable[[], None] = lambda: None
        self.broken: list[int] = []

    async def press(self, lease_id: int, policy: Policy) -> None:
        self.before()
        if lease_id in self.broken:
            raise KernelWorkerUnavailableError("it died")
        plan = self.room.device.begin_press(lease_id, policy)
        await asyncio.sleep(0)
        self.room.device.finish_compress(lease_id, plan.target_tokens)
        self.pruned.append(lease_id)


class Resting(Room):
    """A room whose resting leases are pruned."""

    def __init__(self, blocks: int = 31, **pools: int) -> None:
        super().__init__(blocks, **pools)
        self.pruner = Pruner(self)
        exhaustion = Exhaustion(self.device, self.holders.values())
        tasks = asyncio.get_running_loop()
        pressing = Pressing(self.device, self.pruner, self.admission, exhaustion.holders, tasks.create_task)
        self.admission.on_waiting(pressing.relieve)

    async def rest(self, who: str, blocks: int, sealed: int = 0) -> Lease:
        lease = await self.lease(who, blocks, floor=FLOOR)
        full = Progress(lease.lease_id, lease.generation, lease.capacity, lease.capacity)
        if sealed:
            self.device.seal(who, full, [bytes([lease.lease_id, depth]) * 16 for depth in range(sealed)])
        self.device.rest(who, full, None)
        return lease


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


async def after_all(room: Resting) -> None:
    for _ in range(8):
        await settled()
    room.device.check()


def test_the_one_that_gives_most_is_pruned_and_no_other_if_that_is_enough() -> None:
    async def story() -> None:
        room = Resting()
        small, large = await room.rest("cat", 10), await room.rest("dan", 20)
        await room.lease("ann", 15, LONG_S)
        await after_all(room)
        assert room.pruner.pruned == [large.lease_id]
        assert len(small.blocks) == 10

    play(story)


def test_a_call_that_does_not_wait_prunes_nothing() -> None:
    async def story() -> None:
        room = Resting()
        await room.rest("cat", 30)
        refused = await started(room.lease("ann", 15))
        assert refused.exception() is not None
        room.admission.tick()
        await after_all(room)
        assert room.pruner.pruned == []

    play(story)


def test_nothing_is_pruned_for_a_call_that_it_would_not_serve() -> None:
    async def story() -> None:
        room = Resting()
        busy, resting = await room.lease("dan", 10), await room.rest("cat", 20)
        waiting = await started(room.lease("ann", 20, LONG_S))
        await after_all(room)
        assert room.pruner.pruned == []
        room.release(busy)
        room.admission.tick()
        await waiting
        assert room.pruner.pruned == [resting.lease_id]

    play(story)


def test_what_lacks_is_counted_anew_before_each_lease() -> None:
    async def story() -> None:
        room = Resting()
        busy = await room.lease("dan", 10)
        first, second = await room.rest("cat", 10), await room.rest("cat", 9)
        room.pruner.before = lambda: room.release(busy) if busy.lease_id in room.device.leases else None
        await room.lease("ann", 15, LONG_S)
        await after_all(room)
        assert room.pruner.pruned == [first.lease_id]
        assert len(second.blocks) == 9

    play(story)


def test_the_next_in_line_is_served_too() -> None:
    async def story() -> None:
        room = Resting()
        for _ in range(3):
            await room.rest("cat", 10)
        await asyncio.gather(room.lease("ann", 8, LONG_S), room.lease("dan", 8, LONG_S))
        await after_all(room)
        assert len(room.pruner.pruned) == 2

    play(story)


def test_a_lease_that_cannot_be_pruned_is_passed_over() -> None:
    async def story() -> None:
        room = Resting()
        large, small = await room.rest("cat", 16), await room.rest("cat", 14)
        room.pruner.broken = [large.lease_id]
        await room.lease("ann", 10, LONG_S)
        assert room.pruner.pruned == [small.lease_id]
        assert len(large.blocks) == 16

    play(story)


def test_leases_that_are_pruned_in_place_make_room_for_those_with_sealed_blocks() -> None:
    async def story() -> None:
        room = Resting()
        sealed, plain = await room.rest("cat", 25, sealed=20), await room.rest("cat", 6)
        await room.lease("ann", 24, LONG_S)
        await after_all(room)
        assert room.pruner.pruned == [plain.lease_id, sealed.lease_id]

    play(story)


def test_with_room_for_its_floor_a_lease_with_sealed_blocks_comes_first_if_it_gives_most() -> None:
    async def story() -> None:
        room = Resting()
        sealed, plain = await room.rest("cat", 21, sealed=20), await room.rest("cat", 8)
        await room.lease("ann", 18, LONG_S)
        await after_all(room)
        assert room.pruner.pruned == [sealed.lease_id]
        assert len(plain.blocks) == 8

    play(story)


def test_what_another_tenant_would_keep_by_its_guarantee_is_not_counted_on() -> None:
    async def story() -> None:
        room = Resting()
        lease = await room.rest("cat", 21)
        room.admission.set_quotas({"blue": {"guaranteed_blocks": 15}})
        waiting = await started(room.lease("ann", 17, LONG_S))
        await after_all(room)
        assert room.pruner.pruned == []
        waiting.cancel()
        await settled()
        await room.lease("ann", 16, LONG_S)
        assert room.pruner.pruned == [lease.lease_id]

    play(story)


def test_a_tenant_at_its_maximum_is_helped_by_its_own_leases_in_all_pools() -> None:
    async def story() -> None:
        room = Resting(other=31)
        room.admission.set_quotas({"red": {"max_blocks": 20}})
        lease = await room.lease("ann", 18, pool="other", floor=FLOOR)
        room.device.rest("ann", Progress(lease.lease_id, 1, lease.capacity, lease.capacity), None)
        others = await room.rest("cat", 20)
        await room.lease("ben", 10, LONG_S)
        await after_all(room)
        assert room.pruner.pruned == [lease.lease_id]
        assert len(others.blocks) == 20

    play(story)


def test_a_full_pool_of_leases_with_sealed_blocks_gives_through_its_reserve() -> None:
    async def story() -> None:
        room = Resting(blocks=64)  # two are the scratch reserve
        await room.rest("cat", 31, sealed=31)
        await room.rest("dan", 31, sealed=31)
        await room.lease("ann", 50, LONG_S)
        await after_all(room)
        assert len(room.pruner.pruned) == 2

    play(story)
