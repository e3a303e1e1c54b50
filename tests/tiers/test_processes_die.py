"""Whatever dies while a lease is suspended, or on its way there or back: its bytes are what they were."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client

from .contents import Contents, arena_of, assert_same, overwrite, prefill, spec

Strike = Callable[[RunningKvd], None]


def kill_kernel_worker(kvd: RunningKvd) -> None:
    os.kill(kvd.kernel_pid(), signal.SIGKILL)


def kill_daemon(kvd: RunningKvd) -> None:
    os.kill(kvd.daemon_pid(), signal.SIGKILL)


STRIKES = [kill_kernel_worker, kill_daemon]


@pytest.fixture
def suspended_pool(client: kvd_client.Client) -> Iterator[kvd_client.Pool]:
    with client.pool("pool", spec(), 40) as pool:
        yield pool


@contextmanager
def in_the_midst(
    kvd: RunningKvd, lease: kvd_client.Lease, call: Callable[[], None]
) -> Iterator[Future[None]]:
    """`call` is under way; its kernel worker has stopped over the copy."""
    worker = psutil.Process(kvd.kernel_pid())
    daemon = Daemon(kvd)
    eventually(lambda: daemon.status().health == "serving", "a kernel worker")
    worker.suspend()
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(call)
        eventually(lambda: daemon.lease_info(lease.lease_id).state == "compressing", "the copy begins")
        yield under_way
        under_way.result(PATIENCE_S)


def _resumed(lease: kvd_client.Lease, before: Contents) -> None:
    overwrite(lease.pool, 30)
    lease.resume(timeout=PATIENCE_S)
    assert_same(lease, before)


@pytest.mark.parametrize("strike", STRIKES)
def test_in_the_midst_of_suspending(
    tiered_kvd: RunningKvd, suspended_pool: kvd_client.Pool, strike: Strike
) -> None:
    with suspended_pool.lease() as lease:
        before = prefill(lease, 100)
        with in_the_midst(tiered_kvd, lease, lambda: lease.suspend(timeout=PATIENCE_S)):
            strike(tiered_kvd)
        assert lease.capacity == 0
        _resumed(lease, before)


@pytest.mark.parametrize("strike", STRIKES)
def test_in_the_midst_of_resuming(
    tiered_kvd: RunningKvd, suspended_pool: kvd_client.Pool, strike: Strike
) -> None:
    with suspended_pool.lease() as lease:
        before = prefill(lease, 100)
        lease.suspend(timeout=PATIENCE_S)
        overwrite(suspended_pool, 30)
        with in_the_midst(tiered_kvd, lease, lambda: lease.resume(timeout=PATIENCE_S)):
            strike(tiered_kvd)
        assert_same(lease, before)


@pytest.mark.parametrize("strike", STRIKES)
def test_while_it_is_suspended(
    tiered_kvd: RunningKvd, suspended_pool: kvd_client.Pool, strike: Strike
) -> None:
    with suspended_pool.lease() as lease:
        before = prefill(lease, 100)
        lease.suspend(timeout=PATIENCE_S)
        strike(tiered_kvd)
        _resumed(lease, before)


def test_memory_of_freed_slots_comes_back_though_the_worker_dies_over_it(
    tiered_kvd: RunningKvd, suspended_pool: kvd_client.Pool
) -> None:
    lease = suspended_pool.lease()
    prefill(lease, 600)
    lease.suspend(timeout=PATIENCE_S)
    arena = arena_of(tiered_kvd, suspended_pool)
    assert arena.stat().st_blocks > 0
    worker = psutil.Process(tiered_kvd.kernel_pid())
    worker.suspend()
    lease.release()
    worker.kill()
    eventually(lambda: arena.stat().st_blocks == 0, "punched slots")
