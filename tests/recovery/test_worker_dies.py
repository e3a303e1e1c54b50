"""A worker dies, stops, forks or is late: its blocks come back when nobody can write to them, not before."""

import signal
import threading
from pathlib import Path

import pytest
from tests.client.daemon import Daemon
from tests.daemon.raw_worker import RawWorker
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client
from kvd.v1 import kvd_pb2 as pb

from .filling import fill, values
from .workers import worker

HOLDER = """
client = kvd_client.connect(run_dir, timeout=60)
lease = client.pool("pool", SPEC, 64).lease()
fill(lease, 16 * 40, 7.0)
say("ready")
hear()
"""


def test_a_worker_killed_before_its_first_renewal_leaves_nothing(daemon: Daemon, kvd: RunningKvd) -> None:
    """It was given a session and died: the session is gone with it, not after a TTL."""
    body = """
    sys.path.insert(0, hear())
    from pathlib import Path
    import raw_worker
    victim = raw_worker.RawWorker(Path(run_dir), "victim")
    victim.create_pool()
    victim.lease(160)
    say("leased")
    hear()
    """
    with RawWorker(kvd.run_dir) as watcher, worker(kvd.run_dir, body) as victim:
        victim.tell(str(Path(__file__).parents[1] / "daemon"))
        assert victim.hear() == "leased"
        assert "victim" in daemon.session_names()
        victim.kill()
        eventually(lambda: "victim" not in daemon.session_names(), "the session's end")
        assert watcher.pool_status().blocks_free == 64


def test_whoever_waits_for_a_killed_workers_blocks_gets_them(daemon: Daemon, kvd, spec) -> None:
    with (
        kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client,
        worker(kvd.run_dir, HOLDER) as holder,
    ):
        assert holder.hear() == "ready"
        pool = client.pool("pool", spec, 64)
        granted: list[kvd_client.Lease] = []
        waiting = threading.Thread(target=lambda: granted.append(pool.lease(tokens=16 * 50, wait=PATIENCE_S)))
        waiting.start()
        eventually(lambda: daemon.pool_status("pool").waiting_calls == 1, "the call in line")
        assert granted == []
        holder.kill()
        waiting.join(PATIENCE_S)
        assert granted[0].block_table.size >= 50
        assert daemon.pool_status("pool").blocks_quarantined == 0


def test_a_producer_that_dies_between_reserve_and_commit_leaves_no_token_behind(daemon, kvd, spec) -> None:
    body = """
    client = kvd_client.connect(run_dir, timeout=60)
    pool = client.pool("pool", SPEC, 64)
    lease = pool.lease()
    fill(lease, 32, 7.0)
    lease.seal([bytes([1]) * 32])
    slots = lease.extend(64)
    pool.write(0, slots[:40], np.ones((40, 1, 8), np.float32), np.ones((40, 1, 8), np.float32))
    say("half written")
    hear()
    """
    with (
        kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client,
        worker(kvd.run_dir, body) as producer,
    ):
        assert producer.hear() == "half written"
        pool = client.pool("pool", spec, 64)
        producer.kill()
        eventually(lambda: daemon.pool_status("pool").blocks_leased == 0, "the producer's blocks")
        assert daemon.pool_status("pool").blocks_cached == 1  # what it had sealed was whole
        with pool.lease(prefix=[bytes([1]) * 32]) as found:
            assert (found.length, values(found)) == (16, {7.0})
        with pytest.raises(kvd_client.PrefixNotFoundError):
            pool.lease(prefix=[bytes([1]) * 32, bytes([2]) * 32])


def test_attached_and_idle_beyond_the_ttl_a_worker_keeps_what_it_has(start_kvd) -> None:
    body = """
    client = kvd_client.connect(run_dir, timeout=60)
    lease = client.pool("pool", SPEC, 64).lease()
    fill(lease, 32, 7.0)
    say("idle")
    hear()
    say(outcome(lease.check), outcome(lambda: lease.extend(100)), len(client.events.drain()))
    hear()
    """
    kvd = start_kvd("--session-ttl", "1s")
    daemon = Daemon(kvd)
    with worker(kvd.run_dir, body) as idle:
        assert idle.hear() == "idle"
        for _ in range(9):  # renewals, three per TTL: each makes the session younger again
            age = _idle_ns(daemon)
            eventually(lambda before=age: _idle_ns(daemon) < before or before == 0, "a renewal")
        assert idle.ask() == "fine fine 0"


def _idle_ns(daemon: Daemon) -> int:
    with daemon.admin() as admin:
        [session] = admin.ListSessions(pb.ListSessionsRequest(), timeout=PATIENCE_S).sessions
    return session.idle.ToNanoseconds()


def test_a_stopped_worker_is_not_reaped_and_cannot_use_its_leases_afterwards(start_kvd, spec) -> None:
    body = """
    client = kvd_client.connect(run_dir, timeout=60)
    pool = client.pool("pool", SPEC, 64)
    lease = pool.lease()
    fill(lease, 64, 7.0)
    say("ready")
    for line in sys.stdin:  # the answer does not wait for any event
        say(outcome(lambda: lease.gather(0, "numpy")))
    """
    kvd = start_kvd("--session-ttl", "500ms")
    daemon = Daemon(kvd)
    with (
        kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client,
        worker(kvd.run_dir, body) as stopped,
    ):
        assert stopped.hear() == "ready"
        pool = client.pool("pool", spec, 64)
        stopped.tell()
        assert stopped.hear() == "fine"
        stopped.signal(signal.SIGSTOP)
        eventually(lambda: daemon.pool_status("pool").blocks_quarantined > 0, "the leases to expire")
        held = daemon.pool_status("pool").blocks_quarantined
        with pool.lease(tokens=16 * (62 - held)) as others:  # all but the scratch reserve
            fill(others, 16 * (62 - held), 9.0)
            with pytest.raises(kvd_client.PoolExhaustedError):
                pool.lease(tokens=64)
            stopped.tell()
            stopped.signal(signal.SIGCONT)
            assert stopped.hear() == "LeaseExpiredError"
            assert values(others) == {9.0}


def test_a_stopped_workers_blocks_come_back_with_its_end(start_kvd) -> None:
    kvd = start_kvd("--session-ttl", "500ms")
    daemon = Daemon(kvd)
    with worker(kvd.run_dir, HOLDER) as stopped:
        assert stopped.hear() == "ready"
        stopped.signal(signal.SIGSTOP)
        eventually(lambda: daemon.pool_status("pool").blocks_quarantined > 0, "the leases to expire")
        stopped.kill()
        eventually(lambda: daemon.pool_status("pool").blocks_free == 64, "its blocks")


def test_a_forked_child_does_not_hold_its_dead_parents_blocks(daemon: Daemon, kvd: RunningKvd) -> None:
    """The child has the parent's sockets, so the stream stays open; but not its memory."""
    body = """
    import multiprocessing
    until_closed = os.dup(0)
    def linger():
        say("child")
        os.read(until_closed, 1)
    client = kvd_client.connect(run_dir, timeout=60)
    lease = client.pool("pool", SPEC, 64).lease()
    fill(lease, 64, 7.0)
    multiprocessing.get_context("fork").Process(target=linger).start()
    hear()
    """
    with worker(kvd.run_dir, body) as parent:
        assert parent.hear() == "child"
        parent.process.kill()
        parent.process.wait()
        eventually(lambda: daemon.pool_status("pool").blocks_free == 64, "the parent's blocks")
        assert daemon.status().sessions == 0


def test_the_second_holders_release_leaves_the_first_its_reference(daemon: Daemon, kvd, spec) -> None:
    body = """
    say("there")
    hear()
    client = kvd_client.connect(run_dir, timeout=60)
    lease = client.pool("pool", SPEC, 64).lease(prefix=[bytes([1]) * 32])
    say(lease.length)
    hear()
    lease.release()
    lease.release()
    say("released")
    hear()
    """
    with (
        kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client,
        worker(kvd.run_dir, body) as second,
    ):
        assert second.hear() == "there"
        first = client.pool("pool", spec, 64).lease()
        fill(first, 16, 3.0)
        first.seal([bytes([1]) * 32])
        assert second.ask() == "16"
        assert second.ask() == "released"
        assert daemon.pool_status("pool").blocks_sealed == 1
        assert values(first) == {3.0}
        second.kill()
        assert daemon.pool_status("pool").blocks_sealed == 1
        first.release()
        status = daemon.pool_status("pool")
        assert (status.blocks_sealed, status.blocks_cached) == (0, 1)
