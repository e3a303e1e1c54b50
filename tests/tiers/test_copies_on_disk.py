"""Copies of cached blocks for which host memory is too small lie on disk, and are found there."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd_client.cli import main
from kvd_daemon.core.tiers import slot_bytes

from .contents import Contents, assert_same, flip_byte, prefill, spec
from .disks import disk_file, disk_worker, kill, slot_files, started, stopped
from .prompts import BLOCK, BLOCKS, PROMPT, assert_begins, evict, prompt, sealed

HOST_TIER, DISK_TIER = "128KiB", "512KiB"  # ten slots and forty-two: half a prompt, and two
WHOLE = len(PROMPT) - 1


@pytest.fixture(scope="module")
def spilling_kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKvd]:
    """One for all tests of this module."""
    yield from started(tmp_path_factory.mktemp("kvd"), HOST_TIER, DISK_TIER)


@pytest.fixture
def daemon(spilling_kvd: RunningKvd) -> Daemon:
    return Daemon(spilling_kvd)


@pytest.fixture
def pool(client: kvd_client.Client, daemon: Daemon, spilling_kvd: RunningKvd) -> Iterator[kvd_client.Pool]:
    """Small; its copies go with it, and the files they lie in."""
    with client.pool("pool", spec(), BLOCKS) as pool:
        yield pool
    eventually(lambda: not daemon.pool_status("pool").leases, "all leases are released")
    daemon.drop_pool("pool")
    status = daemon.status()
    assert (status.host_tier_used_bytes, status.disk_tier_used_bytes) == (0, 0)
    eventually(lambda: slot_files(spilling_kvd) == [], "files of slots are closed")


def used_bytes(daemon: Daemon) -> int:
    """Of both tiers; what moves takes slots in both."""
    status = daemon.status()
    return status.host_tier_used_bytes + status.disk_tier_used_bytes


def assert_found(pool: kvd_client.Pool, before: Contents, seed: int = 0) -> None:
    """All of the prompt, as it was."""
    with pool.lease(prompt=prompt(seed)) as lease:
        assert lease.prefix_tokens == WHOLE
        assert_same(lease, before)


def found_tokens(pool: kvd_client.Pool, before: Contents) -> int:
    with pool.lease(prompt=PROMPT, wait=PATIENCE_S) as lease:
        assert_begins(lease, before)
        return lease.prefix_tokens


def assert_found_at_last(pool: kvd_client.Pool, before: Contents) -> None:
    """A worker that starts may take longer than a match waits for it."""
    eventually(lambda: found_tokens(pool, before) == WHOLE, "all of the prompt")


def test_an_evicted_prompt_that_host_memory_is_too_small_for_is_found_with_its_bytes(
    pool: kvd_client.Pool, daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sealed(pool)
    evict(pool, daemon)
    eventually(lambda: daemon.pool_status("pool").blocks_copied_on_disk == 11, "a tenth of host memory free")
    status, size = daemon.pool_status("pool"), slot_bytes(pool.spec)
    assert (status.parked_bytes, status.spilled_bytes) == (9 * size, 11 * size)
    main(["--run-dir", str(daemon.run_dir), "status"])
    assert "20 cached blocks copied (11 on disk)" in " ".join(capsys.readouterr().out.split())
    for _ in range(3):
        assert_found(pool, before)
        with pool.lease(tokens=(BLOCKS - 1) * BLOCK):
            pass


def test_the_oldest_copies_on_disk_make_room_for_newer_ones(pool: kvd_client.Pool, daemon: Daemon) -> None:
    contents = []
    for seed in range(5):
        contents.append(sealed(pool, seed))
        evict(pool, daemon, copies=min(20 * (seed + 1), 50))
        status = daemon.status()
        assert status.host_tier_used_bytes <= status.host_tier_bytes
        assert status.disk_tier_used_bytes <= status.disk_tier_bytes
    assert status.disk_tier_used_bytes > 0.9 * status.disk_tier_bytes
    for seed in range(5):
        with pool.lease(prompt=prompt(seed)) as lease:
            assert_begins(lease, contents[seed])


def test_the_next_daemon_finds_what_is_on_disk(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    before = sealed(pool)
    evict(pool, daemon)
    os.kill(spilling_kvd.daemon_pid(), signal.SIGKILL)
    assert_found_at_last(pool, before)


def test_a_daemon_that_dies_while_copies_come_back_loses_no_slot(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    before = sealed(pool)
    evict(pool, daemon)
    with ThreadPoolExecutor(1) as threads:
        disk_worker(spilling_kvd).suspend()
        finds = threads.submit(found_tokens, pool, before)
        eventually(lambda: used_bytes(daemon) > 20 * slot_bytes(pool.spec), "a move")
        os.kill(spilling_kvd.daemon_pid(), signal.SIGKILL)
        finds.result(PATIENCE_S)
    eventually(lambda: used_bytes(daemon) == 20 * slot_bytes(pool.spec), "each copy in one place")


def test_a_damaged_copy_on_disk_is_a_miss_and_never_data(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    before = sealed(pool)
    evict(pool, daemon)
    file, size = disk_file(spilling_kvd), slot_bytes(pool.spec)
    for slot in range(3):
        flip_byte(file, slot * size + 50)
    with pool.lease(prompt=PROMPT) as lease:
        assert lease.prefix_tokens < WHOLE
        assert_begins(lease, before)
    assert daemon.pool_status("pool").blocks_copied < 20


def test_a_disk_worker_that_dies_over_a_prefix_loses_nothing(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    before = sealed(pool)
    evict(pool, daemon)
    worker = disk_worker(spilling_kvd)
    worker.suspend()
    with ThreadPoolExecutor(1) as threads:
        finds = threads.submit(found_tokens, pool, before)
        kill(worker)
        finds.result(PATIENCE_S)
    assert_found_at_last(pool, before)


def test_a_disk_that_stands_still_holds_up_only_who_asks_for_what_is_there(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    before = sealed(pool)
    evict(pool, daemon)
    other = sealed(pool, seed=1)
    with ThreadPoolExecutor(1) as threads:
        with stopped(disk_worker(spilling_kvd)) as worker:
            waits = threads.submit(found_tokens, pool, before)
            assert_found(pool, other, seed=1)
            with pool.lease() as lease:
                prefill(lease, BLOCK)
            assert not waits.done() or not worker.is_running()
        waits.result(PATIENCE_S)
    assert_found_at_last(pool, before)


def test_what_a_disk_does_not_give_in_time_is_a_miss(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    before = sealed(pool)
    evict(pool, daemon)
    with kvd_client.connect(spilling_kvd.run_dir, timeout=0.8) as hurried:
        mine = hurried.pool("pool", spec(), BLOCKS)
        with stopped(disk_worker(spilling_kvd)), mine.lease(prompt=PROMPT) as lease:
            assert_begins(lease, before)
            assert lease.prefix_tokens < WHOLE
    assert_found_at_last(pool, before)


def test_a_disk_worker_that_dies_over_leaving_copies_loses_none(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    before = sealed(pool)
    worker = disk_worker(spilling_kvd)
    worker.suspend()
    with pool.lease(tokens=34 * BLOCK):
        eventually(lambda: daemon.status().disk_tier_used_bytes > 0, "copies begin to leave")
        kill(worker)
        eventually(lambda: daemon.pool_status("pool").blocks_copied == 20, "copies of all blocks")
    evict(pool, daemon)
    assert_found_at_last(pool, before)
    eventually(lambda: daemon.status().health_detail == "", "a disk that takes copies again")


def test_a_full_disk_is_told_and_nobody_gets_an_error(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    worker = disk_worker(spilling_kvd)
    worker.rlimit(psutil.RLIMIT_FSIZE, (5 * slot_bytes(pool.spec), -1))
    before = sealed(pool)
    evict(pool, daemon, copies=10)
    eventually(lambda: "nothing goes to disk" in daemon.status().health_detail, "the trouble is told")
    assert daemon.status().health == "serving"
    with pool.lease(prompt=PROMPT) as lease:
        assert_begins(lease, before)
    worker.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
    other = sealed(pool, seed=1)
    evict(pool, daemon, copies=30)
    eventually(lambda: daemon.status().health_detail == "", "a disk that takes copies again")
    assert_found(pool, other, seed=1)


def suspended(pool: kvd_client.Pool) -> list[tuple[kvd_client.Lease, Contents]]:
    """As many leases of four blocks as the tiers hold."""
    made: list[tuple[kvd_client.Lease, Contents]] = []
    while True:
        lease = pool.lease()
        before = prefill(lease, 4 * BLOCK, seed=len(made))
        try:
            lease.suspend(timeout=PATIENCE_S)
        except kvd_client.TierFullError:
            lease.release()
            return made
        made.append((lease, before))


def resume(leases: list[tuple[kvd_client.Lease, Contents]]) -> None:
    for lease, before in leases:
        lease.resume(timeout=PATIENCE_S)
        assert_same(lease, before)
        lease.release()


def test_copies_make_room_for_what_leases_park_in_both_tiers(pool: kvd_client.Pool, daemon: Daemon) -> None:
    without_copies = suspended(pool)
    resume(without_copies)
    before = sealed(pool)
    evict(pool, daemon)
    leases = suspended(pool)
    assert len(leases) == len(without_copies)
    resume(leases)
    with pool.lease(prompt=PROMPT) as lease:
        assert_begins(lease, before)


def test_copies_make_room_for_what_leases_park_where_the_file_system_has_none(
    pool: kvd_client.Pool, daemon: Daemon, spilling_kvd: RunningKvd
) -> None:
    sealed(pool)
    evict(pool, daemon)
    copies = daemon.pool_status("pool").blocks_copied_on_disk
    worker, size = disk_worker(spilling_kvd), slot_bytes(pool.spec)
    worker.rlimit(psutil.RLIMIT_FSIZE, (copies * size, -1))
    leases = suspended(pool)
    assert len(leases) > 2, "host memory has room for two"
    assert daemon.pool_status("pool").blocks_copied_on_disk < copies
    resume(leases)
    worker.rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
