"""Health of a real kvd: what an operator, a watcher and the workers see when something hangs."""

import mmap
import os
import signal
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.daemon.raw_worker import RawWorker, block_ids, reason_of
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually, is_alive

from kvd.v1 import kvd_pb2 as pb

STREAM = pb.Policy(streaming=pb.StreamingPolicy(sinks=4, window=28, rope="original"))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
BLOCK_BYTES = 2 * 2 * 16 * 16 * 4


@pytest.fixture
def worker(shared_kvd: RunningKvd) -> Iterator[RawWorker]:
    """A session with a pool of 64 blocks, dropped at the end, of a daemon that serves."""
    with RawWorker(shared_kvd.run_dir) as worker:
        eventually(lambda: worker.status().health == "serving", "a daemon that serves")
        worker.create_pool()
        yield worker
    with RawWorker(shared_kvd.run_dir) as sweeper:
        sweeper.drop_pool("pool")


def mapped(worker: RawWorker) -> np.ndarray:
    """The pool's bytes, uint8 [blocks, bytes of a block]."""
    response, fds = worker.map_pool()
    memory = mmap.mmap(fds[0], response.map.pool_bytes)
    for fd in fds:
        os.close(fd)
    return np.frombuffer(memory, np.uint8).reshape(-1, BLOCK_BYTES)


def watched(worker: RawWorker) -> Iterator[int]:
    """What the health service tells, state by state."""
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return (answer.status for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S))


def test_a_stopped_kernel_worker_costs_a_retry_and_no_byte(shared_kvd: RunningKvd, worker: RawWorker) -> None:
    bytes_of, dice = mapped(worker), np.random.default_rng(7)
    leases = worker.lease(160, 320, 48)
    tables = [block_ids(lease) for lease in leases]
    for table in tables:
        bytes_of[table] = dice.integers(0, 256, (len(table), BLOCK_BYTES), np.uint8)
    before, states = bytes_of.copy(), watched(worker)
    assert next(states) == SERVING
    restarts, kernel_pid = worker.status().kernel_restarts, worker.status().kernel_pid
    assert kernel_pid == shared_kvd.kernel_pid()
    os.kill(kernel_pid, signal.SIGSTOP)
    request = worker.compress_request(leases[0], 160, STREAM)
    running = worker.leases.Compress.future(request)
    assert next(states) == NOT_SERVING
    status = worker.status()
    assert (status.health, f"kernel worker {kernel_pid}" in status.health_detail) == ("failing", True)
    assert worker.lease(16)  # leases need no kernel worker
    with pytest.raises(grpc.RpcError) as failure:
        running.result(timeout=PATIENCE_S)
    assert reason_of(failure.value) == "KERNEL_WORKER_UNAVAILABLE"
    assert next(states) == SERVING
    status = worker.status()
    assert status.kernel_restarts == restarts + 1
    assert status.kernel_pid not in (0, kernel_pid)
    assert not is_alive(kernel_pid)
    for table in tables:
        np.testing.assert_array_equal(bytes_of[table], before[table])
    assert [worker.lease_info(lease).state for lease in leases] == ["active"] * 3
    assert worker.leases.Compress(request).report.tokens_kept == 32


def test_a_folder_that_is_gone_turns_health_red_though_old_connections_still_serve(
    shared_kvd: RunningKvd, worker: RawWorker
) -> None:
    folder, states = shared_kvd.run_dir / "host0", watched(worker)
    assert next(states) == SERVING
    folder.rename(folder.with_name("elsewhere"))
    try:
        assert next(states) == NOT_SERVING
        eventually(lambda: worker.status().lease_probe_age.ToSeconds() >= 5, "probes that get no answer")
        assert "nobody can connect any more" in worker.status().health_detail
    finally:
        folder.with_name("elsewhere").rename(folder)
    assert next(states) == SERVING
    assert worker.status().lease_probe_age.ToSeconds() < 5


def test_probes_are_in_no_list_and_take_nothing(shared_kvd: RunningKvd, worker: RawWorker) -> None:
    first = worker.lease(16)[0].lease_id

    def probed_again() -> bool:
        return worker.status().lease_probe_age.ToNanoseconds() < previous

    for _ in range(2):
        previous = 0
        eventually(lambda: worker.status().HasField("lease_probe_age"), "a probe")
        previous = worker.status().lease_probe_age.ToNanoseconds()
        eventually(probed_again, "another probe")
    assert worker.lease(16)[0].lease_id == first + 1
    assert worker.status().sessions == 1
    assert len(worker.admin.ListSessions(pb.ListSessionsRequest()).sessions) == 1
    assert len(worker.admin.ListLeases(pb.ListLeasesRequest()).leases) == 2
    assert worker.pool_status().blocks_leased == 2


def test_a_full_pool_is_no_sick_one(shared_kvd: RunningKvd, worker: RawWorker) -> None:
    worker.lease(62 * 16)
    worker.lease(2 * 16, scratch=True)
    assert worker.pool_status().blocks_free == 0
    age = worker.status().lease_probe_age.ToNanoseconds()
    eventually(lambda: worker.status().lease_probe_age.ToNanoseconds() < age, "another probe")
    assert worker.status().health == "serving"


def test_a_daemon_that_was_stuck_says_so_and_blames_nobody_else(
    shared_kvd: RunningKvd, worker: RawWorker
) -> None:
    before = worker.status()
    asked = worker.admin.GetStatus.future(pb.GetStatusRequest(), timeout=PATIENCE_S)
    asked.result()
    os.kill(before.pid, signal.SIGSTOP)
    late = worker.admin.GetStatus.future(pb.GetStatusRequest(), timeout=1.5)
    with pytest.raises(grpc.FutureTimeoutError):
        late.result(timeout=1.2)
    os.kill(before.pid, signal.SIGCONT)
    eventually(lambda: "the event loop was stuck for" in worker.status().health_detail, "a word about it")
    after = worker.status()
    assert after.health == "serving"
    assert (after.kernel_pid, after.kernel_restarts) == (before.kernel_pid, before.kernel_restarts)


def test_a_lease_that_is_revoked_while_it_is_compressed_goes_when_that_has_ended(
    shared_kvd: RunningKvd, worker: RawWorker
) -> None:
    [lease] = worker.lease(160)
    kernel_pid = worker.status().kernel_pid
    os.kill(kernel_pid, signal.SIGSTOP)
    running = worker.leases.Compress.future(worker.compress_request(lease, 160, STREAM))
    eventually(lambda: worker.lease_info(lease).state == "compressing", "a running compression")
    revoked = worker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id, cause="too greedy"))
    assert (revoked.deferred, revoked.quarantined_blocks) == (True, 0)
    assert worker.lease_info(lease).state == "compressing"
    with pytest.raises(grpc.RpcError) as again:
        worker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease.lease_id))
    assert reason_of(again.value) == "LEASE_REVOKED"
    os.kill(kernel_pid, signal.SIGCONT)
    assert running.result(timeout=PATIENCE_S).report.tokens_kept == 32
    told = worker.stream.until("revoked").revoked
    assert (told.lease_id, told.cause) == (lease.lease_id, "too greedy")
    assert worker.lease_info(lease).state == "revoked"
    assert worker.pool_status().blocks_quarantined == 2
    with pytest.raises(grpc.RpcError) as refusal:
        worker.extend(lease, 32, 1)
    assert reason_of(refusal.value) == "LEASE_REVOKED"
    worker.release(lease)
    assert worker.pool_status().blocks_free == 64
