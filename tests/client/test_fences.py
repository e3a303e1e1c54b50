"""A lease that ended gives its reader an error, not bytes; asked before and after, without a call."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.running_kvd import PATIENCE_S

import kvd_client

from .daemon import Daemon


@pytest.fixture
def lease(new_pool, spec) -> kvd_client.Lease:
    """32 tokens, all 3.0."""
    leased = new_pool(spec).lease(tokens=32)
    fill(leased, 32, 3.0)
    return leased


def fill(lease: kvd_client.Lease, tokens: int, value: float) -> None:
    spec = lease.pool.spec
    rows = np.full((tokens, spec.kv_heads, spec.head_dim_k), value, np.float32)
    slots = lease.extend(tokens)
    for layer in range(spec.layers):
        lease.write(layer, slots, rows, rows)
    lease.commit(tokens)


def test_reading_and_writing_a_lease_costs_the_daemon_nothing(daemon: Daemon, lease) -> None:
    with daemon.frozen():
        lease.check()
        k, v = lease.gather(0, "numpy")
        lease.write(0, lease.slot_mapping(0, 32), k + 1, v + 1)
        assert (lease.gather(0, "numpy")[1] == 4.0).all()
        assert lease.kept_positions().shape == (2, 2, 32)


def test_a_revoked_leases_reader_hears_it_before_any_event_has_come(daemon: Daemon, lease, client) -> None:
    daemon.revoke(lease.lease_id, "maintenance")
    rows = np.zeros((1, 2, 16), np.float32)
    for use in (
        lease.check,
        lambda: lease.gather(0),
        lease.kept_positions,
        lambda: lease.write(0, lease.slot_mapping(0, 1), rows, rows),
    ):
        with pytest.raises(kvd_client.LeaseRevokedError):
            use()


def test_a_lease_that_ends_while_it_is_read_gives_an_error(daemon: Daemon, lease) -> None:
    class Slow:
        """Slots that take their time: meanwhile an operator takes the lease away."""

        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            daemon.revoke(lease.lease_id, "in the middle")
            return slots

    slots = lease.slot_mapping(0, 32)
    before = lease.gather(0, "numpy")[0].copy()
    with pytest.raises(kvd_client.LeaseRevokedError):
        lease.write(0, Slow(), before, before)


def test_slots_that_moved_under_a_reader_are_an_error(new_pool, spec) -> None:
    pool = new_pool(spec)
    lease = pool.lease(policy=kvd_client.Streaming(sinks=4, window=28))
    fill(lease, lease.capacity, 1.0)
    seen = []

    def read() -> None:
        try:
            lease.check()
        except kvd_client.KvdError as error:
            seen.append(type(error))

    old = lease.handle.state
    lease.extend(16)
    lease.handle.state = old  # a thread that looked at the table before
    reader = threading.Thread(target=read)
    reader.start()
    reader.join(PATIENCE_S)
    assert seen == [kvd_client.StaleGenerationError]


def test_a_daemon_that_cannot_say_why_a_fence_is_down_costs_no_more_than_the_deadline(
    daemon: Daemon, new_pool, spec
) -> None:
    name = new_pool(spec).name
    with kvd_client.connect(daemon.run_dir, timeout=0.3) as client:
        lease = client.pool(name).lease(tokens=16)
        fill(lease, 16, 1.0)
        daemon.revoke(lease.lease_id, "")
        gone = (kvd_client.DeadlineExceededError, kvd_client.LeaseRevokedError)  # the event may have come
        with daemon.frozen(), pytest.raises(gone):
            lease.gather(0)


def test_a_pool_that_was_replaced_is_not_leased_from(daemon: Daemon, client, spec) -> None:
    pool = client.pool("replaced", spec, 16)
    daemon.drop_pool("replaced")
    again = client.pool("replaced", spec, 16)
    assert again.pool_id != pool.pool_id
    with pytest.raises(kvd_client.PoolNotFoundError, match="another one"):
        pool.lease(tokens=16)
    again.lease(tokens=16).release()
    client.close()
    daemon.drop_pool("replaced")


@pytest.mark.parametrize("name", ["fence_slot", "lease_id", "generation"])
@pytest.mark.parametrize("value", [-1, 1 << 70, "0", None, 1.5, True])
def test_a_readable_that_was_tampered_with_is_refused(new_pool, spec, name: str, value: object) -> None:
    pool = new_pool(spec)
    with pool.lease(tokens=16) as lease:
        fill(lease, 16, 1.0)
        readable = replace(lease.readable(), **{name: value})
        with pytest.raises(kvd_client.InvalidArgumentError, match=name):
            pool.gather(0, readable)
