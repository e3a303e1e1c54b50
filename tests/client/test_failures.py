"""What a worker meets when daemon, operator or clock are against it: a typed error, in time."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.running_kvd import PATIENCE_S, eventually

import kvd_client

from .daemon import Daemon

SOON = 0.3  # seconds; the deadline of a client that must not wait


def test_a_daemon_that_does_not_answer_costs_no_more_than_the_deadline(
    daemon: Daemon, new_pool, spec
) -> None:
    name = new_pool(spec).name
    with kvd_client.connect(daemon.run_dir, timeout=SOON) as client:
        lease = client.pool(name).lease(tokens=16, lease_ahead=0)
        lease.extend(16)
        lease.commit(16)
        with daemon.frozen():
            for call in (
                lambda: lease.extend(1),
                lambda: client.pool(name),
                lambda: client.pool(name, spec, 64),
            ):
                with pytest.raises(kvd_client.DeadlineExceededError, match="time"):
                    call()
            lease.release()


def test_blocks_of_calls_that_broke_off_come_back_without_another_call(start_kvd, spec) -> None:
    daemon = Daemon(start_kvd("--session-ttl", "2s"))
    with kvd_client.connect(daemon.run_dir, timeout=1.0) as client:
        pool = client.pool("settled", spec, 64)
        lease = pool.lease(tokens=64)
        with daemon.frozen():
            with pytest.raises(kvd_client.DeadlineExceededError):
                pool.lease(tokens=160)
            lease.release()
        eventually(lambda: daemon.pool_status("settled").leases == 0, "leases that nobody holds")
        assert daemon.pool_status("settled").blocks_leased == 0


def test_connecting_to_a_daemon_that_does_not_answer_fails_in_time(daemon: Daemon) -> None:
    with (
        daemon.frozen(),
        pytest.raises((kvd_client.DeadlineExceededError, kvd_client.DeviceUnavailableError)),
    ):
        kvd_client.connect(daemon.run_dir, timeout=SOON)


def test_closing_does_not_wait_for_a_daemon_that_does_not_answer(daemon: Daemon) -> None:
    client = kvd_client.connect(daemon.run_dir, name="in a hurry")
    with daemon.frozen():
        client.close()
    with pytest.raises(kvd_client.ClosedError):
        client.pool("any")
    eventually(lambda: "in a hurry" not in daemon.session_names(), "the goodbye")


def test_a_lease_whose_call_broke_off_is_whole_again_with_the_next_one(
    daemon: Daemon, new_pool, spec
) -> None:
    name = new_pool(spec).name
    with kvd_client.connect(daemon.run_dir, timeout=SOON) as client:
        pool = client.pool(name)
        lease = pool.lease(tokens=16, lease_ahead=0)
        with daemon.frozen(), pytest.raises(kvd_client.DeadlineExceededError):
            lease.extend(40)
        slots = _patiently(lambda: lease.extend(64))
        assert slots.size == 64
        assert daemon.lease_info(lease.lease_id).blocks == lease.block_table.size == 4


def test_what_a_broken_off_lease_call_took_is_given_back(daemon: Daemon, new_pool, spec) -> None:
    name = new_pool(spec).name
    with kvd_client.connect(daemon.run_dir, timeout=SOON) as client:
        pool = client.pool(name)
        with daemon.frozen(), pytest.raises(kvd_client.DeadlineExceededError):
            pool.lease(tokens=512)
        lease = _patiently(lambda: pool.lease(tokens=512))
        _patiently(lambda: lease.extend(520))
        assert daemon.pool_status(name).leases == 1


def _patiently(call: Callable[[], object]) -> object:
    """Repeat what a loaded machine may not answer within SOON."""
    answers = []

    def attempt() -> bool:
        try:
            answers.append(call())
        except kvd_client.DeadlineExceededError:
            return False
        return True

    eventually(attempt, "an answer")
    return answers[0]


def test_a_revoked_lease_says_so_and_its_blocks_come_back(daemon: Daemon, client, new_pool, spec) -> None:
    pool = new_pool(spec)
    lease = pool.lease(tokens=160)
    daemon.revoke(lease.lease_id, "too greedy")
    event = client.events.get(timeout=PATIENCE_S)
    assert event == kvd_client.LeaseRevoked(lease.lease_id, "too greedy")
    assert daemon.pool_status(pool.name).blocks_quarantined == 10
    for use in (lambda: lease.extend(1), lambda: lease.commit(1), lease.kept_positions):
        with pytest.raises(kvd_client.LeaseRevokedError, match="too greedy"):
            use()
    with pool.lease(tokens=16):
        status = daemon.pool_status(pool.name)
        assert (status.blocks_quarantined, status.leases) == (0, 1)
    lease.release()


def test_a_revoked_lease_may_just_be_released(daemon: Daemon, client, new_pool, spec) -> None:
    pool = new_pool(spec)
    with pool.lease(tokens=160) as lease:
        daemon.revoke(lease.lease_id, "")
        assert client.events.get(timeout=PATIENCE_S) is not None
    assert daemon.pool_status(pool.name).blocks_free == 64


def test_who_waits_for_blocks_makes_the_others_hear_of_it(client, new_pool, spec) -> None:
    pool = new_pool(spec, 16)
    assert client.events.get(timeout=0) is None
    with pool.lease(tokens=16 * 16), pytest.raises(kvd_client.PoolExhaustedError):
        pool.lease(tokens=32)
    event = client.events.get(timeout=PATIENCE_S)
    assert isinstance(event, kvd_client.Pressure)
    assert event.pool == pool.name
    assert client.events.drain() == []


def test_a_killed_daemons_leases_and_pools_go_on_with_the_next(own_daemon, spec) -> None:
    with kvd_client.connect(own_daemon.run_dir, timeout=PATIENCE_S) as client:
        pool = client.pool("p", spec, 64)
        lease = pool.lease(tokens=16)
        epoch = client.epoch
        view, _ = pool.layer(0)
        view[lease.block_table.copy()] = 1.0
        own_daemon.kill()
        assert lease.extend(100).size == 100
        assert (view[lease.block_table[0]] == 1.0).all()
        assert client.epoch != epoch
        assert client.events.drain() == []


def test_a_call_during_the_restart_waits_for_it(own_daemon, spec) -> None:
    with kvd_client.connect(own_daemon.run_dir, timeout=PATIENCE_S) as client:
        client.pool("p", spec, 64)
        own_daemon.kill()
        assert client.pool("p", spec, 64).lease(tokens=16).extend(16).size == 16


def test_a_daemon_that_ended_is_unavailable_within_the_deadline(own_daemon: Daemon, spec) -> None:
    with kvd_client.connect(own_daemon.run_dir, timeout=SOON) as client:
        lease = client.pool("p", spec, 64).lease(tokens=16)
        with own_daemon.ended():
            for call in (lambda: lease.extend(100), lambda: client.pool("p", spec, 64), lambda: client.epoch):
                with pytest.raises(kvd_client.DeviceUnavailableError):
                    call()


def test_renewals_keep_leases_beyond_the_ttl_and_tell_how_full_they_are(start_kvd, spec) -> None:
    daemon = Daemon(start_kvd("--session-ttl", "2s"))
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("p", spec, 64).lease(tokens=64)
        for _ in range(5):  # three renewals per TTL
            lease.commit(1)
            eventually(lambda: daemon.lease_info(lease.lease_id).length == lease.length, "the renewal")
        assert lease.extend(100).size == 100


SLEEPER = """
import sys, kvd_client
with kvd_client.connect(sys.argv[1], timeout=60) as client:
    spec = kvd_client.KVSpec(layers=1, kv_heads=1, head_dim=8)
    lease = client.pool("p", spec, 64).lease(tokens=64)
    print("ready", flush=True)
    sys.stdin.readline()
    lost = client.events.get(timeout=60)
    try:
        lease.extend(1)
    except kvd_client.KvdError as error:
        print(type(error).__name__, type(lost).__name__, flush=True)
    try:
        client.offers.get(timeout=60)
    except kvd_client.ClosedError as error:
        offers = client.offers
        print("client.session_id" in str(error), offers.get(timeout=0), offers.drain(), flush=True)
    print(client.pool("p", spec, 64).lease(tokens=64).block_table.size, flush=True)
"""


def test_a_worker_that_slept_through_its_ttl_hears_that_its_lease_expired(start_kvd) -> None:
    daemon = Daemon(start_kvd("--session-ttl", "500ms"))
    command = [sys.executable, "-W", "error", "-c", SLEEPER, str(daemon.run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout.readline() == "ready\n"
        os.kill(worker.pid, signal.SIGSTOP)
        eventually(lambda: daemon.pool_status("p").blocks_quarantined == 4, "the lease to expire")
        os.kill(worker.pid, signal.SIGCONT)
        said, _ = worker.communicate("go on\n", timeout=PATIENCE_S)
    assert said == "LeaseExpiredError SessionLost\nTrue None []\n4\n"


def test_nothing_is_told_after_close(daemon: Daemon) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        queues = client.events, client.offers
    for told in queues:
        for look in (lambda told=told: told.get(timeout=60), told.drain):
            with pytest.raises(kvd_client.ClosedError, match="connect"):
                look()


def test_an_error_of_a_newer_daemon_is_still_a_kvd_error() -> None:
    from kvd_client._errors import from_reason

    error = from_reason("MOON_IN_THE_WAY", "wait a night", {"message": "m"})
    assert type(error) is kvd_client.KvdError
    assert str(error) == "MOON_IN_THE_WAY: wait a night"
    assert error.metadata == {"message": "m"}


def test_a_process_ends_by_itself_also_while_the_daemon_does_not_answer(
    daemon: Daemon, new_pool, spec
) -> None:
    program = """
import sys, kvd_client
client = kvd_client.connect(sys.argv[1])
lease = client.pool(sys.argv[2]).lease(tokens=16)
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[3] == "closing":
    client.close()
"""
    pool = new_pool(spec)
    for how in ("closing", "just ending"):
        command = [sys.executable, "-W", "error", "-c", program, str(daemon.run_dir), pool.name, how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout.readline() == "ready\n"
            with daemon.frozen():
                worker.communicate("end\n", timeout=PATIENCE_S)
            assert worker.returncode == 0
        eventually(lambda: daemon.pool_status(pool.name).leases == 0, "the process to be gone")
