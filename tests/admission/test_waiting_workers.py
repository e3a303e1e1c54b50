"""Waiting over the wire: a real daemon, workers in processes of their own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from tests.daemon.raw_worker import (
    TIMEOUT_S,
    RawWorker,
    at,
    fresh_id,
    quota_failure,
    reason_of,
    retry_info,
)
from tests.running_kvd import RunningKvd, eventually

from kvd.v1 import kvd_pb2 as pb

WORKER = Path(__file__).parent.parent / "daemon/raw_worker.py"
LONG_S = 50  # seconds to wait; no test takes so long unless it hangs
BLOCK = 16  # tokens
LEASABLE = 62  # blocks of a pool of 64, two of which are the scratch reserve


@contextmanager
def other_process(shared_kvd: RunningKvd) -> Iterator["subprocess.Popen[str]"]:
    """A worker elsewhere that leases 10 blocks of pool "pool" and waits to be killed."""
    command = [sys.executable, str(WORKER), str(shared_kvd.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "it says which lease it has"
            yield process
        finally:
            process.kill()


@pytest.fixture
def worker(shared_kvd: RunningKvd) -> Iterator[RawWorker]:
    """Of pool "pool", which is gone afterwards."""
    with RawWorker(shared_kvd.run_dir) as connected:
        connected.create_pool()
        yield connected
        with RawWorker(shared_kvd.run_dir) as other:
            connected.close()
            other.drop_pool("pool")


def waiting_request(worker: RawWorker, blocks: int, wait_s: float = LONG_S) -> pb.LeaseRequest:
    request = worker.lease_request(blocks * BLOCK)
    request.max_wait.FromNanoseconds(int(wait_s * 1e9))
    return request


def send(worker: RawWorker, request: pb.LeaseRequest) -> grpc.Future:
    return worker.leases.Lease.future(request, timeout=TIMEOUT_S)


def wait_until(worker: RawWorker, calls: int) -> None:
    eventually(lambda: worker.pool_status().waiting_calls == calls, f"{calls} calls in line")


def test_blocks_of_a_killed_process_go_to_who_waits(shared_kvd: RunningKvd, worker: RawWorker) -> None:
    with other_process(shared_kvd) as victim:
        call = send(worker, waiting_request(worker, LEASABLE))
        wait_until(worker, 1)
        assert worker.pool_status().wanted_blocks == LEASABLE
        victim.kill()
        [lease] = call.result().leases
        assert sum(run.count for run in lease.appended) == LEASABLE


def test_a_worker_killed_while_it_waits_leaves_the_line(shared_kvd: RunningKvd, worker: RawWorker) -> None:
    [held] = worker.lease(50 * BLOCK)
    script = (
        "import sys, kvd_client\n"
        "pool = kvd_client.connect(sys.argv[1]).pool('pool')\n"
        "print('here', flush=True)\n"
        f"pool.lease(tokens=40 * {BLOCK}, wait={LONG_S})\n"
    )
    command = [sys.executable, "-c", script, str(shared_kvd.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        wait_until(worker, 1)
        process.kill()
    wait_until(worker, 0)
    assert worker.pool_status().blocks_leased == 50
    worker.release(held)


def test_who_waits_is_told_in_time_that_it_was_in_vain(worker: RawWorker) -> None:
    worker.lease(LEASABLE * BLOCK)
    with pytest.raises(grpc.RpcError) as caught:
        send(worker, waiting_request(worker, 5, wait_s=0.05)).result()
    assert reason_of(caught.value) == "POOL_EXHAUSTED"
    assert retry_info(caught.value).retry_delay.ToNanoseconds() > 0
    assert quota_failure(caught.value).violations[0].subject == "pool:pool"


def test_nobody_waits_beyond_the_deadline_of_its_call(worker: RawWorker) -> None:
    worker.lease(LEASABLE * BLOCK)
    with pytest.raises(grpc.RpcError) as caught:
        worker.leases.Lease(waiting_request(worker, 5), timeout=0.5)
    assert caught.value.code() in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    wait_until(worker, 0)


def test_a_caller_that_cancels_leaves_the_line_and_nothing_else(worker: RawWorker) -> None:
    [held] = worker.lease(50 * BLOCK)
    call = send(worker, waiting_request(worker, 40))
    wait_until(worker, 1)
    call.cancel()
    wait_until(worker, 0)
    worker.release(held)
    assert worker.pool_status().blocks_leased == 0


def test_a_request_that_waits_and_is_repeated_is_one_request(worker: RawWorker) -> None:
    [held] = worker.lease(LEASABLE * BLOCK)
    request = waiting_request(worker, 5)
    first, second = send(worker, request), send(worker, request)
    wait_until(worker, 2)
    worker.release(held)
    assert first.result().leases == second.result().leases
    request.ClearField("max_wait")
    assert send(worker, request).result().leases == first.result().leases
    assert worker.pool_status().blocks_leased == 5


def test_a_lease_that_grows_waits_too(worker: RawWorker) -> None:
    [growing], [held] = worker.lease(BLOCK), worker.lease(60 * BLOCK)
    item = pb.ExtendItem(progress=at(growing, BLOCK), tokens=10 * BLOCK)
    request = pb.ExtendRequest(session_token=worker.token, request_id=fresh_id(), items=[item])
    request.max_wait.FromSeconds(LONG_S)
    call = worker.leases.Extend.future(request, timeout=TIMEOUT_S)
    wait_until(worker, 1)
    worker.release(held)
    [state] = call.result().leases
    assert sum(run.count for run in state.appended) == 10


def test_waiting_ends_when_the_lease_that_should_grow_is_revoked(worker: RawWorker) -> None:
    [growing] = worker.lease(BLOCK)
    worker.lease(60 * BLOCK)
    item = pb.ExtendItem(progress=at(growing, BLOCK), tokens=10 * BLOCK)
    request = pb.ExtendRequest(session_token=worker.token, request_id=fresh_id(), items=[item])
    request.max_wait.FromSeconds(LONG_S)
    call = worker.leases.Extend.future(request, timeout=TIMEOUT_S)
    wait_until(worker, 1)
    worker.admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=growing.lease_id, cause="test"))
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    assert reason_of(caught.value) == "LEASE_REVOKED"


def test_holders_are_told_how_much_all_waiting_calls_lack(shared_kvd: RunningKvd, worker: RawWorker) -> None:
    worker.lease(LEASABLE * BLOCK)
    with RawWorker(shared_kvd.run_dir) as other:
        calls = [send(other, waiting_request(other, blocks)) for blocks in (5, 7)]
        wait_until(worker, 2)
        amounts: set[int] = set()
        while 12 not in amounts:
            amounts.add(worker.stream.until("pressure").pressure.wanted_blocks)
        for call in calls:
            call.cancel()
        wait_until(worker, 0)


def test_calls_are_served_in_the_order_in_which_they_came(shared_kvd: RunningKvd, worker: RawWorker) -> None:
    leases = [worker.lease(6 * BLOCK)[0] for _ in range(10)]
    order: list[int] = []
    with RawWorker(shared_kvd.run_dir) as other:
        waiting = []
        for number in range(4):
            call = send(other, waiting_request(other, 12))
            call.add_done_callback(lambda _, number=number: order.append(number))
            waiting.append(call)
            wait_until(worker, number + 1)
        for number in range(4):
            worker.release(leases[2 * number], leases[2 * number + 1])
            waiting[number].result()
    assert order == [0, 1, 2, 3]


def test_a_daemon_that_drains_tells_those_who_wait(worker: RawWorker) -> None:
    [held] = worker.lease(LEASABLE * BLOCK)
    call = send(worker, waiting_request(worker, 5))
    wait_until(worker, 1)
    worker.admin.Drain(pb.DrainRequest())
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    assert reason_of(caught.value) == "DEVICE_UNAVAILABLE"
    worker.admin.Drain(pb.DrainRequest(resume=True))
    call = send(worker, waiting_request(worker, 5))
    wait_until(worker, 1)
    worker.release(held)
    assert len(call.result().leases) == 1
