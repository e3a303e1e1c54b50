"""What a lease that rests keeps whatever happens."""

import pytest

from kvd.policy import SnapKV
from kvd_daemon.core import Lease, LeaseState, can_give, could_be_compressible
from kvd_daemon.engine.pressing import policy_for

from .desk import Desk

SINKS = SnapKV(sinks=64, window=32, keep=0.5)


def rested(desk: Desk, rests: int | None, **more: object) -> Lease:
    """A lease of 400 tokens with `more`, which rests with such a floor."""
    lease = desk.prefill(400, **more)
    return desk.device.rest("ann", desk.progress(lease), rests)


@pytest.mark.parametrize(("leased", "rests"), [(32, None), (0, 32), (400, 1)])
def test_a_floor_below_the_sinks_is_raised_to_them(leased: int, rests: int | None) -> None:
    desk = Desk()
    lease = rested(desk, rests, policy=SINKS, floor=leased)
    assert lease.resting_floor == 64
    policy = policy_for(lease)
    assert policy.sinks == 64
    assert desk.device.begin_press(lease.lease_id, policy).target_tokens == 64
    desk.device.finish_compress(lease.lease_id, 64)
    assert (lease.sink_blocks, lease.length) == (4, 64)


def test_the_worker_of_an_active_lease_is_not_asked_for_its_sinks() -> None:
    assert Desk().lease(400, SINKS, floor=32).floor == 64


def test_no_floor_stays_no_floor_whatever_the_sinks() -> None:
    lease = rested(Desk(), None, policy=SINKS)
    assert not can_give(lease)


def test_a_lease_with_sealed_blocks_is_pruned_through_the_reserve_of_a_full_pool() -> None:
    desk = Desk(blocks=64)  # two are the scratch reserve
    lease = desk.prefill(16 * 62)
    desk.seal(lease, desk.names(62))
    desk.device.rest("ann", desk.progress(lease), 32)
    plan = desk.device.begin_press(lease.lease_id, policy_for(lease))
    assert not plan.in_place
    desk.device.finish_compress(lease.lease_id, plan.target_tokens)
    assert len(desk.lease(16 * 60).blocks) == 60
    desk.device.check()


def test_each_rest_has_a_floor_of_its_own_and_else_the_one_that_was_leased() -> None:
    desk = Desk()
    lease = rested(desk, 0, floor=64)
    assert not can_give(lease)
    desk.device.wake("ann", lease.lease_id)
    desk.device.rest("ann", desk.progress(lease), 128)
    assert lease.resting_floor == 128
    desk.device.wake("ann", lease.lease_id)
    desk.device.rest("ann", desk.progress(lease), None)
    assert (lease.floor, lease.resting_floor) == (64, 64)
    assert can_give(lease)


def test_a_rest_with_a_floor_does_not_make_an_active_lease_one_to_be_pruned() -> None:
    desk = Desk()
    lease = rested(desk, 32)
    assert can_give(lease)
    assert desk.device.wake("ann", lease.lease_id).state is LeaseState.ACTIVE
    assert not could_be_compressible(lease)
