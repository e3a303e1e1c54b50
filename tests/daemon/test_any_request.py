"""Whatever a client sends, the answer is typed, the daemon lives, and a refused call changes nothing."""

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.running_kvd import RunningKvd, running_kvd

from kvd.errors import BY_REASON
from kvd.v1 import attach_pb2 as ab
from kvd.v1 import kvd_pb2 as pb

from .any_message import Likely, any_message
from .raw_worker import RawWorker, Stream, attach_socket, error_info, new_ticket

HASHES = [bytes([depth]) * 32 for depth in range(2)]
MAX_WAIT_NS = 10_000_000  # ns that a call waits for blocks, or for a lease to adopt
FOR_ALL_OTHERS = ("Drain", "Restart")  # what they do decides what every later call is answered
UNARY = [
    (service.name, method)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming and method.name not in FOR_ALL_OTHERS
]
BOUNDED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def shared_kvd(tmp_path_factory: pytest.TempPathFactory):
    """With a host tier, so that leases can be suspended."""
    with running_kvd(tmp_path_factory.mktemp("kvd"), "--host-tier", "16MiB") as running:
        yield running


@pytest.fixture(scope="module")
def worker(shared_kvd: RunningKvd):
    """A session with a pool."""
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool(blocks=1000)
        yield worker


@pytest.fixture
def likely(worker: RawWorker) -> Likely:
    """Values that get past the first checks; among them two new leases and a scratch lease."""
    leases = [*worker.lease(120, 30), *worker.lease(64, scratch=True)]
    worker.seal(leases[0], HASHES)
    lease_ids = st.sampled_from([lease.lease_id for lease in leases])
    return {
        "session_token": st.just(worker.token),
        "request_id": st.uuids().map(str),
        "pool": st.just("pool"),
        "name": st.sampled_from(["pool", "another"]),
        "lease_id": lease_ids,
        "lease_ids": lease_ids,
        "scratch_lease_id": st.just(leases[2].lease_id),
        "generation": st.integers(1, 3),
        "block_ids": st.integers(0, 20),
        "key": st.sampled_from(["one", "two"]),
        "to_session": st.sampled_from(["", worker.opened.session_id]),
        **dict.fromkeys(("layers", "kv_heads", "head_dim_k", "head_dim_v", "block_size"), st.integers(1, 9)),
        **dict.fromkeys(("tokens", "length", "position", "window", "sinks"), st.integers(0, 120)),
        "kernel": st.sampled_from([1, 3, 5]),
        "query_heads": st.sampled_from([2, 4]),
        "numerator": st.just(1),
        "denominator": st.integers(1, 4),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn"]),
        "layout": st.sampled_from(["block_outermost", "layer_outermost"]),
        "pooling": st.sampled_from(["avg", "max"]),
        "granularity": st.sampled_from(["token", "block"]),
        "rope": st.sampled_from(["original", "cache"]),
        "style": st.sampled_from(["half_split", "interleaved"]),
        "prefix_hashes": st.sampled_from(HASHES[:1] + HASHES) | st.binary(min_size=32, max_size=32),
        "pin_id": st.sampled_from([0, worker.match(HASHES[:1]).pin_id]),
        "blocks": st.integers(0, 100),
    }


def state(worker: RawWorker) -> pb.GetStatusResponse:
    """What a refused call must leave as it was."""
    status = worker.status()
    for of_the_moment in ("health", "health_detail", "kernel_pid", "lease_probe_age", "kernel_probe_age"):
        status.ClearField(of_the_moment)
    for pool in status.pools:
        pool.ClearField("populated_bytes")
    return status


def assert_unchanged(before: pb.GetStatusResponse, after: pb.GetStatusResponse) -> None:
    """Except that a match or a publication of an earlier request may have come to its end meanwhile."""
    if promises(before) == promises(after):
        assert before == after


def promises(status: pb.GetStatusResponse) -> list[tuple[int, int]]:
    return [(pool.blocks_pinned, pool.leases_shelved) for pool in status.pools]


def assert_typed(error: grpc.RpcError) -> None:
    info = error_info(error)
    assert info.domain == "kvd"
    assert BY_REASON[info.reason].status == error.code().name
    assert info.reason != "INTERNAL", error.details()
    assert error.details()


@pytest.mark.parametrize(("service", "method"), UNARY, ids=[method.name for _, method in UNARY])
def test_any_unary_request_is_answered(worker: RawWorker, likely: Likely, service: str, method) -> None:
    call = worker.channel.unary_unary(
        f"/kvd.v1.{service}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=lambda raw: raw,
    )

    @settings(BOUNDED, max_examples=40)
    @given(request=any_message(method.input_type, likely))
    def send(request: Message) -> None:
        before = state(worker)
        if "max_wait" in request.DESCRIPTOR.fields_by_name and request.HasField("max_wait"):
            request.max_wait.seconds = min(request.max_wait.seconds, 0)
            request.max_wait.nanos = min(request.max_wait.nanos, MAX_WAIT_NS)
        try:
            call(request, timeout=60)
        except grpc.RpcError as error:
            assert_typed(error)
            assert_unchanged(before, state(worker))

    send()


@settings(BOUNDED, max_examples=40)
@given(data=st.data())
def test_any_stream_of_connect_requests_is_answered(
    worker: RawWorker, likely: Likely, data: st.DataObject
) -> None:
    ticket = st.builds(new_ticket, st.just(worker.run_dir))
    connect = any_message(pb.ConnectRequest.DESCRIPTOR, likely | {"ticket": ticket})
    messages = data.draw(st.lists(connect, min_size=1, max_size=4))
    sessions = worker.status().sessions
    stream = Stream(worker.channel, messages[0])
    for message in [*messages[1:], pb.ConnectRequest(close=pb.CloseSession())]:
        stream.send(message)
    try:
        stream.end()
    except grpc.RpcError as error:
        assert_typed(error)
    assert worker.status().sessions <= sessions + 1


@settings(BOUNDED, max_examples=60)
@given(packets=st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_any_packet_at_the_attach_socket_is_answered(worker: RawWorker, packets: list[bytes]) -> None:
    with attach_socket(worker.run_dir) as connection:
        for packet in filter(None, packets):
            connection.send(packet)
            response = ab.AttachResponse.FromString(connection.recv(1 << 16))
            assert response.WhichOneof("response") in ("ticket", "error")
            if response.HasField("error"):
                assert response.error.reason in BY_REASON


@settings(BOUNDED, max_examples=40)
@given(data=st.data())
def test_any_attach_request_is_answered(worker: RawWorker, likely: Likely, data: st.DataObject) -> None:
    request = data.draw(any_message(ab.AttachRequest.DESCRIPTOR, likely))
    packet = request.SerializeToString()
    with attach_socket(worker.run_dir) as connection:
        if packet:
            connection.send(packet)
            response = ab.AttachResponse.FromString(connection.recv(1 << 16))
            assert response.WhichOneof("response") in ("ticket", "map", "error")


def test_nothing_of_all_that_was_a_bug(worker: RawWorker) -> None:
    assert worker.status().health != "failing", worker.status().health_detail
