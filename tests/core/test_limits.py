"""Every limit is refused by name, and nothing changes."""

import pytest

from kvd import errors as e
from kvd.spec import KVSpec
from kvd_daemon.core import Device, LeaseWish, Limits, Progress, SessionIdentity

from .desk import SPEC, Desk

FEW = Limits(
    pools=2, blocks_per_pool=64, sessions=4, leases_per_session=3, items_per_call=2, hashes_per_call=2
)


def test_no_more_pools_blocks_or_memory_than_there_may_be() -> None:
    device = Device(SPEC.pool_bytes(201), FEW)
    for blocks in (65, -1):
        with pytest.raises(e.LimitExceededError):
            device.create_pool("big", SPEC, blocks, "x")
    device.create_pool("one", SPEC, 64, "x")
    device.create_pool("two", SPEC, 64, "x")
    with pytest.raises(e.LimitExceededError, match="2 pools"):
        device.create_pool("three", SPEC, 1, "x")
    device.drop_pool("two")
    with pytest.raises(e.PoolNotFoundError):
        device.drop_pool("two")
    small = Device(SPEC.pool_bytes(11))
    with pytest.raises(e.DeviceFullError, match="ask for 10 blocks"):
        small.create_pool("pool", SPEC, 11, "x")
    small.create_pool("pool", SPEC, 10, "x")
    assert small.memory_used_bytes == SPEC.pool_bytes(11)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "x" * 129, "ü"])
def test_a_pool_name_is_short_and_plain(name) -> None:
    with pytest.raises(e.InvalidArgumentError):
        Device(1 << 30).create_pool(name, SPEC, 1, "x")


def test_a_pool_of_another_geometry_is_refused_by_the_differing_fields() -> None:
    device = Device(1 << 30)
    pool, created = device.create_pool("pool", SPEC, 8, "first")
    assert created
    assert device.create_pool("pool", SPEC, 0, "second") == (pool, False)
    other = KVSpec(layers=3, kv_heads=2, head_dim_k=8, head_dim_v=8, block_size=8)
    with pytest.raises(e.PoolMismatchError) as caught:
        device.create_pool("pool", other, 8, "third")
    assert caught.value.metadata["fields"] == "layers,block_size"
    with pytest.raises(e.PoolNotFoundError, match="how many blocks"):
        device.create_pool("absent", SPEC, 0, "fourth")


def test_a_pool_with_leases_stays() -> None:
    desk = Desk()
    lease = desk.lease(16)
    with pytest.raises(e.PoolInUseError, match="1 leases"):
        desk.device.drop_pool("pool")
    desk.device.release("ann", [lease.lease_id])
    desk.device.drop_pool("pool")


def test_no_more_sessions_leases_items_or_hashes_than_there_may_be() -> None:
    desk = Desk(limits=FEW)
    desk.device.open_session(SessionIdentity("dan", "red", 1, 1), 1, 0)
    with pytest.raises(e.LimitExceededError, match="4 sessions"):
        desk.device.open_session(SessionIdentity("eve", "red", 1, 1), 1, 0)
    with pytest.raises(e.LimitExceededError, match="3 leases in one call"):
        desk.device.lease("ann", "pool", [LeaseWish(1)] * 3, 0)
    desk.device.lease("ann", "pool", [LeaseWish(1)] * 2, 0)
    with pytest.raises(e.LimitExceededError, match="4 leases in one session"):
        desk.device.lease("ann", "pool", [LeaseWish(1)] * 2, 0)
    with pytest.raises(e.LimitExceededError, match="3 prefix hashes"):
        desk.lease(1, prefix_hashes=desk.names(3))


def test_a_lease_has_no_more_tokens_than_an_int32_counts() -> None:
    desk = Desk()
    with pytest.raises(e.LimitExceededError):
        desk.lease(1 << 31)
    lease = desk.lease(16)
    for tokens, error in ((-1, e.InvalidArgumentError), (1 << 31, e.LimitExceededError)):
        with pytest.raises(error):
            desk.device.extend("ann", [(Progress(lease.lease_id, 1, 0, 0), tokens)], 0)


def test_a_scratch_lease_is_blocks_and_nothing_else() -> None:
    desk = Desk()
    donor = desk.prefill(16)
    desk.seal(donor, desk.names(1))
    with pytest.raises(e.InvalidArgumentError, match="neither a policy nor a prefix"):
        desk.lease(16, scratch=True, prefix_hashes=desk.names(1))
    with pytest.raises(e.InvalidArgumentError, match="nothing to compress"):
        desk.compress(desk.lease(16, scratch=True))
