"""Bytes between processes: the same tests for host memory, for a GPU's, and for a GPU of the old kind."""

import os
import signal
import uuid

import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import eventually, is_alive

from kvd_client import DeviceFullError

from .workers import ALLOCATOR, MEMORY, Site

BLOCKS = 32


def fresh_pool() -> str:
    """A name that no other test has."""
    return f"pool-{uuid.uuid4().hex[:8]}"


def status(here: Site, pool: str):
    return Daemon(here.kvd, here.device).pool_status(pool)


def test_what_one_process_writes_another_one_reads(here: Site) -> None:
    writer, reader, pool = here.worker(), here.worker(), fresh_pool()
    assert writer.pool(name=pool, blocks=BLOCKS) == reader.pool(name=pool)
    blocks = writer.fill(pool=pool, lease="a", tokens=40, value=100.0)
    assert writer.numbers(lease="a") == [100.0 + t for t in range(40)]
    assert reader.peek(pool=pool, block_ids=blocks)[:40] == [100.0 + t for t in range(40)]


def test_the_settings_of_torchs_allocator_do_not_matter(here: Site) -> None:
    settings = {ALLOCATOR: "expandable_segments:True,max_split_size_mb:64"}
    writer, reader, pool = here.worker(**settings), here.worker(), fresh_pool()
    writer.pool(name=pool, blocks=BLOCKS)
    reader.pool(name=pool)
    blocks = writer.fill(pool=pool, lease="a", tokens=16, value=100.0)
    assert reader.peek(pool=pool, block_ids=blocks)[:16] == [100.0 + t for t in range(16)]


def test_two_pools_have_nothing_in_common(here: Site) -> None:
    worker, pools = here.worker(), (fresh_pool(), fresh_pool())
    for number, pool in enumerate(pools):
        worker.pool(name=pool, blocks=BLOCKS)
        worker.fill(pool=pool, lease=pool, tokens=32, value=1000.0 * number)
    assert [worker.numbers(lease=pool)[0] for pool in pools] == [0.0, 1000.0]


def test_a_killed_worker_gives_its_blocks_back_and_nobody_else_notices(here: Site) -> None:
    victim, other, pool = here.worker(), here.worker(), fresh_pool()
    for value, worker in enumerate((victim, other)):
        worker.pool(name=pool, blocks=BLOCKS)
        worker.fill(pool=pool, lease="a", tokens=64, value=100.0 * value)
    leased = status(here, pool).blocks_leased
    victim.kill()
    eventually(lambda: status(here, pool).blocks_leased == leased // 2, "the blocks of the killed worker")
    other.fill(pool=pool, lease="a", tokens=64, value=100.0)
    assert other.numbers(lease="a") == [100.0 + t for t in range(128)]


def test_a_pool_beyond_the_devices_memory_is_refused_and_takes_nothing(here: Site) -> None:
    worker, too_many = here.worker(), MEMORY // 4096
    with pytest.raises(DeviceFullError):
        worker.pool(name=fresh_pool(), blocks=too_many)
    assert worker.pool(name=fresh_pool(), blocks=BLOCKS)


@pytest.mark.parametrize("method", ["snapkv", "h2o", "streaming"])
def test_a_compression_keeps_the_bytes_of_the_tokens_that_it_keeps(here: Site, method: str) -> None:
    worker, pool = here.worker(), fresh_pool()
    worker.pool(name=pool, blocks=BLOCKS)
    worker.fill(pool=pool, lease="a", tokens=160, value=500.0)
    before = set(worker.numbers(lease="a"))
    kept, positions = worker.compress(lease="a", method=method)
    assert kept < 160
    assert worker.numbers(lease="a") == [500.0 + position for position in positions]
    assert set(worker.numbers(lease="a")) < before
    worker.fill(pool=pool, lease="a", tokens=16, value=500.0)


def test_bytes_outlive_the_daemon_and_workers_come_and_go_afterwards(here: Site) -> None:
    worker, pool = here.worker(), fresh_pool()
    pool_id = worker.pool(name=pool, blocks=BLOCKS)
    blocks = worker.fill(pool=pool, lease="a", tokens=40, value=100.0)
    daemon = here.kvd.daemon_pid(here.device)
    os.kill(daemon, signal.SIGKILL)
    eventually(lambda: not is_alive(daemon), "the daemon's end")
    assert worker.numbers(lease="a") == [100.0 + t for t in range(40)]
    worker.fill(pool=pool, lease="a", tokens=40, value=100.0)
    newcomer = here.worker()
    assert newcomer.pool(name=pool) == pool_id
    assert newcomer.peek(pool=pool, block_ids=blocks)[:40] == [100.0 + t for t in range(40)]
    assert Daemon(here.kvd, here.device).status().recovery.state == "recovered"
