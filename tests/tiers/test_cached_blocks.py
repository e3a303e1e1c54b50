"""A prompt that was evicted is found again: its blocks have copies in the host tier."""

import os
import signal

import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd_daemon.core.tiers import slot_bytes

from .contents import Contents, arena_of, assert_same, contents, flip_byte, prefill, spec

BLOCKS, BLOCK = 60, 16
PROMPT = list(range(20 * BLOCK + 1))  # twenty blocks, and the token that is never part of a prefix


def sealed(pool: kvd_client.Pool) -> Contents:
    """The prompt was computed and let go."""
    with pool.lease(prompt=PROMPT) as lease:
        assert lease.prefix_tokens == 0
        prefill(lease, len(PROMPT) - 1)
        lease.seal_prompt()
        return contents(lease)


def evict(pool: kvd_client.Pool, daemon: Daemon) -> None:
    """Others need all of the pool, after the prompt's blocks were copied."""
    pressure = pool.lease(tokens=34 * BLOCK)
    eventually(lambda: daemon.pool_status(pool.name).blocks_copied == 20, "copies of cached blocks")
    pressure.release()
    with pool.lease(tokens=(BLOCKS - 1) * BLOCK):
        assert daemon.pool_status(pool.name).blocks_cached <= 1  # the pool's reserve


@pytest.mark.parametrize("layout", ["block_outermost", "layer_outermost"])
def test_an_evicted_prompt_is_found_with_its_bytes(
    client: kvd_client.Client, daemon: Daemon, layout: str
) -> None:
    pool = client.pool(f"found-{layout}", spec(layout), BLOCKS)
    before = sealed(pool)
    evict(pool, daemon)
    with pool.lease(prompt=PROMPT) as lease:
        assert lease.prefix_tokens == len(PROMPT) - 1
        assert_same(lease, before)


def test_the_next_daemon_finds_it_too(
    client: kvd_client.Client, daemon: Daemon, tiered_kvd: RunningKvd
) -> None:
    pool = client.pool("restarted", spec(), BLOCKS)
    before = sealed(pool)
    evict(pool, daemon)
    os.kill(tiered_kvd.daemon_pid(), signal.SIGKILL)
    with pool.lease(prompt=PROMPT, wait=PATIENCE_S) as lease:
        assert lease.prefix_tokens == len(PROMPT) - 1
        assert_same(lease, before)


def test_a_damaged_copy_is_a_miss_and_never_data(
    client: kvd_client.Client, daemon: Daemon, tiered_kvd: RunningKvd
) -> None:
    pool = client.pool("damaged", spec(), BLOCKS)
    before = sealed(pool)
    evict(pool, daemon)
    flip_byte(arena_of(tiered_kvd, pool), 7 * slot_bytes(pool.spec) + 50)
    with pool.lease(prompt=PROMPT) as lease:
        found = lease.prefix_tokens
        assert found < len(PROMPT) - 1
        assert found % BLOCK == 0
        if found:
            for (k, v), (k_before, v_before) in zip(contents(lease), before, strict=True):
                assert (k == k_before[:found]).all()
                assert (v == v_before[:found]).all()


def test_copies_make_room_for_what_is_suspended(client: kvd_client.Client, daemon: Daemon) -> None:
    pool = client.pool("room", spec(), BLOCKS)
    sealed(pool)
    evict(pool, daemon)
    large = client.pool("large", spec(), 800)
    with large.lease() as lease:
        before = prefill(lease, 640 * BLOCK)  # nearly all of the tier
        lease.suspend(timeout=PATIENCE_S)
        lease.resume(timeout=PATIENCE_S)
        assert_same(lease, before)


def test_another_tenants_or_pools_copies_are_nobody_elses(client: kvd_client.Client, daemon: Daemon) -> None:
    pool = client.pool("mine", spec(), BLOCKS)
    sealed(pool)
    evict(pool, daemon)
    with client.pool("other", spec(), BLOCKS).lease(prompt=PROMPT) as lease:
        assert lease.prefix_tokens == 0
    with pool.lease(prompt=PROMPT, namespace="another model") as lease:
        assert lease.prefix_tokens == 0
