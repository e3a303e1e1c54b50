"""A prompt that was evicted is found again: its blocks have copies in the host tier."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd_daemon.core.tiers import slot_bytes

from .contents import arena_of, assert_same, flip_byte, prefill, spec
from .prompts import BLOCK, BLOCKS, PROMPT, assert_begins, evict, prompt, sealed


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
        assert_begins(lease, before)


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


def test_who_finds_all_of_a_prompt_in_blocks_waits_for_no_other_prompt_to_come_back(
    client: kvd_client.Client, daemon: Daemon, tiered_kvd: RunningKvd
) -> None:
    pool, other = client.pool("slow", spec(), BLOCKS), client.pool("quick", spec(), BLOCKS)
    before = sealed(pool)
    evict(pool, daemon)
    sealed(pool, seed=1)
    sealed(other)
    psutil.Process(tiered_kvd.kernel_pid()).suspend()
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(lambda: pool.lease(prompt=PROMPT))
        eventually(lambda: daemon.pool_status("slow").blocks_leased, "blocks for what comes back")
        for quick, seed in ((other, 0), (pool, 1)):
            with quick.lease(prompt=prompt(seed)) as lease:
                assert lease.prefix_tokens == len(PROMPT) - 1
        assert not coming.done()
        with coming.result(PATIENCE_S) as lease:  # by another kernel worker
            assert lease.prefix_tokens == len(PROMPT) - 1
            assert_same(lease, before)
