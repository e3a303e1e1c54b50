"""The daemon is killed: sessions, leases and bytes go on with the next one, and nobody is told twice."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.client.daemon import Daemon
from tests.daemon.raw_worker import RawWorker, block_ids
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually, is_alive, running_kvd, start_kvd

import kvd_client
from kvd.v1 import kvd_pb2 as pb

from .filling import fill, values

KILLS = 4  # the supervisor waits longer before each


def kill_daemon(kvd: RunningKvd) -> None:
    """And wait until another one answers."""
    pid = kvd.daemon_pid()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(pid), "the daemon's end")
    eventually(lambda: _answers(kvd), "another daemon")


def _answers(kvd: RunningKvd) -> bool:
    try:
        return bool(Daemon(kvd).status().epoch)
    except grpc.RpcError:
        return False


def test_leases_bytes_and_session_outlive_the_daemon_and_the_epoch_tells(daemon: Daemon, kvd, spec) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", spec, 64)
        lease, ring = pool.lease(), pool.lease(policy=kvd_client.Streaming(sinks=4, window=28))
        fill(lease, 40, 1.0)
        fill(ring, 40, 2.0)
        epoch, session_id, view = client.epoch, client.session_id, pool.layer(0, "numpy")[0]
        kill_daemon(kvd)
        lease.check()
        fill(lease, 40, 1.0)
        fill(ring, 40, 2.0)
        assert (values(lease), values(ring)) == ({1.0}, {2.0})
        assert (lease.length, daemon.lease_info(lease.lease_id).blocks) == (80, lease.block_table.size)
        assert view[lease.block_table[0]].min() == 1.0
        assert (client.epoch != epoch, client.session_id) == (True, session_id)
        assert client.events.drain() == []
        recovery = daemon.status().recovery
        assert (recovery.state, recovery.sessions, recovery.leases) == ("recovered", 1, 2)
        assert (recovery.lost_leases, recovery.lost_pools) == (0, 0)


def test_kills_in_a_row_lose_nothing(daemon: Daemon, kvd, spec) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", spec, 64)
        leases = []
        for number in range(KILLS):
            leases.append(pool.lease())
            fill(leases[-1], 16, float(number))
            kill_daemon(kvd)
        assert [values(lease) for lease in leases] == [{float(number)} for number in range(KILLS)]
        assert daemon.pool_status("pool").blocks_leased == sum(lease.block_table.size for lease in leases)


def test_a_restart_between_two_renewals_is_seen_in_the_next_reply(daemon: Daemon, kvd) -> None:
    """The worker's stream has not said a word since; only its calls notice."""
    worker = RawWorker(kvd.run_dir)
    worker.create_pool()
    request = worker.lease_request(100)
    before = worker.leases.Lease(request, timeout=PATIENCE_S)
    kill_daemon(kvd)
    worker.stream.lose()
    again = RawWorker(kvd.run_dir, resume_token=worker.token)
    assert again.opened.resumed
    repeated = again.leases.Lease(request, timeout=PATIENCE_S)
    assert repeated.epoch != before.epoch
    assert [block_ids(lease) for lease in repeated.leases] == [block_ids(lease) for lease in before.leases]
    assert again.pool_status().leases == 1
    another = again.lease(16)
    assert not set(block_ids(another[0])) & set(block_ids(before.leases[0]))
    worker.channel.close()
    again.close()


def test_a_call_under_way_when_the_daemon_dies_is_carried_out_once(daemon: Daemon, kvd, spec) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", spec, 64)
        os.kill(kvd.daemon_pid(), signal.SIGSTOP)
        leases: list[kvd_client.Lease] = []
        calls = [
            threading.Thread(target=lambda: leases.append(pool.lease(tokens=64, lease_ahead=0)))
            for _ in range(4)
        ]
        for call in calls:
            call.start()
        kill_daemon(kvd)
        for call in calls:
            call.join(PATIENCE_S)
        assert daemon.pool_status("pool").leases == 4
        assert sum(lease.block_table.size for lease in leases) == 16


def compress_with_a_stopped_kernel_worker(kvd: RunningKvd, lease: kvd_client.Lease) -> threading.Thread:
    """A compression under way that will not end; its lease is busy."""
    eventually(lambda: Daemon(kvd).status().health == "serving", "the kernel worker")
    os.kill(kvd.kernel_pid(), signal.SIGSTOP)

    def compress() -> None:
        with contextlib.suppress(kvd_client.LeaseLostError):
            lease.compress(kvd_client.Streaming(sinks=4, window=28), timeout=PATIENCE_S)

    call = threading.Thread(target=compress)
    call.start()
    eventually(lambda: Daemon(kvd).lease_info(lease.lease_id).state == "compressing", "the job")
    return call


def test_a_compression_under_way_is_done_again_by_the_next_daemon(daemon: Daemon, kvd, spec) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("pool", spec, 64).lease()
        fill(lease, 160, 5.0)
        call = compress_with_a_stopped_kernel_worker(kvd, lease)
        kill_daemon(kvd)
        call.join(PATIENCE_S)
        assert (lease.length, values(lease)) == (32, {5.0})
        assert daemon.pool_status("pool").blocks_leased == lease.block_table.size


def test_a_lease_whose_bytes_were_being_moved_in_place_is_lost_and_says_so(daemon: Daemon, kvd, spec) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", spec, 12)
        lease, other = pool.lease(lease_ahead=0), pool.lease(lease_ahead=0)
        fill(lease, 160, 5.0)
        fill(other, 32, 6.0)
        call = compress_with_a_stopped_kernel_worker(kvd, lease)
        with pytest.raises(kvd_client.LeaseBusyError):
            lease.gather(0)
        kill_daemon(kvd)
        call.join(PATIENCE_S)
        for use in (lease.check, lambda: lease.extend(1), lambda: lease.gather(0)):
            with pytest.raises(kvd_client.LeaseLostError):
                use()
        assert values(other) == {6.0}
        assert daemon.status().recovery.lost_leases == 1
        lease.release()
        assert daemon.pool_status("pool").blocks_free == 10


def test_a_journal_that_cannot_be_trusted_is_set_aside_and_old_leases_are_fenced(daemon, kvd, spec) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", spec, 64)
        lease = pool.lease()
        fill(lease, 16, 1.0)
        pid = kvd.daemon_pid()
        os.kill(kvd.process.pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_alive(pid), "the daemon's end")
        [snapshot] = (kvd.run_dir / "host0/journal").glob("*.snapshot")
        spoil(snapshot)
        os.kill(kvd.process.pid, signal.SIGCONT)
        eventually(lambda: not is_fine(lease), "word of the loss")
        with pytest.raises(kvd_client.LeaseLostError):
            lease.gather(0)
        with pytest.raises(kvd_client.ClosedError):
            pool.layer(0)
        again = client.pool("pool", spec, 64).lease(tokens=16)
        assert again.lease_id == lease.lease_id  # of another time: nobody mistakes one for the other
        again.check()
        recovery = daemon.status().recovery
        assert recovery.state == "quarantined"
        [aside] = (kvd.run_dir / "host0").glob("journal.quarantined-*")
        assert str(aside) in recovery.detail
        remove(aside)


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_without_the_supervisor_memory_is_gone_and_the_next_kvd_says_what_was_lost(tmp_path, spec) -> None:
    first = start_kvd(tmp_path, "--host-memory", "64MiB")
    first.wait_until_ready()
    with kvd_client.connect(first.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("pool", spec, 64)
        lease = pool.lease()
        fill(lease, 16, 1.0)
        assert pool.pool_id in Path("/proc/self/maps").read_text()
        first.kill()
        with running_kvd(tmp_path) as second:
            eventually(lambda: not is_fine(lease), "word of the loss")
            with pytest.raises(kvd_client.LeaseLostError):
                lease.check()
            with pytest.raises(kvd_client.ClosedError, match="ended with the daemon"):
                pool.layer(0)
            assert pool.pool_id not in Path("/proc/self/maps").read_text()
            recovery = Daemon(second).status().recovery
            assert (recovery.state, recovery.lost_leases, recovery.lost_pools) == ("recovered", 1, 1)
            assert client.pool("pool", spec, 64).lease(tokens=16).extend(16).size == 16
            client.close()


def is_fine(lease: kvd_client.Lease) -> bool:
    try:
        lease.check()
    except kvd_client.KvdError:
        return False
    return True


def test_a_session_that_nobody_resumes_expires_after_its_grace(start_kvd: Callable[..., RunningKvd]) -> None:
    kvd = start_kvd("--session-ttl", "200ms")
    worker = RawWorker(kvd.run_dir)
    worker.create_pool()
    [lease] = worker.lease(100)
    worker.vanish()
    kill_daemon(kvd)
    watcher = RawWorker(kvd.run_dir)
    assert isinstance(lease, pb.LeaseState)
    eventually(lambda: watcher.pool_status().blocks_quarantined == 7, "the session to expire")
    again = RawWorker(kvd.run_dir)
    again.token = worker.token  # of the same process: its word still counts
    again.release(lease)
    assert watcher.pool_status().blocks_free == 64
