"""Leases that grow, shrink, share and end."""

import gc

import numpy as np
import pytest
import torch

import kvd_client
from kvd_client import LeaseWish

from .daemon import Daemon


def _fill(lease: kvd_client.Lease, tokens: int) -> None:
    lease.extend(tokens)
    lease.commit(tokens)


def test_a_lease_has_room_for_its_tokens_and_never_the_null_block(new_pool, spec) -> None:
    with new_pool(spec).lease(tokens=100) as lease:
        assert lease.block_table.dtype == np.int32
        assert lease.block_table.size == 7
        assert 0 not in lease.block_table
        assert (lease.length, lease.position, lease.capacity) == (0, 0, 112)


def test_slot_mapping_follows_the_block_table(new_pool, spec) -> None:
    with new_pool(spec).lease(tokens=40) as lease:
        slots = lease.slot_mapping(10, 40)
        assert slots.dtype == np.int64
        assert slots.tolist() == [int(lease.block_table[s // 16]) * 16 + s % 16 for s in range(10, 40)]
        with pytest.raises(kvd_client.InvalidArgumentError, match="extend"):
            lease.slot_mapping(0, lease.capacity + 1)


def test_extending_answers_the_slots_of_the_next_tokens_until_they_are_committed(new_pool, spec) -> None:
    with new_pool(spec).lease() as lease:
        first = lease.extend(20)
        assert first.tolist() == lease.extend(20).tolist() == lease.slot_mapping(0, 20).tolist()
        lease.commit(20)
        assert lease.extend(3).tolist() == lease.slot_mapping(20, 23).tolist()
        assert (lease.length, lease.position) == (20, 20)


def test_decoding_asks_the_daemon_only_when_the_blocks_leased_ahead_are_full(
    daemon: Daemon, new_pool, spec
) -> None:
    with new_pool(spec).lease(lease_ahead=1) as lease:
        tables = []
        for _ in range(64):
            lease.extend(1)
            lease.commit(1)
            tables.append(lease.block_table.size)
        assert tables == [2] * 32 + [4] * 32


def test_a_full_pool_grants_what_is_needed_without_what_is_wanted_ahead(new_pool, spec) -> None:
    with new_pool(spec, 8).lease(tokens=7 * 16, lease_ahead=4) as lease:
        _fill(lease, 7 * 16)
        lease.extend(16)
        assert lease.block_table.size == 8


def test_more_than_the_pool_holds_is_refused_and_nothing_is_taken(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec, 8)
    with pytest.raises(kvd_client.PoolExhaustedError) as caught:
        pool.lease_many([LeaseWish(64), LeaseWish(128)])
    assert caught.value.retry_after_ns is None  # no wait would help
    with pool.lease(tokens=100) as lease:
        _fill(lease, 100)
        with pytest.raises(kvd_client.PoolExhaustedError):
            lease.extend(200)
        assert (lease.length, lease.block_table.size) == (100, 7)
    assert daemon.pool_status(pool.name).blocks_leased == 0


def test_committing_more_than_there_is_room_for_is_refused(new_pool, spec) -> None:
    with new_pool(spec).lease(tokens=16) as lease:
        with pytest.raises(kvd_client.InvalidArgumentError, match="extend"):
            lease.commit(17)
        with pytest.raises(kvd_client.InvalidArgumentError):
            lease.commit(-1)
        assert lease.length == 0


@pytest.mark.parametrize("tokens", [-1, 1 << 31])
def test_tokens_outside_the_limits_are_refused_here(new_pool, spec, tokens) -> None:
    pool = new_pool(spec)
    with pool.lease() as lease:
        for call in (lambda: pool.lease(tokens=tokens), lambda: lease.extend(tokens)):
            with pytest.raises(kvd_client.InvalidArgumentError, match="tokens"):
                call()
    with pytest.raises(kvd_client.InvalidArgumentError, match="lease_ahead"):
        pool.lease(lease_ahead=tokens)


def test_numpy_integers_are_integers(new_pool, spec) -> None:
    with new_pool(spec).lease(tokens=np.int64(20)) as lease:
        assert lease.extend(np.int32(20)).size == 20


def test_many_leases_are_made_grown_and_released_together(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    leases = pool.lease_many([LeaseWish(16 * (1 + n), lease_ahead=0) for n in range(4)])
    slots = pool.extend_many(leases, [40, 1, 64, 80])
    assert [s.size for s in slots] == [40, 1, 64, 80]
    assert [lease.block_table.size for lease in leases] == [3, 2, 4, 5]
    held = np.concatenate([lease.block_table for lease in leases])
    assert np.unique(held).size == held.size
    pool.release_many(leases)
    assert daemon.pool_status(pool.name).blocks_free == 64


def test_trimming_gives_back_blocks_without_tokens(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    with pool.lease(tokens=160) as lease:
        lease.commit(33)
        assert lease.trim() == 7
        assert lease.trim() == 0
        assert lease.block_table.size == 3
        assert daemon.pool_status(pool.name).blocks_leased == 3


def test_the_daemon_hears_the_length_with_the_next_call(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    with pool.lease(tokens=16) as lease:
        lease.commit(5)
        _fill(lease, 40)
        lease.trim()
        assert daemon.lease_info(lease.lease_id).length == 45


def test_releasing_twice_does_nothing_and_using_it_afterwards_says_so(daemon: Daemon, new_pool, spec) -> None:
    pool = new_pool(spec)
    lease = pool.lease(tokens=16)
    lease.release()
    lease.release()
    assert daemon.pool_status(pool.name).blocks_free == 64
    for use in (lambda: lease.extend(1), lambda: lease.commit(0), lambda: lease.block_table, lease.compress):
        with pytest.raises(kvd_client.ClosedError, match="released"):
            use()


def test_a_lease_that_is_garbage_collected_is_released_with_the_next_call(
    daemon: Daemon, new_pool, spec
) -> None:
    pool = new_pool(spec)
    forgotten = pool.lease(tokens=512)
    del forgotten
    gc.collect()
    assert daemon.pool_status(pool.name).leases == 1
    with pool.lease(tokens=16):
        assert daemon.pool_status(pool.name).leases == 1


def test_a_sealed_prefix_is_shared_by_its_hashes(new_pool, spec) -> None:
    pool = new_pool(spec)
    hashes = [bytes([number]) * 32 for number in range(3)]
    with pool.lease(tokens=60) as first:
        slots = first.extend(60)
        k, v = torch.randn(60, 2, 16), torch.randn(60, 2, 16)
        pool.write(0, slots, k, v)
        first.commit(60)
        first.seal(hashes)
        assert first.sealed_blocks == 3
        with pool.lease(tokens=100, prefix=hashes) as second:
            assert (second.length, second.position, second.sealed_blocks) == (48, 48, 3)
            assert second.block_table[:3].tolist() == first.block_table[:3].tolist()
            assert second.block_table[3] not in first.block_table
            assert torch.equal(second.gather(0)[0], k[:48])


def test_an_unknown_prefix_is_refused(new_pool, spec) -> None:
    with pytest.raises(kvd_client.PrefixNotFoundError):
        new_pool(spec).lease(tokens=100, prefix=[b"x" * 32])


def test_gather_answers_what_was_written(new_pool, spec) -> None:
    pool = new_pool(spec)
    with pool.lease() as lease:
        k, v = torch.randn(50, 2, 16), torch.randn(50, 2, 16)
        pool.write(1, lease.extend(50), k, v)
        lease.commit(50)
        assert torch.equal(lease.gather(1)[0], k)
        assert np.array_equal(lease.gather(1, "numpy")[1], v.numpy())
        assert lease.kept_positions().shape == (2, 2, 50)
        assert (lease.kept_positions() == np.arange(50)).all()
