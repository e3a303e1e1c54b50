"""A lease leaves the pool and comes back: bytes, positions and scores are what they were."""

import threading
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from tests.client.daemon import Daemon
from tests.daemon.raw_worker import reason_of
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd_client import H2O, Streaming

from .contents import arena_of, assert_same, contents, flip_byte, overwrite, prefill, spec

BLOCK = 16


@pytest.mark.parametrize("layout", ["block_outermost", "layer_outermost"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_suspended_lease_comes_back_with_its_bytes_in_other_blocks(
    client: kvd_client.Client, layout: str, dtype: str
) -> None:
    pool = client.pool(f"{layout}-{dtype}", spec(layout, dtype), 40)
    with pool.lease() as lease:
        before = prefill(lease, 100)
        standing = lease.length, lease.position
        lease.suspend()
        assert lease.capacity == 0
        overwrite(pool, 38)
        with pool.lease(tokens=10):
            lease.resume()
            assert (lease.length, lease.position) == standing
            assert_same(lease, before)
            prefill(lease, 30, seed=1)


def test_while_it_is_suspended_all_its_blocks_are_others_to_lease(
    client: kvd_client.Client, daemon: Daemon
) -> None:
    pool = client.pool("others", spec(), 40)
    with pool.lease() as lease:
        before = prefill(lease, 600)
        lease.suspend()
        status = daemon.pool_status("others")
        assert (status.blocks_free, status.leases_suspended) == (40, 1)
        assert status.parked_bytes > 0
        with pool.lease(tokens=600), pytest.raises(kvd_client.PoolExhaustedError):
            lease.resume()
        lease.resume()
        assert_same(lease, before)
    assert daemon.pool_status("others").parked_bytes == 0


def test_a_compressed_lease_comes_back_with_positions_and_scores(client: kvd_client.Client) -> None:
    pool = client.pool("compressed", spec(), 40)
    queries = np.random.default_rng(5).standard_normal((2, 60, 4, 16), np.float32)
    policy = H2O(sinks=4, recent=8, keep=0.5)
    with pool.lease(policy=policy) as lease, pool.lease(policy=policy) as twin:
        for each in (lease, twin):
            prefill(each, 200)
            each.observe(queries)
            each.compress()
        before, positions = contents(lease), lease.kept_positions()
        lease.suspend()
        overwrite(pool, 32)
        lease.resume()
        assert_same(lease, before)
        np.testing.assert_array_equal(lease.kept_positions(), positions)
        assert lease.position == 200
        for each in (lease, twin):
            each.compress()  # by the scores it had
        assert_same(lease, contents(twin))


def test_a_streaming_lease_goes_on_where_it_was(client: kvd_client.Client) -> None:
    pool = client.pool("streaming", spec(), 40)
    with pool.lease(policy=Streaming(sinks=4, window=100)) as lease:
        prefill(lease, 300)
        before, positions = contents(lease), lease.kept_positions()
        lease.suspend()
        overwrite(pool, 38)
        lease.resume()
        assert_same(lease, before)
        np.testing.assert_array_equal(lease.kept_positions(), positions)
        prefill(lease, 50, seed=1)
        assert lease.position == 350


def test_shared_blocks_are_copied_and_stay_with_who_shares_them(client: kvd_client.Client) -> None:
    pool, prompt = client.pool("shared", spec(), 40), list(range(70))
    with pool.lease(prompt=prompt) as first:
        before = prefill(first, 70)
        first.seal_prompt()
        with pool.lease(prompt=prompt) as second:
            assert second.prefix_tokens == 64
            shared = contents(second)
            first.suspend()
            assert_same(second, shared)
        overwrite(pool, 39)
        first.resume()
        assert first.sealed_blocks == 0
        assert_same(first, before)


def test_what_needs_slots_is_refused_until_it_is_resumed(client: kvd_client.Client, daemon: Daemon) -> None:
    pool = client.pool("refused", spec(), 40)
    with pool.lease() as lease:
        before = prefill(lease, 40)
        with pytest.raises(kvd_client.InvalidArgumentError, match="not suspended"):
            lease.resume()
        lease.suspend()
        assert daemon.lease_info(lease.lease_id).state == "suspended"
        for call in (
            lambda: lease.extend(1),
            lease.suspend,
            lambda: lease.gather(0),
            lambda: lease.compress(H2O(recent=1, keep=0.5)),
            lambda: lease.seal([b"h" * 32]),
            lambda: lease.publish("key"),
            lambda: lease.commit(1),
            lambda: lease.slot_mapping(0, 1),
            lambda: lease.slot_mapping(0, 0),
            lambda: lease.block_table,
            lease.visible_slots,
            lease.check,
            lease.rest,
            lease.wake,
        ):
            with pytest.raises(kvd_client.LeaseSuspendedError, match="resume"):
                call()
        with pytest.raises(grpc.RpcError) as refused:
            daemon.drop_pool("refused")
        assert reason_of(refused.value) == "POOL_IN_USE"
        lease.resume()
        assert_same(lease, before)


def test_calls_that_broke_off_on_the_way_out_or_back_are_simply_made_again(
    client: kvd_client.Client, daemon: Daemon
) -> None:
    pool = client.pool("broken-off", spec(), 40)
    with pool.lease() as lease:
        before = prefill(lease, 40)
        for leave, come_back in ((lease.suspend, lease.resume), (lease.rest, lease.wake)):
            for left in (False, True):
                if left:
                    leave()
                with daemon.frozen(), pytest.raises(kvd_client.DeadlineExceededError):
                    come_back(timeout=0.3) if left else break_off(lease, leave)
                come_back()
                assert_same(lease, before)


def break_off(lease: kvd_client.Lease, leave: Callable[[], None]) -> None:
    """Of a client that is in a hurry."""
    session = lease.pool.session
    patient_s, session.timeout_s = session.timeout_s, 0.3
    try:
        lease.suspend(timeout=0.3) if leave == lease.suspend else leave()
    finally:
        session.timeout_s = patient_s


def test_a_full_tier_is_an_error_and_the_lease_is_as_it_was(
    client: kvd_client.Client, daemon: Daemon
) -> None:
    pool = client.pool("full", spec(), 2000)
    with pool.lease() as large, pool.lease() as small:
        before, mine = prefill(large, 1000 * BLOCK), prefill(small, 10 * BLOCK, seed=1)
        with pytest.raises(kvd_client.TierFullError, match="--host-tier"):
            large.suspend()
        assert_same(large, before)
        small.suspend()
        status = daemon.status()
        assert 0 < status.host_tier_used_bytes < status.host_tier_bytes
        small.resume()
        assert_same(small, mine)


def test_without_a_tier_nothing_can_be_suspended(shared_kvd: RunningKvd) -> None:
    with kvd_client.connect(shared_kvd.run_dir) as client, client.pool("pool", spec(), 4).lease() as lease:
        before = prefill(lease, 20)
        with pytest.raises(kvd_client.TierFullError, match="--host-tier"):
            lease.suspend()
        assert_same(lease, before)


def test_who_resumes_may_wait_for_blocks(client: kvd_client.Client) -> None:
    pool = client.pool("waiting", spec(), 20)
    with pool.lease() as lease:
        before = prefill(lease, 200)
        lease.suspend()
        other = pool.lease(tokens=200)
        timer = threading.Timer(0.3, other.release)
        timer.start()
        lease.resume(wait=PATIENCE_S)
        timer.join()
        assert_same(lease, before)


def test_damaged_bytes_are_a_lost_lease_and_never_data(
    client: kvd_client.Client, tiered_kvd: RunningKvd
) -> None:
    pool = client.pool("damaged", spec(), 40)
    with pool.lease() as first, pool.lease() as second:
        prefill(first, 40)
        before = prefill(second, 40, seed=1)
        first.suspend()
        second.suspend()
        flip_byte(arena_of(tiered_kvd, pool), 100)
        with pytest.raises(kvd_client.LeaseLostError, match="damaged"):
            first.resume()
        second.resume()
        assert_same(second, before)


def test_freed_slots_give_their_memory_back(client: kvd_client.Client, tiered_kvd: RunningKvd) -> None:
    pool = client.pool("punched", spec(), 40)
    with pool.lease() as lease:
        prefill(lease, 600)
        lease.suspend()
        arena = arena_of(tiered_kvd, pool)
        assert arena.stat().st_blocks > 0
        lease.resume()
        eventually(lambda: arena.stat().st_blocks == 0, "punched slots")


def test_a_released_and_a_revoked_lease_leave_nothing_parked(
    client: kvd_client.Client, daemon: Daemon
) -> None:
    pool = client.pool("ended", spec(), 40)
    released, revoked = pool.lease(), pool.lease()
    for lease in (released, revoked):
        prefill(lease, 100)
        lease.suspend()
    released.release()
    daemon.revoke(revoked.lease_id, "test")
    assert daemon.pool_status("ended").parked_bytes == 0
    with pytest.raises(kvd_client.LeaseRevokedError):
        revoked.resume()
    revoked.release()


def test_a_suspended_lease_ends_with_its_process(tiered_kvd: RunningKvd, daemon: Daemon) -> None:
    with kvd_client.connect(tiered_kvd.run_dir) as client:
        lease = client.pool("gone", spec(), 40).lease()
        prefill(lease, 100)
        lease.suspend()
        assert daemon.pool_status("gone").parked_bytes > 0
    eventually(lambda: daemon.pool_status("gone").parked_bytes == 0, "slots come back")
