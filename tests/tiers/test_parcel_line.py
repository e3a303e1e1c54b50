"""The order in which parcels were parked, by itself."""

from kvd.spec import KVSpec
from kvd_daemon.core import Device, LeaseWish, Progress, SessionIdentity
from kvd_daemon.engine.parcel_line import FEWEST, ParcelLine

SPEC = KVSpec(layers=1, kv_heads=1, head_dim_k=8, head_dim_v=8)
TTL_NS = 10**18


def tiered_device() -> Device:
    device = Device(1 << 24)
    device.set_tiers(1 << 24, 0)
    device.create_pool("pool", SPEC, 31, "id")
    device.open_session(SessionIdentity("session", "tenant", 1, 1), TTL_NS, 0)
    return device


def suspended(device: Device) -> int:
    """A lease that is."""
    [lease] = device.lease("session", "pool", [LeaseWish(16)], 0).leases
    device.begin_suspend("session", Progress(lease.lease_id, 1, 16, 16), 0)
    return device.finish_suspend(lease.lease_id, [0]).lease_id


def test_what_was_parked_first_comes_first_also_when_it_is_parked_again() -> None:
    device = tiered_device()
    first, second, third = (suspended(device) for _ in range(3))
    line = ParcelLine(device)
    assert list(line) == [(first, False), (second, False), (third, False)]
    line.put((first, False))
    assert list(line) == [(second, False), (third, False), (first, False)]
    device.release("session", [third])
    assert list(line) == [(second, False), (first, False)]


def test_it_does_not_grow_with_what_is_no_more() -> None:
    device = tiered_device()
    line = ParcelLine(device)
    for _ in range(10 * FEWEST):
        lease_id = suspended(device)
        line.put((lease_id, False))
        device.release("session", [lease_id])
    assert len(line) <= FEWEST
    assert list(line) == []


def test_parcels_may_end_while_somebody_walks_along_the_line() -> None:
    device = tiered_device()
    lease_ids = [suspended(device) for _ in range(3)]
    line, met = ParcelLine(device), []
    for lease_id, _ in line:
        met.append(lease_id)
        device.release("session", [other for other in lease_ids if other in device.leases])
    assert met == lease_ids[:1]
