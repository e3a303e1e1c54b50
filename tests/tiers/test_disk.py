"""What host memory is too small for lies on disk until somebody wants it back."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd_client import SnapKV

from .contents import Contents, assert_same, flip_byte, overwrite, prefill, spec
from .disks import disk_file, disk_worker, started, stopped

TOKENS = 160  # of a lease: 10 blocks, 120 KiB in slots
HOST_TIER, DISK_TIER = "512KiB", "2MiB"  # four such leases, and sixteen


@pytest.fixture(scope="module")
def spilling_kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKvd]:
    """One for all tests of this module."""
    yield from started(tmp_path_factory.mktemp("kvd"), HOST_TIER, DISK_TIER)


@pytest.fixture
def daemon(spilling_kvd: RunningKvd) -> Daemon:
    return Daemon(spilling_kvd)


@pytest.fixture
def pool(client: kvd_client.Client, daemon: Daemon) -> Iterator[kvd_client.Pool]:
    """Small, and empty again afterwards."""
    with client.pool("pool", spec(), 100) as pool:
        yield pool
    eventually(lambda: daemon.status().disk_tier_used_bytes == 0, "slots come back")


def suspended(pool: kvd_client.Pool, count: int) -> list[tuple[kvd_client.Lease, Contents]]:
    """Leases with what they held, the first one parked first."""
    made = []
    for seed in range(count):
        lease = pool.lease()
        before = prefill(lease, TOKENS, seed)
        lease.suspend(timeout=PATIENCE_S)
        made.append((lease, before))
    return made


def suspend_until_refused(pool: kvd_client.Pool, made: list[tuple[kvd_client.Lease, Contents]]) -> None:
    """As `suspended`, until that raises; the last one is not suspended then."""
    while len(made) < 40:
        lease = pool.lease()
        made.append((lease, prefill(lease, TOKENS, seed=len(made))))
        lease.suspend(timeout=PATIENCE_S)


def test_more_than_host_memory_holds_goes_to_disk_and_comes_back(
    pool: kvd_client.Pool, daemon: Daemon
) -> None:
    leases = suspended(pool, 10)
    status = daemon.pool_status("pool")
    assert status.spilled_bytes >= 6 * status.parked_bytes // 4
    overwrite(pool, 90)
    for lease, before in [*leases[::3], *leases[1::3], *leases[2::3]]:
        lease.resume(timeout=PATIENCE_S)
        assert_same(lease, before)
        lease.release()


def test_a_checkpoint_goes_to_disk_too(pool: kvd_client.Pool, daemon: Daemon) -> None:
    queries = np.random.default_rng(5).standard_normal((2, 8, 4, 16), np.float32)
    with pool.lease() as lease:
        before = prefill(lease, TOKENS)
        lease.compress(SnapKV(window=8, keep=0.3), queries, park=True)
        others = suspended(pool, 4)
        assert daemon.pool_status("pool").spilled_bytes > 0
        assert lease.restore(timeout=PATIENCE_S) == 0
        assert_same(lease, before)
    for other, held in others:
        other.resume(timeout=PATIENCE_S)
        assert_same(other, held)
        other.release()


def test_a_full_disk_is_an_error_and_nobody_loses_anything(pool: kvd_client.Pool) -> None:
    leases = suspended(pool, 16)
    while len(leases) < 40:
        lease = pool.lease()
        leases.append((lease, prefill(lease, TOKENS, seed=len(leases))))
        try:
            lease.suspend(timeout=PATIENCE_S)
        except kvd_client.TierFullError:
            break
    assert len(leases) < 40
    assert_same(*leases.pop())
    lease.release()
    for parked, held in leases:
        parked.resume(timeout=PATIENCE_S)
        assert_same(parked, held)
        parked.release()


def test_who_comes_and_goes_at_once_finds_room(pool: kvd_client.Pool) -> None:
    leases = suspended(pool, 10)

    def come_and_go(lease: kvd_client.Lease, before: Contents) -> None:
        for _ in range(5):
            lease.resume(wait=PATIENCE_S, timeout=PATIENCE_S)
            assert_same(lease, before)
            lease.suspend(timeout=PATIENCE_S)

    with ThreadPoolExecutor(len(leases)) as threads:
        for done in [threads.submit(come_and_go, *each) for each in leases]:
            done.result()
    for lease, _ in leases:
        lease.release()


def test_what_is_on_a_disk_that_is_full_comes_back(
    pool: kvd_client.Pool, spilling_kvd: RunningKvd, daemon: Daemon
) -> None:
    worker = disk_worker(spilling_kvd)
    worker.rlimit(psutil.RLIMIT_FSIZE, (516 * 1024, -1))  # bytes; four leases
    leases: list[tuple[kvd_client.Lease, Contents]] = []
    with pytest.raises(kvd_client.TierFullError, match="--spill-dir"):
        suspend_until_refused(pool, leases)
    assert daemon.status().health == "serving"
    assert daemon.status().health_detail.startswith("degraded: nothing goes to disk (--spill-dir)")
    assert daemon.pool_status("pool").spilled_bytes > 0
    assert_same(*leases[-1])
    leases.pop()[0].release()
    for lease, held in leases:
        lease.resume(timeout=PATIENCE_S)
        assert_same(lease, held)
        lease.release()
    worker.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    for lease, _ in suspended(pool, 6):
        lease.release()
    eventually(lambda: daemon.status().health_detail == "", "a disk that takes parcels again")


def test_damaged_bytes_on_disk_lose_their_lease_and_no_other(
    pool: kvd_client.Pool, spilling_kvd: RunningKvd, daemon: Daemon
) -> None:
    leases = suspended(pool, 6)
    assert daemon.pool_status("pool").spilled_bytes > 0
    flip_byte(disk_file(spilling_kvd), 300)
    lost = 0
    for lease, before in leases:
        try:
            lease.resume(timeout=PATIENCE_S)
        except kvd_client.LeaseLostError:
            lost += 1
        else:
            assert_same(lease, before)
        lease.release()
    assert lost == 1


def test_the_next_daemon_has_what_is_on_disk(pool: kvd_client.Pool, spilling_kvd: RunningKvd) -> None:
    leases = suspended(pool, 6)
    os.kill(spilling_kvd.daemon_pid(), signal.SIGKILL)
    for lease, before in leases:
        lease.resume(timeout=PATIENCE_S)
        assert_same(lease, before)
        lease.release()


def test_a_disk_that_stands_still_holds_up_only_who_waits_for_it(
    pool: kvd_client.Pool, spilling_kvd: RunningKvd
) -> None:
    leases = suspended(pool, 6)
    with ThreadPoolExecutor(1) as threads:
        with stopped(disk_worker(spilling_kvd)):
            waits = threads.submit(leases[0][0].resume, timeout=PATIENCE_S)
            with pool.lease() as other:
                before = prefill(other, TOKENS, seed=55)
                assert_same(other, before)
            newest, held = leases.pop()
            newest.resume(timeout=PATIENCE_S)
            assert_same(newest, held)
            assert not waits.done()
            newest.release()
        waits.result(PATIENCE_S)
    for lease, before in leases[:1]:
        assert_same(lease, before)
    for lease, _ in leases:
        lease.release()


def under_way(pool: kvd_client.Pool, daemon: Daemon) -> list[tuple[kvd_client.Lease, Contents]]:
    """As `suspended`, four of them; the first one is on its way to a disk that stands still."""
    leases = suspended(pool, 4)
    eventually(lambda: daemon.status().disk_tier_used_bytes > 0, "the oldest begins to leave")
    return leases


def test_what_is_on_its_way_to_disk_is_resumed_at_once(
    pool: kvd_client.Pool, spilling_kvd: RunningKvd, daemon: Daemon
) -> None:
    for lease, _ in suspended(pool, 5):  # until the disk worker serves
        lease.release()
    for _ in range(4):
        with stopped(disk_worker(spilling_kvd)):
            leases = under_way(pool, daemon)
            leases[0][0].resume(timeout=PATIENCE_S)
            assert_same(*leases[0])
            leases[0][0].suspend(timeout=PATIENCE_S)  # into the slots that the disk worker still reads
        for lease, before in leases:
            lease.resume(timeout=PATIENCE_S)
            assert_same(lease, before)
            lease.release()


def test_what_is_on_its_way_to_disk_stays_for_who_waits_for_blocks(
    pool: kvd_client.Pool, spilling_kvd: RunningKvd, daemon: Daemon
) -> None:
    for lease, _ in suspended(pool, 5):
        lease.release()
    newest, other = pool.lease(), pool.lease(tokens=80 * pool.spec.block_size)
    with ThreadPoolExecutor(1) as threads:
        with stopped(disk_worker(spilling_kvd)):
            leases = under_way(pool, daemon)
            prefill(newest, TOKENS, seed=4)
            waits = threads.submit(leases[0][0].resume, wait=PATIENCE_S, timeout=PATIENCE_S)
            eventually(lambda: daemon.pool_status("pool").waiting_calls == 1, "it waits for blocks")
        newest.suspend(timeout=PATIENCE_S)  # the disk worker has done what it was asked for, and more
        waits.result(PATIENCE_S)
    assert_same(*leases[0])
    for lease in [newest, other, *(lease for lease, _ in leases)]:
        lease.release()


def test_a_disk_worker_that_dies_is_replaced_and_the_log_calls_it_so(
    pool: kvd_client.Pool, spilling_kvd: RunningKvd
) -> None:
    leases = suspended(pool, 6)
    worker = disk_worker(spilling_kvd)
    worker.suspend()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(leases[0][0].resume, timeout=PATIENCE_S)
        worker.kill()
        waits.result(PATIENCE_S)
    assert f" disk worker {worker.pid} died" in spilling_kvd.log.read_text()
    for lease, before in leases:
        if lease is not leases[0][0]:
            lease.resume(timeout=PATIENCE_S)
        assert_same(lease, before)
        lease.release()
