"""The attach socket among peers that are slow, silent, many, or talk nonsense."""

import array
import mmap
import os
import socket

import pytest
from tests.running_kvd import RunningKvd, eventually

from kvd.v1 import attach_pb2 as ab

from .raw_worker import RawWorker, ask, attach_socket, new_ticket

TICKET = ab.AttachRequest(ticket=ab.TicketRequest())


def refusal(connection: socket.socket, packet: bytes) -> ab.AttachError:
    connection.send(packet)
    response = ab.AttachResponse.FromString(connection.recv(1 << 16))
    assert response.epoch
    return response.error


def test_a_malformed_packet_is_refused_and_the_next_one_is_served(shared_kvd: RunningKvd) -> None:
    with attach_socket(shared_kvd.run_dir) as connection:
        assert refusal(connection, b"\xff\xff\xff").reason == "INVALID_ARGUMENT"
        assert len(ask(connection, TICKET)[0].ticket.ticket) == 32


def test_a_packet_beyond_the_limit_is_refused_by_name(shared_kvd: RunningKvd) -> None:
    with attach_socket(shared_kvd.run_dir) as connection:
        error = refusal(connection, bytes(10_000))
        assert error.reason == "INVALID_ARGUMENT"
        assert "4096 bytes" in error.message


def test_a_map_request_is_refused_without_a_session_or_a_pool(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as worker, attach_socket(shared_kvd.run_dir) as connection:
        for token, pool, reason in (
            (b"", "pool", "SESSION_NOT_FOUND"),
            (bytes(32), "pool", "SESSION_NOT_FOUND"),
            (worker.token, "no such pool", "POOL_NOT_FOUND"),
        ):
            request = ab.AttachRequest(map=ab.MapRequest(session_token=token, pool=pool))
            assert ask(connection, request)[0].error.reason == reason


def test_mapped_memory_has_its_size_for_ever(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        response, fds = worker.map_pool()
        sizes = [response.map.pool_bytes, response.map.sidecar_bytes, response.map.fence_bytes]
        assert [os.fstat(fd).st_size for fd in fds] == sizes
        for fd in fds:
            for size in (0, 1 << 30):
                with pytest.raises(OSError, match=r"not permitted|Invalid"):
                    os.ftruncate(fd, size)
            os.close(fd)
        worker.drop_pool("pool")


def test_fences_can_be_read_and_not_written(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        [lease] = worker.lease(16)
        response, fds = worker.map_pool()
        with pytest.raises(PermissionError):
            mmap.mmap(fds[2], response.map.fence_bytes)
        with mmap.mmap(fds[2], response.map.fence_bytes, prot=mmap.PROT_READ) as fences:
            words = memoryview(fences).cast("Q")
            assert words[lease.fence_slot] == lease.lease_id << 24 | lease.generation
            worker.release(lease)
            assert words[lease.fence_slot] == 0
            words.release()
        for fd in fds:
            os.close(fd)
        worker.drop_pool("pool")


def talk_for_ever(connection: socket.socket) -> None:
    """Ask and never read the answers, until the daemon has enough of it."""
    while True:
        connection.send(TICKET.SerializeToString())


def test_silent_and_deaf_peers_block_nobody(shared_kvd: RunningKvd) -> None:
    silent = [attach_socket(shared_kvd.run_dir) for _ in range(20)]
    deaf = attach_socket(shared_kvd.run_dir)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        talk_for_ever(deaf)
    assert len(new_ticket(shared_kvd.run_dir)) == 32
    for connection in (*silent, deaf):
        connection.close()


def test_more_connections_than_the_limit_cost_the_longest_silent_ones(shared_kvd: RunningKvd) -> None:
    first = attach_socket(shared_kvd.run_dir)
    others = [attach_socket(shared_kvd.run_dir) for _ in range(300)]
    assert len(new_ticket(shared_kvd.run_dir)) == 32
    assert first.recv(1) == b""
    for connection in (first, *others):
        connection.close()


def test_descriptors_that_a_peer_sends_are_not_kept(shared_kvd: RunningKvd) -> None:
    daemon_fds = f"/proc/{shared_kvd.daemon_pid()}/fd"
    before = len(os.listdir(daemon_fds))
    with attach_socket(shared_kvd.run_dir) as connection, open("/dev/null") as gift:
        for _ in range(50):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [gift.fileno()] * 4))]
            connection.sendmsg([b"\xff"], rights)
            assert ab.AttachResponse.FromString(connection.recv(1 << 16)).HasField("error")
    eventually(lambda: len(os.listdir(daemon_fds)) <= before, "the descriptors' end")


def test_tickets_that_nobody_redeems_cost_only_those_of_their_own_process(shared_kvd: RunningKvd) -> None:
    daemon_fds = f"/proc/{shared_kvd.daemon_pid()}/fd"
    before = len(os.listdir(daemon_fds))
    with attach_socket(shared_kvd.run_dir) as connection:
        tickets = [ask(connection, TICKET)[0].ticket.ticket for _ in range(100)]
    assert len(set(tickets)) == 100
    assert len(os.listdir(daemon_fds)) <= before + 20
