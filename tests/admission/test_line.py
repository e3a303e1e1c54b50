"""Who gets blocks next, told in small stories."""

import asyncio

import pytest

from kvd import errors as e
from kvd.policy import Streaming
from kvd_daemon.core import Quota
from kvd_daemon.engine.admission import MAX_WAITING_CALLS
from kvd_daemon.engine.events import Pressure

from .room import LONG_S, Room, play, settled, started


def test_a_call_waits_until_blocks_come_back() -> None:
    async def story() -> None:
        room = Room()
        held = await room.lease("ann", 31)
        waiting = await started(room.lease("cat", 20, LONG_S))
        assert not waiting.done()
        assert room.admission.waiting_in("pool") == (1, 20)
        room.release(held)
        assert len((await waiting).blocks) == 20
        assert room.admission.waiting_in("pool") == (0, 0)

    play(story())


def test_who_does_not_wait_is_refused_at_once_with_what_would_help() -> None:
    async def story() -> None:
        room = Room()
        await room.lease("ann", 30)
        with pytest.raises(
            e.PoolExhaustedError, match=r"20 blocks wanted .* 1 free; release a lease"
        ) as caught:
            await room.lease("cat", 20)
        assert caught.value.retry_after_ns
        assert room.waiting() == 0

    play(story())


def test_who_waits_in_vain_is_told_so_in_time() -> None:
    async def story() -> None:
        room = Room()
        await room.lease("ann", 31)
        with pytest.raises(e.PoolExhaustedError):
            await room.lease("cat", 20, wait_s=0.01)
        assert room.waiting() == 0

    play(story())


def test_what_the_pool_can_never_give_is_not_waited_for() -> None:
    async def story() -> None:
        room = Room()
        await room.lease("ann", 1)
        with pytest.raises(e.PoolExhaustedError, match="which has 31 when empty") as caught:
            await room.lease("cat", 32, LONG_S)
        assert caught.value.retry_after_ns is None
        room.admission.set_quotas({"green": {"guaranteed_blocks": 10}})
        with pytest.raises(e.PoolExhaustedError, match="21 when empty beside 10 that are guaranteed"):
            await room.lease("cat", 22, LONG_S)

    play(story())


def test_a_small_call_does_not_overtake_a_large_one() -> None:
    async def story() -> None:
        room = Room()
        held = await room.lease("ann", 20)
        large = await started(room.lease("cat", 25, LONG_S))
        small = await started(room.lease("dan", 2, LONG_S))
        with pytest.raises(e.PoolExhaustedError, match="calls in line: 2"):
            await room.lease("dan", 1)
        assert not small.done()
        room.release(held)
        await asyncio.gather(large, small)
        assert room.waiting() == 0

    play(story())


def test_calls_for_another_pool_are_not_held_back() -> None:
    async def story() -> None:
        room = Room(other=31)
        await room.lease("ann", 31)
        waiting = await started(room.lease("cat", 25, LONG_S))
        await room.lease("dan", 31, pool="other")
        waiting.cancel()
        await settled()

    play(story())


def test_a_caller_that_leaves_lets_those_behind_it_pass_and_leaves_no_trace() -> None:
    async def story() -> None:
        room = Room()
        await room.lease("ann", 20)
        large = await started(room.lease("cat", 25, LONG_S))
        small = await started(room.lease("dan", 2, LONG_S))
        large.cancel()
        assert len((await small).blocks) == 2
        assert room.waiting() == 0
        assert len(room.device.leases) == 2
        room.device.check()

    play(story())


def test_a_tenant_at_its_maximum_waits_for_itself_and_holds_back_nobody_else() -> None:
    async def story() -> None:
        room = Room()
        room.admission.set_quotas({"red": {"max_blocks": 10}})
        held = await room.lease("ann", 8)
        with pytest.raises(e.QuotaExceededError, match=r"may hold 10 and holds 8.*compress 2 blocks"):
            await room.lease("ben", 4)
        mate = await started(room.lease("ben", 4, LONG_S))
        with pytest.raises(e.QuotaExceededError, match="calls in line: 1"):
            await room.lease("ann", 1)
        await room.lease("cat", 20)
        assert not mate.done()
        room.release(held)
        await mate

    play(story())


def test_more_than_the_maximum_is_never_waited_for() -> None:
    async def story() -> None:
        room = Room()
        room.admission.set_quotas({"*": {"max_blocks": 10}})
        with pytest.raises(e.QuotaExceededError, match="max_blocks of the tenant raised") as caught:
            await room.lease("ann", 11, LONG_S)
        assert caught.value.retry_after_ns is None

    play(story())


def test_new_quotas_let_those_go_on_who_waited_for_them() -> None:
    async def story() -> None:
        room = Room()
        room.admission.set_quotas({"red": {"max_blocks": 10}})
        await room.lease("ann", 8)
        waiting = await started(room.lease("ben", 4, LONG_S))
        room.admission.set_quotas({"red": {"max_blocks": 12}})
        await waiting

    play(story())


def test_quotas_that_forbid_what_is_waited_for_end_the_wait() -> None:
    async def story() -> None:
        room = Room()
        await room.lease("cat", 31)
        waiting = await started(room.lease("ben", 8, LONG_S))
        room.admission.set_quotas({"red": {"max_blocks": 4}})
        with pytest.raises(e.QuotaExceededError):
            await waiting

    play(story())


def test_a_tenant_gets_what_it_is_guaranteed_though_others_wait() -> None:
    async def story() -> None:
        room = Room()
        room.admission.set_quotas({"green": {"guaranteed_blocks": 10}})
        await room.lease("ann", 15)
        with pytest.raises(e.PoolExhaustedError, match="6 free beside 10 that are guaranteed"):
            await room.lease("cat", 7)
        waiting = await started(room.lease("cat", 7, LONG_S))
        await room.lease("dan", 10)
        assert not waiting.done()
        with pytest.raises(e.PoolExhaustedError):
            await room.lease("dan", 1)
        waiting.cancel()
        await settled()

    play(story())


def test_scratch_for_a_compression_waits_behind_nobody() -> None:
    async def story() -> None:
        room = Room(blocks=64)
        await room.lease("ann", 40)
        waiting = await started(room.lease("cat", 40, LONG_S))
        scratch = await room.lease("ann", 2, scratch=True)
        assert not waiting.done()
        room.release(scratch)
        waiting.cancel()
        await settled()

    play(story())


def test_a_tenant_at_its_maximum_gets_scratch_as_far_as_the_reserve_goes() -> None:
    async def story() -> None:
        room = Room(blocks=64)
        room.admission.set_quotas({"red": {"max_blocks": 10}})
        await room.lease("ann", 10)
        await room.lease("ann", 2, scratch=True)
        with pytest.raises(e.QuotaExceededError):
            await room.lease("ann", 1, scratch=True)

    play(story())


def test_wishes_of_every_kind_can_wait() -> None:
    async def story() -> None:
        room = Room(blocks=64)
        held = await room.lease("ann", 62)
        spare = await room.lease("ann", 2, scratch=True)
        calls = [
            await started(room.lease("cat", 3, LONG_S)),
            await started(room.lease("cat", 0, LONG_S, policy=Streaming(sinks=16, window=64))),
            await started(room.lease("dan", 2, LONG_S, scratch=True)),
        ]
        assert not any(call.done() for call in calls)
        room.release(spare)
        await settled()
        assert [call.done() for call in calls] == [False, False, True]
        room.release(held)
        await asyncio.gather(*calls)

    play(story())


def test_a_call_ends_when_its_session_or_its_lease_does() -> None:
    async def story() -> None:
        room = Room()
        mine, others = await room.lease("cat", 10), await room.lease("ann", 21)
        first = await started(room.lease("dan", 5, LONG_S))
        second = await started(room.extend([mine], 5, LONG_S))
        room.device.revoke(mine.lease_id)
        room.device.close_session("dan")
        room.admission.tick()
        with pytest.raises(e.SessionNotFoundError):
            await first
        with pytest.raises(e.LeaseRevokedError):
            await second
        assert others.lease_id in room.device.leases

    play(story())


def test_a_call_ends_when_its_pool_is_dropped_also_behind_one_for_another_pool() -> None:
    async def story() -> None:
        room = Room(31, other=31)
        room.admission.set_quotas({"red": {"max_blocks": 10}})
        await room.lease("ann", 10, pool="other")
        first = await started(room.lease("ann", 5, LONG_S, pool="other"))
        second = await started(room.lease("ben", 5, LONG_S))
        room.device.drop_pool("pool")
        room.admission.wake()
        with pytest.raises(e.PoolNotFoundError):
            await second
        assert not first.done()
        first.cancel()

    play(story())


def test_when_the_daemon_drains_all_waiting_ends_until_it_takes_leases_again() -> None:
    async def story() -> None:
        room = Room()
        held = await room.lease("ann", 31)
        waiting = await started(room.lease("cat", 5, LONG_S))
        room.admission.close()
        with pytest.raises(e.DeviceUnavailableError):
            await waiting
        with pytest.raises(e.PoolExhaustedError):
            await room.lease("cat", 5, LONG_S)
        room.admission.open()
        waiting = await started(room.lease("cat", 5, LONG_S))
        room.release(held)
        await waiting

    play(story())


def test_holders_are_asked_for_what_is_lacking_the_largest_first() -> None:
    async def story() -> None:
        room = Room()
        room.admission.set_quotas({"green": {"guaranteed_blocks": 5}})
        await room.lease("ann", 10)
        await room.lease("dan", 4)
        await room.lease("cat", 15)
        with pytest.raises(e.PoolExhaustedError):
            await room.lease("cat", 4)
        assert room.told == ["cat", "ann"], "dan would keep for itself what it gave"
        assert room.holders["ann"].told == [Pressure("pool", 3)]

    play(story())


def test_a_tenant_at_its_maximum_is_asked_itself() -> None:
    async def story() -> None:
        room = Room()
        room.admission.set_quotas({"red": {"max_blocks": 10}})
        await room.lease("ann", 9)
        await room.lease("cat", 9)
        with pytest.raises(e.QuotaExceededError):
            await room.lease("ben", 4)
        assert room.holders["ann"].told == [Pressure("pool", 3)]
        assert room.holders["cat"].told == []

    play(story())


def test_a_line_of_calls_has_an_end() -> None:
    async def story() -> None:
        room = Room()
        await room.lease("ann", 31)
        calls = [asyncio.create_task(room.lease("cat", 5, LONG_S)) for _ in range(MAX_WAITING_CALLS)]
        await settled()
        with pytest.raises(e.LimitExceededError, match="wait already"):
            await room.lease("dan", 5, LONG_S)
        room.admission.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {e.DeviceUnavailableError}

    play(story())


def test_a_bug_in_one_waiting_call_ends_that_call_only() -> None:
    async def story() -> None:
        room = Room()
        held = await room.lease("ann", 31)
        attempts = iter([e.PoolExhaustedError("full", 1, pool="pool"), ZeroDivisionError("a bug")])

        def attempt() -> None:
            raise next(attempts)

        buggy = await started(room.admission.admitted(room.asker("dan", LONG_S), attempt))
        waiting = await started(room.lease("cat", 5, LONG_S))
        room.release(held)
        await waiting
        with pytest.raises(ZeroDivisionError):
            await buggy

    play(story())


def test_quotas_guarantee_nothing_to_nobody_in_particular() -> None:
    with pytest.raises(e.InvalidArgumentError, match="only to tenants that are named"):
        Room().device.set_quotas({}, Quota(guaranteed_blocks=1))
