"""Callers that send too much, half of it, or nonsense: they are refused, and nobody else notices."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.daemon.raw_worker import SPEC, RawWorker, attach_socket, new_ticket
from tests.running_kvd import RunningKvd, eventually, running_kvd

from kvd.errors import BY_REASON
from kvd.v1 import attach_pb2 as ab
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc

from .calls import answer_to
from .certificates import Authority, channel_credentials
from .test_matrix import free_port, unix_channel

TICKET = ab.AttachRequest(ticket=ab.TicketRequest()).SerializeToString()
MAP = ab.AttachRequest(map=ab.MapRequest(session_token=bytes(32), pool="pool")).SerializeToString()
ANSWER_S = 60.0


@dataclass(frozen=True)
class Doors:
    """A kvd that takes messages of at most 64 KiB, and how its TCP port is called."""

    kvd: RunningKvd
    address: str
    credentials: grpc.ChannelCredentials


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("small")
    authority = Authority(folder, "authority")
    server = authority.issue("server", "127.0.0.1")
    config = folder / "kvd.toml"
    config.write_text(
        "[limits]\nmessage_bytes = 65536\nstreams = 4\nblocks_per_call = 10\n"
        "[[access.rules]]\ncertificate = 'ops'\nroles = ['operator']\n"
    )
    tls = (
        "--tls-cert",
        str(server.cert),
        "--tls-key",
        str(server.key),
        "--tls-client-ca",
        str(authority.pem),
    )
    address = f"127.0.0.1:{free_port()}"
    arguments = ("--host-memory", "64MiB", "--config", str(config), "--listen", address)
    with running_kvd(folder, *arguments, *tls) as kvd:
        shown = authority.issue("ops", common_name="ops")
        yield Doors(kvd, address, channel_credentials(authority, shown))


@pytest.fixture(scope="module")
def small_kvd(doors: Doors) -> RunningKvd:
    return doors.kvd


def drop(channel: grpc.Channel, name_chars: int) -> grpc.StatusCode:
    request = pb.DropPoolRequest(name="x" * name_chars)
    with pytest.raises(grpc.RpcError) as refused:
        kvd_pb2_grpc.AdminServiceStub(channel).DropPool(request, timeout=ANSWER_S)
    return refused.value.code()


def test_a_message_beyond_the_limit_is_refused_at_both_doors(doors: Doors) -> None:
    tcp = grpc.secure_channel(doors.address, doors.credentials)
    with unix_channel(doors.kvd.run_dir) as here, tcp as there:
        for channel in (here, there):
            assert drop(channel, 60_000) is grpc.StatusCode.NOT_FOUND
            assert drop(channel, 70_000) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert answer_to(channel, "/kvd.v1.AdminService/GetStatus") == "served"


def test_more_calls_at_a_time_than_one_connection_may_make_wait_and_are_then_served(
    small_kvd: RunningKvd,
) -> None:
    with unix_channel(small_kvd.run_dir) as channel:
        watching = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watchers = [watching(b"", timeout=ANSWER_S) for _ in range(4)]
        assert all(next(watcher) is not None for watcher in watchers)
        status = kvd_pb2_grpc.AdminServiceStub(channel).GetStatus.future(
            pb.GetStatusRequest(), timeout=ANSWER_S
        )
        assert not status.done()
        for watcher in watchers:
            watcher.cancel()
        assert status.result().device == "host0"


def test_more_blocks_than_one_call_may_have_are_refused_by_the_limits_name(small_kvd: RunningKvd) -> None:
    with RawWorker(small_kvd.run_dir) as worker:
        worker.create_pool()
        [lease] = worker.lease(SPEC.block_size * 10)
        for attempt in (
            lambda: worker.lease(SPEC.block_size * 5, SPEC.block_size * 5 + 1),
            lambda: worker.extend(lease, 0, SPEC.block_size * 10 + 1),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                attempt()
            assert "limits.blocks_per_call" in refused.value.details()


def descriptors(kvd: RunningKvd) -> int:
    return len(os.listdir(f"/proc/{kvd.daemon_pid()}/fd"))


def talk(run_dir: Path, packets: list[bytes]) -> list[ab.AttachResponse]:
    """All packets at once, then all answers: one for each, in order."""
    with attach_socket(run_dir) as connection:
        for packet in packets:
            connection.send(packet)
        return [ab.AttachResponse.FromString(connection.recv(1 << 16)) for _ in packets]


NONSENSE = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.builds(
        lambda whole, cut: whole[:cut], st.sampled_from([TICKET + MAP, MAP]), st.integers(1, len(MAP) - 1)
    ),
    st.builds(lambda whole, junk: whole + junk, st.sampled_from([TICKET, MAP]), st.binary(max_size=60)),
    st.binary(min_size=4090, max_size=4100),
    st.sampled_from([TICKET, MAP]),
)


@settings(max_examples=60)
@given(packets=st.lists(NONSENSE, min_size=1, max_size=8))
def test_whatever_packets_come_each_is_answered_by_one_of_kvds_words(
    small_kvd: RunningKvd, packets: list[bytes]
) -> None:
    for answer in talk(small_kvd.run_dir, packets):
        assert answer.epoch
        assert answer.WhichOneof("response") in ("ticket", "error")
        if answer.HasField("error"):
            assert answer.error.reason in BY_REASON
            assert answer.error.reason != "INTERNAL"


@settings(max_examples=30)
@given(packets=st.lists(NONSENSE, max_size=5), closed=st.sampled_from([None, socket.SHUT_RD, socket.SHUT_WR]))
def test_whoever_leaves_in_the_middle_leaves_nothing(
    small_kvd: RunningKvd, packets: list[bytes], closed: int | None
) -> None:
    with attach_socket(small_kvd.run_dir) as connection:
        for packet in packets:
            connection.send(packet)
        if closed is not None:
            connection.shutdown(closed)


@settings(max_examples=5)
@given(packet=NONSENSE)
def test_a_flood_keeps_nobody_else_from_a_ticket(small_kvd: RunningKvd, packet: bytes) -> None:
    flood = [attach_socket(small_kvd.run_dir) for _ in range(40)]
    for connection in flood:
        connection.setblocking(False)
    for _ in range(20):
        for connection in flood:
            try:
                connection.send(packet)
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                continue  # it has had enough of us
    assert len(new_ticket(small_kvd.run_dir)) == 32
    for connection in flood:
        connection.close()


def test_after_all_that_the_daemon_is_well_and_holds_nothing_more(small_kvd: RunningKvd) -> None:
    before_next = descriptors(small_kvd)
    talk(small_kvd.run_dir, [TICKET] * 20)
    eventually(lambda: descriptors(small_kvd) <= before_next + 20, "descriptors to be closed")
    with unix_channel(small_kvd.run_dir) as channel:
        admin = kvd_pb2_grpc.AdminServiceStub(channel)
        eventually(lambda: admin.GetStatus(pb.GetStatusRequest()).health == "serving", "a healthy daemon")
    assert "incident" not in small_kvd.log.read_text()
