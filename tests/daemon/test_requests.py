"""Single calls: repeated, refused, too large, abandoned. A refused one changes nothing."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.running_kvd import RunningKvd, eventually

from kvd.v1 import kvd_pb2 as pb

from .raw_worker import (
    SPEC,
    RawWorker,
    at,
    block_ids,
    error_info,
    fresh_id,
    quota_failure,
    reason_of,
    retry_info,
)

SERVICES = [f"kvd.v1.{name}Service" for name in ("Session", "Pool", "Lease", "Admin")]


@pytest.fixture
def worker(shared_kvd: RunningKvd):
    """A session with a pool of 64 blocks, dropped at the end."""
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        yield worker
    with RawWorker(shared_kvd.run_dir) as sweeper:
        sweeper.drop_pool("pool")


def refusal_of(call, *arguments, **fields) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as failure:
        call(*arguments, **fields)
    return failure.value


def test_a_repeated_request_gets_the_first_reply_and_takes_nothing(worker: RawWorker) -> None:
    request = worker.lease_request(100)
    first, second = worker.leases.Lease(request), worker.leases.Lease(request)
    assert first == second
    assert worker.pool_status().blocks_leased == 7


def test_concurrent_repetitions_of_one_request_take_blocks_once(worker: RawWorker) -> None:
    request = worker.lease_request(100)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: worker.leases.Lease(request), range(8)))
    assert all(reply == replies[0] for reply in replies)
    assert worker.pool_status().blocks_leased == 7


def test_one_request_id_for_two_requests_is_refused(worker: RawWorker) -> None:
    request = worker.lease_request(100)
    worker.leases.Lease(request)
    request.items[0].tokens = 200
    assert reason_of(refusal_of(worker.leases.Lease, request)) == "REQUEST_REUSED"
    assert worker.pool_status().blocks_leased == 7


def test_a_refused_request_may_be_repeated_with_its_id(worker: RawWorker) -> None:
    [lease] = worker.lease(60 * 16)
    request = worker.lease_request(32 * 16)
    assert reason_of(refusal_of(worker.leases.Lease, request)) == "POOL_EXHAUSTED"
    worker.release(lease)
    assert len(worker.leases.Lease(request).leases) == 1


def test_two_sessions_may_use_the_same_request_id(worker: RawWorker) -> None:
    with RawWorker(worker.run_dir) as other:
        mine, theirs = worker.lease_request(16), other.lease_request(16)
        theirs.request_id = mine.request_id
        assert worker.leases.Lease(mine) != other.leases.Lease(theirs)


def test_an_exhausted_pool_says_what_is_free_what_helps_and_when_to_retry(worker: RawWorker) -> None:
    worker.lease(61 * 16)
    error = refusal_of(worker.lease, 2 * 16)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = error_info(error)
    assert dict(info.metadata) == {
        "wanted_blocks": "2",
        "free_blocks": "1",
        "pool_blocks": "62",
        "kept_blocks": "0",
        "pool": "pool",
    }
    assert error.details() == (
        "2 blocks wanted in pool pool, 1 free; "
        "release a lease, compress one, wait in line, or retry after 40 ms"
    )
    assert retry_info(error).retry_delay.ToMilliseconds() == 40
    assert quota_failure(error).violations[0].subject == "pool:pool"


def test_a_lease_larger_than_the_pool_is_not_told_to_wait(worker: RawWorker) -> None:
    error = refusal_of(worker.lease, 5000 * 16)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (error.details() or "").endswith("when empty; lease fewer tokens, or create a larger pool")


def test_a_block_named_twice_a_foreign_one_and_the_null_block_change_nothing(worker: RawWorker) -> None:
    lease, foreign = worker.lease(100, 16)
    mine = block_ids(lease)
    for ids in ([mine[-1], mine[-1]], [block_ids(foreign)[0]], [0], [2**32 - 1], [mine[-1], 0]):
        assert reason_of(refusal_of(worker.release_blocks, lease, 16, ids)) == "BLOCK_NOT_HELD"
        assert worker.pool_status().blocks_leased == 8
    assert reason_of(refusal_of(worker.release_blocks, lease, 100, mine[:1])) == "BLOCK_IN_USE"
    state = worker.release_blocks(lease, 16, mine[1:])
    assert state.kept_blocks == 1
    assert worker.pool_status().blocks_leased == 2


def test_a_lease_named_twice_is_released_neither_time(worker: RawWorker) -> None:
    [lease] = worker.lease(100)
    assert reason_of(refusal_of(worker.release, lease, lease)) == "INVALID_ARGUMENT"
    assert worker.pool_status().blocks_leased == 7


def test_a_released_lease_is_not_found_and_a_foreign_one_is_not_touched(worker: RawWorker) -> None:
    [lease] = worker.lease(100)
    with RawWorker(worker.run_dir) as other:
        assert reason_of(refusal_of(other.release, lease)) == "NOT_OWNER"
    worker.release(lease)
    assert reason_of(refusal_of(worker.release, lease)) == "LEASE_NOT_FOUND"


@pytest.mark.parametrize("token", [b"", b"x", bytes(32), bytes(1 << 20)])
def test_a_wrong_token_is_refused_by_every_call_that_takes_one(worker: RawWorker, token: bytes) -> None:
    for call, request in (
        (worker.pools.CreatePool, pb.CreatePoolRequest()),
        (worker.leases.Lease, pb.LeaseRequest()),
        (worker.leases.Extend, pb.ExtendRequest()),
        (worker.leases.Compress, pb.CompressRequest()),
        (worker.leases.Observe, pb.ObserveRequest()),
        (worker.leases.Seal, pb.SealRequest()),
        (worker.leases.ReleaseBlocks, pb.ReleaseBlocksRequest()),
        (worker.leases.Release, pb.ReleaseRequest()),
    ):
        request.session_token = token
        error = refusal_of(call, request)
        assert reason_of(error) == "SESSION_NOT_FOUND"
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_pool_of_another_geometry_is_refused_with_the_fields_that_differ(worker: RawWorker) -> None:
    other = pb.KVSpec()
    other.CopyFrom(SPEC)
    other.head_dim_v, other.dtype = 16, "bfloat16"
    error = refusal_of(worker.create_pool, spec=other)
    assert reason_of(error) == "POOL_MISMATCH"
    assert set(error_info(error).metadata["fields"].split(",")) == {"head_dim_v", "dtype"}


def test_a_pool_that_does_not_fit_is_refused_with_what_would(worker: RawWorker) -> None:
    error = refusal_of(worker.create_pool, "huge", blocks=1 << 20)
    assert reason_of(error) == "DEVICE_FULL"
    assert "or ask for" in error.details()
    assert [status.pool.name for status in worker.status().pools] == ["pool"]


def test_a_pool_in_use_cannot_be_dropped_a_free_one_can(worker: RawWorker) -> None:
    worker.create_pool("second")
    [lease] = worker.lease(16, pool="second")
    assert reason_of(refusal_of(worker.drop_pool, "second")) == "POOL_IN_USE"
    worker.release(lease)
    worker.drop_pool("second")
    assert reason_of(refusal_of(worker.drop_pool, "second")) == "POOL_NOT_FOUND"


def test_a_message_beyond_the_limit_is_refused_before_it_is_read(worker: RawWorker) -> None:
    request = pb.SealRequest(session_token=worker.token, prefix_hashes=[bytes(32)] * 300_000)
    error = refusal_of(worker.leases.Seal, request)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert worker.status().health != "failing"


def test_more_leases_in_a_call_than_allowed_are_refused(worker: RawWorker) -> None:
    assert reason_of(refusal_of(worker.lease, *[1] * 1025)) == "LIMIT_EXCEEDED"
    assert worker.pool_status().leases == 0


def test_lists_come_in_pages(worker: RawWorker) -> None:
    leases = worker.lease(*[16] * 5)
    seen, token = [], ""
    while True:
        request = pb.ListLeasesRequest(pool="pool", page_size=2, page_token=token)
        page = worker.admin.ListLeases(request)
        seen += [info.lease_id for info in page.leases]
        if not (token := page.next_page_token):
            break
    assert seen == [lease.lease_id for lease in leases]
    for request in (pb.ListLeasesRequest(page_size=1001), pb.ListLeasesRequest(page_token="x")):
        assert reason_of(refusal_of(worker.admin.ListLeases, request)) == "INVALID_ARGUMENT"
    assert reason_of(refusal_of(worker.admin.ListLeases, pb.ListLeasesRequest(pool="no"))) == "POOL_NOT_FOUND"


def test_a_caller_that_leaves_gets_its_request_carried_out_once(worker: RawWorker) -> None:
    request = worker.lease_request(100)
    abandoned = worker.leases.Lease.future(request)
    abandoned.cancel()
    reply = worker.leases.Lease(request)
    assert len(reply.leases) == 1
    assert worker.pool_status().blocks_leased == 7


def test_the_pool_is_populated_in_the_background(worker: RawWorker) -> None:
    eventually(lambda: worker.pool_status().populated_bytes == worker.pool_status().total_bytes, "population")


def test_the_health_check_serves_when_the_kernel_worker_does(worker: RawWorker) -> None:
    health = health_pb2_grpc.HealthStub(worker.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", *SERVICES):
        request = health_pb2.HealthCheckRequest(service=service)
        eventually(lambda request=request: health.Check(request).status == serving, f"{service} serves")
    assert worker.status().health == "serving"
    error = refusal_of(health.Check, health_pb2.HealthCheckRequest(service="nobody"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_tells_the_services(worker: RawWorker) -> None:
    told = ProtoReflectionDescriptorDatabase(worker.channel).get_services()
    assert set(SERVICES) <= set(told)


def test_a_request_id_may_be_left_away(worker: RawWorker) -> None:
    request = worker.lease_request(16)
    request.request_id = ""
    assert worker.leases.Lease(request) != worker.leases.Lease(request)


def test_progress_of_a_stale_generation_is_refused(worker: RawWorker) -> None:
    [lease] = worker.lease(100)
    stale = at(lease, 50)
    stale.generation += 1
    item = pb.ExtendItem(progress=stale, tokens=10)
    request = pb.ExtendRequest(session_token=worker.token, request_id=fresh_id(), items=[item])
    error = refusal_of(worker.leases.Extend, request)
    assert reason_of(error) == "STALE_GENERATION"
    assert error.code() is grpc.StatusCode.ABORTED
