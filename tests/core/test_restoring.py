"""A lease goes back to its checkpoint: for a while it has both, but only one of them is counted."""

import pytest

from kvd import errors as e
from kvd.policy import KeyDiff
from kvd_daemon.core import Lease, Quota
from kvd_daemon.engine.exhaustion import Exhaustion

from .desk import TTL, Desk

HALF = KeyDiff(keep=0.5)


def compressed(desk: Desk, blocks: int = 40) -> Lease:
    """Half of it is left, all of it in the host tier."""
    desk.device.set_tiers(1 << 30, 0)
    lease = desk.prefill(16 * blocks)
    plan = desk.device.begin_compress("ann", desk.progress(lease), HALF, None, 0, True)
    desk.device.finish_compress(lease.lease_id, plan.target_tokens, [0] * blocks)
    return lease


def restore(desk: Desk, lease: Lease) -> None:
    desk.device.begin_restore("ann", desk.progress(lease), 0)
    desk.device.finish_fetch(lease.lease_id)
    desk.device.check()


def explained(desk: Desk, lease: Lease) -> e.KvdError:
    with pytest.raises((e.PoolExhaustedError, e.QuotaExceededError)) as caught:
        restore(desk, lease)
    return Exhaustion(desk.device, []).explained(caught.value, "red", TTL)


def test_a_tenant_at_its_maximum_gets_its_lease_back() -> None:
    desk = Desk()
    lease = compressed(desk)
    desk.device.set_quotas({"red": Quota(max_blocks=40)}, Quota())
    restore(desk, lease)
    assert len(lease.blocks) == 40


def test_what_others_of_the_tenant_have_counts() -> None:
    desk = Desk(blocks=100)
    lease = compressed(desk)
    other = desk.lease(16, who="ben")
    desk.device.set_quotas({"red": Quota(max_blocks=40)}, Quota())
    error = explained(desk, lease)
    assert error.retry_after_ns
    assert "holds 1 beside 20 of the lease itself" in str(error)
    desk.device.release("ben", [other.lease_id])
    restore(desk, lease)


def test_blocks_that_another_lease_shares_stay_with_the_tenant() -> None:
    desk = Desk(blocks=100)
    lease = compressed(desk)
    desk.device.fork("ann", desk.progress(lease), 1, 0)
    desk.device.set_quotas({"red": Quota(max_blocks=59)}, Quota())
    assert explained(desk, lease).retry_after_ns
    desk.device.set_quotas({"red": Quota(max_blocks=60)}, Quota())
    restore(desk, lease)


def test_more_than_the_maximum_is_never_waited_for() -> None:
    desk = Desk()
    lease = compressed(desk)
    desk.device.set_quotas({"red": Quota(max_blocks=39)}, Quota())
    assert explained(desk, lease).retry_after_ns is None


def test_a_pool_without_room_for_both_is_never_waited_for() -> None:
    desk = Desk(blocks=60)  # one of them is the scratch reserve
    error = explained(desk, compressed(desk))
    assert error.retry_after_ns is None
    assert "which has 39 when empty beside 20 of the lease itself" in str(error)
