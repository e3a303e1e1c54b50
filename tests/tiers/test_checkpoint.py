"""A compressed lease goes back to what it was: a question that the compression dropped can still be asked."""

import os
import signal

import numpy as np
import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd

import kvd_client
from kvd_client import H2O, SnapKV

from .contents import Contents, arena_of, assert_same, contents, flip_byte, overwrite, prefill, spec

QUERIES = np.random.default_rng(5).standard_normal((2, 8, 4, 16), np.float32)
SNAP = SnapKV(window=8, keep=0.3)


def compressed(lease: kvd_client.Lease, tokens: int = 200) -> Contents:
    """What the lease held before it was compressed with a checkpoint."""
    before = prefill(lease, tokens)
    lease.compress(SNAP, QUERIES, park=True)
    assert lease.length < tokens
    return before


def test_a_compressed_lease_goes_back_to_what_it_was(client: kvd_client.Client, daemon: Daemon) -> None:
    pool = client.pool("back", spec(), 60)
    with pool.lease() as lease:
        before = compressed(lease)
        prefill(lease, 30, seed=1)
        overwrite(pool, 30)
        assert lease.restore() == 30
        assert (lease.length, lease.position, lease.compressed_length) == (200, 200, 0)
        assert_same(lease, before)
        assert daemon.pool_status("back").parked_bytes == 0
        prefill(lease, 30, seed=2)


@pytest.mark.parametrize("layout", ["block_outermost", "layer_outermost"])
def test_the_first_of_several_checkpoints_counts(client: kvd_client.Client, layout: str) -> None:
    with client.pool(f"first-{layout}", spec(layout), 60).lease() as lease:
        before = compressed(lease)
        prefill(lease, 100, seed=1)
        lease.compress(SNAP, QUERIES, park=True)
        lease.restore()
        assert_same(lease, before)
        with pytest.raises(kvd_client.InvalidArgumentError, match="park=True"):
            lease.restore()


def test_running_scores_are_back_too(client: kvd_client.Client) -> None:
    queries = np.random.default_rng(6).standard_normal((2, 60, 4, 16), np.float32)
    pool, policy = client.pool("scores", spec(), 60), H2O(sinks=4, recent=8, keep=0.5)
    with pool.lease(policy=policy) as lease, pool.lease(policy=policy) as twin:
        for each in (lease, twin):
            prefill(each, 150)
            each.observe(queries)
        lease.compress(park=True)
        lease.restore()
        for each in (lease, twin):
            each.compress()
        assert_same(lease, contents(twin))
        np.testing.assert_array_equal(lease.kept_positions(), twin.kept_positions())


def test_it_stays_while_the_lease_is_suspended(client: kvd_client.Client) -> None:
    with client.pool("both", spec(), 60).lease() as lease:
        before = compressed(lease)
        kept = contents(lease)
        lease.suspend()
        lease.resume()
        assert_same(lease, kept)
        lease.restore()
        assert_same(lease, before)


def test_where_nothing_is_pruned_nothing_is_parked(client: kvd_client.Client, daemon: Daemon) -> None:
    with client.pool("unchanged", spec(), 60).lease() as lease:
        prefill(lease, 40)
        assert lease.compress(SnapKV(window=8, keep=1.0), QUERIES, park=True).unchanged
        assert daemon.pool_status("unchanged").parked_bytes == 0


def test_without_room_the_lease_is_as_it_was(client: kvd_client.Client) -> None:
    with client.pool("no-room", spec(), 2000).lease() as lease:
        before = prefill(lease, 16_000)
        with pytest.raises(kvd_client.TierFullError):
            lease.compress(SNAP, QUERIES, park=True)
        assert_same(lease, before)
        lease.compress(SNAP, QUERIES)


def test_a_damaged_checkpoint_is_an_error_and_the_lease_goes_on(
    client: kvd_client.Client, tiered_kvd: RunningKvd
) -> None:
    pool = client.pool("damaged", spec(), 60)
    with pool.lease() as lease:
        compressed(lease)
        kept = contents(lease)
        flip_byte(arena_of(tiered_kvd, pool), 5000)
        with pytest.raises(kvd_client.CheckpointLostError, match="damaged"):
            lease.restore()
        assert_same(lease, kept)
        prefill(lease, 10, seed=1)
        with pytest.raises(kvd_client.InvalidArgumentError):
            lease.restore()


def test_it_outlives_the_daemon(client: kvd_client.Client, tiered_kvd: RunningKvd) -> None:
    with client.pool("outlives", spec(), 60).lease() as lease:
        before = compressed(lease)
        os.kill(tiered_kvd.daemon_pid(), signal.SIGKILL)
        lease.restore(timeout=PATIENCE_S)
        assert_same(lease, before)


def test_a_checkpoint_that_nobody_needs_gives_its_room_back(
    client: kvd_client.Client, daemon: Daemon, tiered_kvd: RunningKvd
) -> None:
    with client.pool("dropped", spec(), 60).lease() as lease:
        compressed(lease)
        kept = contents(lease)
        lease.drop_checkpoint()
        assert daemon.pool_status("dropped").parked_bytes == 0
        assert_same(lease, kept)
        with pytest.raises(kvd_client.InvalidArgumentError, match="no checkpoint"):
            lease.restore()
        lease.drop_checkpoint()
        prefill(lease, 200, seed=2)
        lease.compress(SNAP, QUERIES, park=True)
        lease.suspend()
        both = daemon.pool_status("dropped").parked_bytes
        lease.drop_checkpoint()
        assert 0 < daemon.pool_status("dropped").parked_bytes < both
        os.kill(tiered_kvd.daemon_pid(), signal.SIGKILL)
        lease.resume(timeout=PATIENCE_S)
        with pytest.raises(kvd_client.InvalidArgumentError, match="no checkpoint"):
            lease.restore()
