"""A pool is dropped while its blocks are copied: that ends the copy, and nothing else."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client

from .contents import assert_same, prefill, spec
from .prompts import BLOCKS, PROMPT, evict, sealed


@pytest.fixture
def lease(client: kvd_client.Client) -> Iterator[kvd_client.Lease]:
    """Of a pool that stays."""
    with client.pool("stays", spec(), 40) as stays, stays.lease() as lease:
        yield lease


@contextlib.contextmanager
def dropped_over_a_copy(
    client: kvd_client.Client, daemon: Daemon, threads: ThreadPoolExecutor
) -> "Iterator[Future[kvd_client.Lease]]":
    """The kernel worker stands still meanwhile. Answers the call that wanted the copy back."""
    pool = client.pool("passing", spec(), BLOCKS)
    wanting = threads.submit(lambda: pool.lease(prompt=PROMPT))
    eventually(lambda: daemon.pool_status("passing").blocks_leased, "a copy on its way back")
    daemon.drop_pool("passing")
    yield wanting
    assert isinstance(wanting.exception(PATIENCE_S), kvd_client.KvdError)
    pool.close()


def evicted(client: kvd_client.Client, daemon: Daemon) -> None:
    """Pool "passing" has copies to bring back."""
    pool = client.pool("passing", spec(), BLOCKS)
    sealed(pool)
    evict(pool, daemon)


def test_while_the_kernel_worker_copies_and_then_dies(
    client: kvd_client.Client, daemon: Daemon, lease: kvd_client.Lease, tiered_kvd: RunningKvd
) -> None:
    before, daemon_pid = prefill(lease, 100), tiered_kvd.daemon_pid()
    evicted(client, daemon)
    restarts = daemon.status().kernel_restarts
    lease.suspend(timeout=PATIENCE_S)  # so that it is not being asked whether it is there
    psutil.Process(tiered_kvd.kernel_pid()).suspend()
    with ThreadPoolExecutor(1) as threads, dropped_over_a_copy(client, daemon, threads):
        eventually(lambda: daemon.status().kernel_restarts > restarts, "another kernel worker")
    lease.resume(timeout=PATIENCE_S)
    assert_same(lease, before)
    assert daemon.status().kernel_restarts == restarts + 1
    assert tiered_kvd.daemon_pid() == daemon_pid


def test_while_the_copy_waits_for_its_turn(
    client: kvd_client.Client, daemon: Daemon, lease: kvd_client.Lease, tiered_kvd: RunningKvd
) -> None:
    before, daemon_pid = prefill(lease, 100), tiered_kvd.daemon_pid()
    evicted(client, daemon)
    restarts, worker = daemon.status().kernel_restarts, psutil.Process(tiered_kvd.kernel_pid())
    worker.suspend()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: lease.suspend(timeout=PATIENCE_S))
        eventually(lambda: daemon.lease_info(lease.lease_id).state == "compressing", "a copy before it")
        with dropped_over_a_copy(client, daemon, threads):
            with contextlib.suppress(psutil.NoSuchProcess):  # stopped for too long
                worker.resume()
            first.result(PATIENCE_S)
    lease.resume(timeout=PATIENCE_S)
    assert_same(lease, before)
    assert daemon.status().kernel_restarts <= restarts + 1
    assert tiered_kvd.daemon_pid() == daemon_pid
