"""What a tenant holds, and what it may hold: the core alone."""

import pytest
from tests.core.desk import SPEC, Desk
from tests.core.test_cost import cycle, device_of, lines_and_bytes

from kvd import errors as e
from kvd.policy import SnapKV, Streaming
from kvd_daemon.core import LeaseWish, QueryShape, Quota

BLOCK = SPEC.block_size
HALF = SnapKV(window=8, keep=0.5)


def held(desk: Desk, tenant: str = "red") -> int:
    desk.device.check()
    return desk.device.quotas.held.get(desk.device.tenants[tenant], 0)


def desk_with(blocks: int = 64, **quotas: Quota) -> Desk:
    desk = Desk(blocks)
    desk.device.set_quotas(quotas, Quota())
    return desk


def test_a_block_that_several_leases_share_is_held_once_and_a_cached_one_by_nobody() -> None:
    desk = Desk()
    donor = desk.prefill(4 * BLOCK)
    desk.seal(donor, desk.names(4))
    assert held(desk) == 4
    sharer = desk.lease(5 * BLOCK, who="ben", prefix_hashes=desk.names(4))
    assert held(desk) == 5
    desk.device.release("ann", [donor.lease_id])
    assert held(desk) == 5
    desk.device.release("ben", [sharer.lease_id])
    assert held(desk) == 0
    desk.lease(4 * BLOCK, prefix_hashes=desk.names(4))
    assert held(desk) == 4, "woken up, it is held again"


def test_quarantined_blocks_are_held_until_nobody_can_write_to_them() -> None:
    desk = Desk()
    lease = desk.prefill(3 * BLOCK)
    desk.device.revoke(lease.lease_id)
    assert held(desk) == 3
    desk.device.release("ann", [lease.lease_id])
    assert held(desk) == 0


def test_what_a_tenant_holds_in_all_pools_counts_for_all_its_sessions() -> None:
    desk = desk_with(red=Quota(max_blocks=10))
    desk.device.create_pool("other", SPEC, 64, "other")
    desk.device.lease("ann", "other", [LeaseWish(6 * BLOCK)], 0)
    with pytest.raises(e.QuotaExceededError):
        desk.lease(5 * BLOCK, who="ben")
    desk.lease(4 * BLOCK, who="ben")
    desk.lease(50 * BLOCK, who="cat")
    assert held(desk) == 10


def test_a_call_beyond_the_maximum_changes_nothing() -> None:
    desk = desk_with(red=Quota(max_blocks=10))
    lease = desk.prefill(8 * BLOCK)
    with pytest.raises(e.QuotaExceededError) as caught:
        desk.extend(lease, 3 * BLOCK)
    assert caught.value.metadata["wanted_blocks"] == "3"
    assert held(desk) == 8
    desk.extend(lease, 2 * BLOCK)


def test_a_tenant_at_its_maximum_can_compress_which_frees_blocks_for_it() -> None:
    desk = desk_with(red=Quota(max_blocks=10))
    lease = desk.prefill(10 * BLOCK)
    scratch = desk.lease(BLOCK, scratch=True)
    plan = desk.compress(lease, HALF, QueryShape(8, 2, scratch.lease_id))
    assert not plan.in_place
    assert held(desk) == 10 + 1 + 5
    desk.device.finish_compress(lease.lease_id, plan.target_tokens)
    desk.device.release("ann", [scratch.lease_id])
    assert held(desk) == 5


def test_a_streaming_lease_at_the_maximum_goes_on_for_ever() -> None:
    policy = Streaming(sinks=BLOCK, window=4 * BLOCK)
    blocks = policy.capacity_blocks(BLOCK)
    desk = desk_with(red=Quota(max_blocks=blocks))
    lease = desk.prefill(blocks * BLOCK, policy)
    for _ in range(20):
        desk.extend(lease, BLOCK)
    assert held(desk) == blocks


def test_lower_quotas_take_nothing_away_but_nothing_more_is_granted() -> None:
    desk = Desk()
    lease = desk.lease(20 * BLOCK)
    desk.device.set_quotas({"red": Quota(max_blocks=10)}, Quota())
    with pytest.raises(e.QuotaExceededError):
        desk.lease(1)
    desk.device.release("ann", [lease.lease_id])
    desk.lease(10 * BLOCK)


def test_a_guarantee_is_kept_for_its_tenant_though_nobody_of_it_ever_came() -> None:
    desk = desk_with(new=Quota(guaranteed_blocks=20))
    with pytest.raises(e.PoolExhaustedError) as caught:
        desk.lease(43 * BLOCK)
    assert (caught.value.metadata["free_blocks"], caught.value.metadata["kept_blocks"]) == ("42", "20")
    desk.lease(42 * BLOCK)


def test_a_guarantee_is_kept_from_scratch_leases_too() -> None:
    desk = desk_with(blue=Quota(guaranteed_blocks=20))
    desk.lease(42 * BLOCK)
    desk.lease(2 * BLOCK, scratch=True)
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(BLOCK, scratch=True)
    desk.lease(20 * BLOCK, who="cat")
    assert held(desk, "blue") == 20


def test_what_is_held_uses_up_the_guarantee_and_comes_back_to_it() -> None:
    desk = desk_with(blue=Quota(guaranteed_blocks=20))
    mine = desk.lease(15 * BLOCK, who="cat")
    desk.lease(42 * BLOCK)
    desk.device.release("cat", [mine.lease_id])
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(1)
    desk.lease(20 * BLOCK, who="cat")


def test_guarantees_beyond_a_pool_are_met_in_proportion() -> None:
    desk = desk_with(red=Quota(guaranteed_blocks=300), blue=Quota(guaranteed_blocks=100))
    with pytest.raises(e.PoolExhaustedError, match="47 free"):
        desk.lease(48 * BLOCK)
    desk.lease(47 * BLOCK)
    desk.lease(15 * BLOCK, who="cat")


def test_guarantees_that_come_while_others_hold_the_blocks_are_met_as_they_come_back() -> None:
    desk = Desk()
    first, _ = desk.lease(30 * BLOCK), desk.lease(32 * BLOCK)
    desk.device.set_quotas({"blue": Quota(guaranteed_blocks=20)}, Quota())
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(3 * BLOCK, who="cat")
    desk.device.release("ann", [first.lease_id])
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(13 * BLOCK)
    desk.lease(20 * BLOCK, who="cat")


@pytest.mark.parametrize(
    "numbers", [{"max_blocks": -1}, {"pin_blocks": -1}, {"guaranteed_blocks": 2, "max_blocks": 1}]
)
def test_a_quota_that_makes_no_sense_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(e.InvalidArgumentError):
        Quota(**numbers)


def test_a_pool_is_shared_out_anew_when_it_is_created() -> None:
    desk = desk_with(blue=Quota(guaranteed_blocks=20))
    desk.device.drop_pool("pool")
    desk.device.create_pool("pool", SPEC, 64, "again")
    with pytest.raises(e.PoolExhaustedError):
        desk.lease(43 * BLOCK)
    desk.device.check()


def test_a_call_costs_the_same_however_many_tenants_have_quotas() -> None:
    none, many = device_of(100_000), device_of(100_000)
    for device, count in ((none, 1), (many, 1000)):
        quotas = {f"tenant {n}": Quota(guaranteed_blocks=3, max_blocks=50) for n in range(count)}
        device.set_quotas(quotas, Quota(max_blocks=10_000))
        cycle(device, 8)
    assert lines_and_bytes(lambda: cycle(many, 8))[0] == lines_and_bytes(lambda: cycle(none, 8))[0]
