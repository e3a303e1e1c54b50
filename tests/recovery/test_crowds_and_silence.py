"""Many workers at once, long jobs, and daemons that are away or say nothing."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.client.daemon import Daemon
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually

import kvd_client

from .filling import fill, patiently, values
from .workers import worker

PROCESSES, CLIENTS_EACH = 4, 16
SOON = 0.3  # seconds; the deadline of a client that must not wait


def test_sixty_four_clients_attach_at_once_and_none_expires(start_kvd: Callable[..., RunningKvd]) -> None:
    body = f"""
    say("there")
    hear()
    clients, leases = [], []
    lock = threading.Lock()
    def attach():
        client = kvd_client.connect(run_dir, timeout=60)
        lease = client.pool("pool", SPEC, 512).lease(tokens=32, lease_ahead=0)
        with lock:
            clients.append(client), leases.append(lease)
    threads = [threading.Thread(target=attach) for _ in range({CLIENTS_EACH})]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    say(len(clients))
    hear()
    say(" ".join(sorted({{outcome(lease.check) for lease in leases}})))
    hear()
    """
    kvd = start_kvd("--session-ttl", "3s")
    daemon = Daemon(kvd)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(worker(kvd.run_dir, body)) for _ in range(PROCESSES)]
        assert [each.hear() for each in crowd] == ["there"] * PROCESSES
        for each in crowd:
            each.tell()
        assert [each.hear() for each in crowd] == [str(CLIENTS_EACH)] * PROCESSES
        assert daemon.status().sessions == PROCESSES * CLIENTS_EACH
        assert daemon.pool_status("pool").leases == PROCESSES * CLIENTS_EACH
        assert [each.ask() for each in crowd] == ["fine"] * PROCESSES
        assert " expired" not in kvd.log.read_text()


def test_a_long_compression_keeps_nobody_from_attaching_and_leasing(daemon: Daemon, kvd, spec) -> None:
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("pool", spec, 64).lease()
        fill(lease, 320, 5.0)
        eventually(lambda: daemon.status().health == "serving", "the kernel worker")
        kernel_pid = kvd.kernel_pid()
        os.kill(kernel_pid, signal.SIGSTOP)
        compression = threading.Thread(
            target=lambda: lease.compress(kvd_client.Streaming(sinks=4, window=28), timeout=PATIENCE_S)
        )
        compression.start()
        eventually(lambda: daemon.lease_info(lease.lease_id).state == "compressing", "the job")
        with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as late:
            other = late.pool("pool", spec).lease(tokens=160)
            fill(other, 160, 6.0)
            assert compression.is_alive()
            assert values(other) == {6.0}
        with contextlib.suppress(ProcessLookupError):  # it may have been replaced by now
            os.kill(kernel_pid, signal.SIGCONT)
        compression.join(PATIENCE_S)


def test_a_long_absence_of_the_daemon_costs_each_call_its_deadline_and_then_all_is_well(
    daemon: Daemon, spec
) -> None:
    with patiently(lambda: kvd_client.connect(daemon.run_dir, timeout=SOON)) as client:
        pool = patiently(lambda: client.pool("pool", spec, 64))
        lease = patiently(lambda: pool.lease(tokens=16))
        fill(lease, 16, 1.0)
        with daemon.ended():
            for _ in range(5):
                for call in (lambda: lease.extend(100), lambda: pool.lease(tokens=16), lambda: client.epoch):
                    assert outcome(call) is kvd_client.DeviceUnavailableError
            assert values(lease) == {1.0}  # reading asks nobody
        assert patiently(lambda: lease.extend(100)).size == 100
        assert values(lease) == {1.0}
        assert daemon.lease_info(lease.lease_id).state == "active"


def test_a_daemon_that_is_connected_and_silent_costs_each_call_its_deadline(daemon: Daemon, spec) -> None:
    with patiently(lambda: kvd_client.connect(daemon.run_dir, timeout=SOON)) as client:
        pool = patiently(lambda: client.pool("pool", spec, 64))
        lease = patiently(lambda: pool.lease(tokens=16))
        fill(lease, 16, 1.0)
        with daemon.frozen():
            for call in (
                lambda: lease.extend(100),
                lambda: pool.lease(tokens=16),
                lambda: client.pool("pool"),
            ):
                assert outcome(call) is kvd_client.DeadlineExceededError
            assert values(lease) == {1.0}
        assert patiently(lambda: lease.extend(100)).size == 100
        assert values(lease) == {1.0}


def test_a_stopped_daemon_that_goes_on_has_not_forgotten_who_renewed(start_kvd, spec) -> None:
    """Its own standstill is not its workers' silence: they get a chance to speak before they expire."""
    kvd = start_kvd("--session-ttl", "1s")
    daemon = Daemon(kvd)
    with kvd_client.connect(daemon.run_dir, timeout=PATIENCE_S) as client:
        lease = client.pool("pool", spec, 64).lease(tokens=16)
        fill(lease, 16, 1.0)
        with daemon.frozen():
            silence = threading.Event()
            silence.wait(2.0)  # twice the TTL
        assert lease.extend(100).size == 100
        assert values(lease) == {1.0}
        assert client.events.drain() == []


def outcome(call: Callable[[], Any]) -> type[kvd_client.KvdError] | None:
    try:
        call()
    except kvd_client.KvdError as error:
        return type(error)
    return None
