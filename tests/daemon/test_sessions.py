"""Sessions: opened by ticket, kept by renewals, resumed by token, ended by word, by death, or by time."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.running_kvd import RunningKvd, eventually

from kvd.v1 import kvd_pb2 as pb

from .raw_worker import RawWorker, Stream, at, new_ticket, reason_of

VICTIM = Path(__file__).with_name("raw_worker.py")


def start_victim(run_dir: Path) -> "tuple[subprocess.Popen[str], pb.LeaseState]":
    """A worker process that holds a lease of pool "pool", and that lease."""
    victim = subprocess.Popen([sys.executable, str(VICTIM), str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    return victim, pb.LeaseState(lease_id=int(victim.stdout.readline()), generation=1)


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def refused_stream(worker: RawWorker, opening: pb.ConnectRequest) -> str:
    """The reason why a stream that begins so ends."""
    stream = Stream(worker.channel, opening)
    with pytest.raises(grpc.RpcError) as failure:
        stream.next()
    stream.lose()
    return reason_of(failure.value)


def opening(ticket: bytes, resume_token: bytes = b"") -> pb.ConnectRequest:
    return pb.ConnectRequest(open=pb.OpenSession(ticket=ticket, resume_token=resume_token))


def test_a_killed_workers_blocks_come_back_and_nobody_else_notices(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as other:
        victim, _ = start_victim(shared_kvd.run_dir)
        [mine] = other.lease(32)
        assert other.pool_status().blocks_leased == 12
        kill(victim)
        eventually(lambda: other.pool_status().blocks_leased == 2, "the victim's blocks")
        assert other.pool_status().blocks_quarantined == 0
        assert other.lease_info(mine).state == "active"
        other.release(mine)
        other.drop_pool("pool")


def test_a_worker_that_closes_gives_everything_back(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as other:
        worker = RawWorker(shared_kvd.run_dir)
        worker.create_pool()
        worker.lease(100, 200)
        worker.close()
        assert other.pool_status().blocks_leased == 0
        assert other.status().sessions == 1
        other.drop_pool("pool")


def test_a_ticket_is_good_once(shared_kvd: RunningKvd) -> None:
    ticket = new_ticket(shared_kvd.run_dir)
    with RawWorker(shared_kvd.run_dir) as worker:
        first = Stream(worker.channel, opening(ticket))
        assert first.next().HasField("opened")
        assert refused_stream(worker, opening(ticket)) == "TICKET_INVALID"
        first.send(pb.ConnectRequest(close=pb.CloseSession()))
        assert first.end() == []


@pytest.mark.parametrize("ticket", [b"", b"x", bytes(32), bytes(10_000)])
def test_a_made_up_ticket_is_refused(shared_kvd: RunningKvd, ticket: bytes) -> None:
    with RawWorker(shared_kvd.run_dir) as worker:
        assert refused_stream(worker, opening(ticket)) == "TICKET_INVALID"


def test_a_stream_must_begin_with_open(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as worker:
        for first in (pb.ConnectRequest(), pb.ConnectRequest(renew=pb.RenewSession())):
            assert refused_stream(worker, first) == "INVALID_ARGUMENT"


def test_a_second_open_ends_the_stream_but_not_the_session(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        worker.stream.send(opening(new_ticket(shared_kvd.run_dir)))
        with pytest.raises(grpc.RpcError) as failure:
            worker.stream.next()
        assert reason_of(failure.value) == "INVALID_ARGUMENT"
        assert worker.lease(16) != []
        with RawWorker(shared_kvd.run_dir, resume_token=worker.token) as resumed:
            assert resumed.opened.resumed


def test_a_renewal_is_answered_and_moves_leases_forward(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        [lease] = worker.lease(100)
        worker.renew(at(lease, 77))
        assert worker.stream.next().HasField("renewed")
        assert worker.lease_info(lease).length == 77


def test_a_lost_stream_keeps_its_leases_and_can_be_resumed(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as watcher:
        lost = RawWorker(shared_kvd.run_dir, "lost")
        lost.create_pool()
        [lease] = lost.lease(100)
        lost.vanish()
        sessions = watcher.admin.ListSessions
        eventually(
            lambda: "detached" in [s.state for s in sessions(pb.ListSessionsRequest()).sessions], "detached"
        )
        with RawWorker(shared_kvd.run_dir, resume_token=lost.token) as resumed:
            assert resumed.opened.resumed
            assert resumed.token == lost.token
            assert resumed.lease_info(lease).state == "active"
            assert resumed.extend(lease, 100, 100).lease_id == lease.lease_id


def test_a_session_that_is_not_renewed_expires_and_its_blocks_wait_for_its_word(
    start_kvd: Callable[..., RunningKvd],
) -> None:
    kvd = start_kvd("--session-ttl", "200ms")
    watcher = RawWorker(kvd.run_dir)  # renews not either: administration needs no session
    worker = RawWorker(kvd.run_dir)
    worker.create_pool()
    [lease] = worker.lease(100)
    with pytest.raises(grpc.RpcError) as end:
        worker.stream.next()
    assert reason_of(end.value) == "SESSION_EXPIRED"
    assert watcher.pool_status().blocks_quarantined == 7
    assert watcher.lease_info(lease).state == "expired"
    with pytest.raises(grpc.RpcError) as refusal:
        worker.lease(16)
    assert reason_of(refusal.value) == "SESSION_EXPIRED"
    worker.release(lease)
    assert watcher.pool_status().blocks_free == 64


def test_a_quarantined_block_comes_back_when_its_worker_is_gone(start_kvd: Callable[..., RunningKvd]) -> None:
    kvd = start_kvd("--session-ttl", "200ms")
    watcher = RawWorker(kvd.run_dir)
    victim, _ = start_victim(kvd.run_dir)
    eventually(lambda: watcher.pool_status().blocks_quarantined == 10, "quarantine")
    kill(victim)
    eventually(lambda: watcher.pool_status().blocks_free == 64, "the victim's blocks")


def test_another_process_cannot_resume_or_map_with_a_stolen_token(shared_kvd: RunningKvd) -> None:
    steal = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "import grpc, raw_worker as r\n"
        "run_dir, token = Path(sys.argv[2]), bytes.fromhex(sys.argv[3])\n"
        "thief = r.RawWorker(run_dir)\n"
        "thief.token = token\n"
        "print(thief.map_pool()[0].error.reason)\n"
        "try: r.RawWorker(run_dir, resume_token=token)\n"
        "except grpc.RpcError as error: print(r.reason_of(error))\n"
        "import os; sys.stdout.flush(); os._exit(0)\n"
    )
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        arguments = [str(VICTIM.parent), str(shared_kvd.run_dir), worker.token.hex()]
        thief = subprocess.run(
            [sys.executable, "-c", steal, *arguments], capture_output=True, text=True, check=True
        )
        assert thief.stdout.split() == ["NOT_OWNER", "NOT_OWNER"]
        response, fds = worker.map_pool()
        assert response.map.pool_bytes == os.fstat(fds[0]).st_size
        for fd in fds:
            os.close(fd)


def test_a_revoked_leases_worker_is_told_and_its_blocks_wait_for_its_release(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as worker:
        worker.create_pool()
        [lease] = worker.lease(100)
        request = pb.RevokeLeaseRequest(lease_id=lease.lease_id, cause="maintenance")
        assert worker.admin.RevokeLease(request).quarantined_blocks == 7
        told = worker.stream.until("revoked").revoked
        assert (told.lease_id, told.cause) == (lease.lease_id, "maintenance")
        with pytest.raises(grpc.RpcError) as refusal:
            worker.extend(lease, 100, 1)
        assert reason_of(refusal.value) == "LEASE_REVOKED"
        before = worker.pool_status().blocks_quarantined
        worker.release(lease)
        assert worker.pool_status().blocks_quarantined == before - 7


def test_whoever_holds_blocks_is_told_that_others_wait(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir) as holder, RawWorker(shared_kvd.run_dir) as waiter:
        holder.create_pool("tight", blocks=16)
        [lease] = holder.lease(12 * 16, pool="tight")
        with pytest.raises(grpc.RpcError):
            waiter.lease(10 * 16, pool="tight")
        pressure = holder.stream.until("pressure").pressure
        assert (pressure.pool, pressure.wanted_blocks) == ("tight", 6)
        holder.release(lease)
        holder.drop_pool("tight")


def test_the_daemon_says_that_it_stops(start_kvd: Callable[..., RunningKvd]) -> None:
    kvd = start_kvd()
    worker = RawWorker(kvd.run_dir)
    kvd.process.terminate()
    assert worker.stream.until("draining").HasField("draining")


def test_a_workers_name_cannot_forge_a_line_of_the_log(shared_kvd: RunningKvd) -> None:
    with RawWorker(shared_kvd.run_dir, name="me\nforged\x1b[2J") as worker:
        assert worker.opened.session_id in shared_kvd.log.read_text()
    assert "\nforged" not in shared_kvd.log.read_text()
    assert "\x1b" not in shared_kvd.log.read_text()
