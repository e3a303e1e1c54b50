"""Streaming leases: the same blocks for ever, whatever comes."""

import numpy as np
import pytest
import torch

import kvd_client
from kvd_client import Streaming

from .daemon import Daemon

SINKS, WINDOW = 4, 40


@pytest.fixture
def policy() -> Streaming:
    return Streaming(sinks=SINKS, window=WINDOW)


def _append(lease: kvd_client.Lease, count: int) -> None:
    """Tokens whose keys and values are their positions."""
    positions = torch.arange(lease.position, lease.position + count, dtype=torch.float32)
    rows = positions[:, None, None].expand(count, 2, 16)
    slots = lease.extend(count)
    lease.pool.write(0, slots, rows, -rows)
    lease.commit(count)


def _seen(lease: kvd_client.Lease) -> list[int]:
    k, v = lease.gather(0)
    assert torch.equal(k, -v)
    return [int(position) for position in k[:, 0, 0]]


def _visible(position: int) -> list[int]:
    return [*range(min(SINKS, position)), *range(max(SINKS, position - WINDOW), position)]


def test_10000_tokens_in_chunks_take_a_constant_number_of_blocks(
    daemon: Daemon, new_pool, spec, policy
) -> None:
    pool = new_pool(spec)
    blocks = policy.capacity_blocks(spec.block_size)
    chunks = np.random.default_rng(1).integers(1, WINDOW, 1000)
    with pool.lease(policy=policy) as lease:
        for chunk in chunks[: int(np.searchsorted(np.cumsum(chunks), 10_000)) + 1].tolist():
            _append(lease, chunk)
            assert lease.block_table.size == blocks
        assert lease.position >= 10_000
        assert daemon.pool_status(pool.name).blocks_leased == blocks
        assert _seen(lease) == _visible(lease.position)


def test_one_token_at_a_time_the_window_is_always_the_last_tokens(new_pool, spec, policy) -> None:
    with new_pool(spec).lease(policy=policy) as lease:
        for position in range(1, 200):
            _append(lease, 1)
            assert _seen(lease) == _visible(position)
            assert lease.visible_slots().size == min(position, SINKS + WINDOW)


@pytest.mark.parametrize("prompt", [1, 3, 30, 44, 80, 81, 300, 5000])
@pytest.mark.parametrize("more", [1, 90, 1000])
def test_a_prompt_and_appends_of_any_length_leave_sinks_and_window(
    new_pool, spec, policy, prompt, more
) -> None:
    with new_pool(spec).lease(tokens=prompt, policy=policy) as lease:
        for count in (prompt, more, 1):
            _append(lease, count)
            assert _seen(lease) == _visible(lease.position)
            positions = lease.kept_positions()[:, :, lease.visible_slots()]
            assert (positions == _visible(lease.position)).all()
        assert lease.position == prompt + more + 1


def test_tokens_that_are_passed_over_have_their_slots_in_the_null_block(new_pool, spec, policy) -> None:
    with new_pool(spec).lease(policy=policy) as lease:
        slots = lease.extend(1000)
        nowhere = slots < spec.block_size
        capacity = policy.capacity_blocks(spec.block_size) * spec.block_size
        assert int(np.count_nonzero(~nowhere)) == capacity
        assert not nowhere[:SINKS].any()
        assert not nowhere[-WINDOW:].any()
        assert np.unique(slots[~nowhere]).size == capacity


def test_what_passes_tokens_over_is_committed_as_a_whole(new_pool, spec, policy) -> None:
    with new_pool(spec).lease(policy=policy) as lease:
        slots = lease.extend(1000)
        assert lease.extend(1000).tolist() == slots.tolist()
        with pytest.raises(kvd_client.InvalidArgumentError, match=r"commit\(1000\)"):
            lease.commit(999)
        with pytest.raises(kvd_client.ConflictError, match=r"commit\(1000\)"):
            lease.extend(1)
        for call in (lease.trim, lambda: lease.compress(Streaming())):
            with pytest.raises(kvd_client.ConflictError, match=r"commit\(1000\)"):
                call()
        lease.commit(1000)
        assert lease.position == 1000
        _append(lease, 1)
        assert lease.position == 1001


def test_a_streaming_lease_prunes_itself_and_keeps_its_blocks(new_pool, spec, policy) -> None:
    with new_pool(spec).lease(policy=policy) as lease:
        _append(lease, 100)
        assert lease.compress().unchanged
        with pytest.raises(kvd_client.InvalidArgumentError):
            lease.compress(kvd_client.H2O())
        assert _seen(lease) == _visible(100)


def test_without_sinks_only_the_window_stays(new_pool, spec) -> None:
    with new_pool(spec).lease(policy=Streaming(sinks=0, window=WINDOW)) as lease:
        for count in (500, 3, 60):
            _append(lease, count)
            assert _seen(lease) == list(range(lease.position - WINDOW, lease.position))
