"""Workers of another user: who may attach at all, as whose tenant, and to which pools."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from tests.daemon.raw_worker import SPEC, RawWorker, Stream, at, fresh_id
from tests.running_kvd import RunningKvd, eventually, running_kvd

from kvd.v1 import attach_pb2 as ab
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc

from .calls import reason_of
from .conftest import Ruled
from .peers import IS_ROOT, OTHER_GID, OTHER_UID, OtherProcess, other_process
from .test_matrix import rule, unix_channel

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class OtherWorker:
    """A session of the other process; its calls are made here, with its token."""

    process: OtherProcess
    channel: grpc.Channel
    stream: Stream
    opened: pb.SessionOpened

    def create_pool(self, name: str) -> str:
        """ "done", or the reason why not."""
        request = pb.CreatePoolRequest(
            session_token=self.opened.session_token, request_id=fresh_id(), name=name, spec=SPEC, blocks=8
        )
        return outcome(kvd_pb2_grpc.PoolServiceStub(self.channel).CreatePool, request)

    def lease(self, pool: str) -> str:
        request = pb.LeaseRequest(
            session_token=self.opened.session_token,
            request_id=fresh_id(),
            pool=pool,
            items=[pb.LeaseItem(tokens=16)],
        )
        return outcome(kvd_pb2_grpc.LeaseServiceStub(self.channel).Lease, request)

    def asks(self, call: str, request: Message) -> str:
        """What ShareService answers this worker: "done", or the reason why not."""
        request.session_token, request.request_id = self.opened.session_token, fresh_id()
        return outcome(getattr(kvd_pb2_grpc.ShareServiceStub(self.channel), call), request)

    def map(self, pool: str) -> str:
        asked = ab.MapRequest(session_token=self.opened.session_token, pool=pool)
        return mapped(self.process, asked)


def outcome(method, request) -> str:
    try:
        method(request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return reason_of(error)
    return "done"


def mapped(process: OtherProcess, asked: ab.MapRequest) -> str:
    response, fds = process.ask(ab.AttachRequest(map=asked))
    for fd in fds:
        os.close(fd)
    assert bool(fds) == response.HasField("map")
    return response.error.reason or "done"


@contextmanager
def other_worker(run_dir: Path) -> Iterator[OtherWorker]:
    with ExitStack() as stack:
        process = stack.enter_context(other_process(run_dir))
        channel = stack.enter_context(unix_channel(run_dir))
        stream = Stream(channel, pb.ConnectRequest(open=pb.OpenSession(ticket=process.ticket())))
        yield OtherWorker(process, channel, stream, stream.next().opened)
        stream.lose()


def tenant_of(channel: grpc.Channel, opening: pb.OpenSession) -> str:
    """Of the session it opens, or the reason why it opens none."""
    stream = Stream(channel, pb.ConnectRequest(open=opening))
    try:
        return stream.next().opened.tenant
    except grpc.RpcError as error:
        return reason_of(error)
    finally:
        stream.lose()


POOLS = '[pools.ours]\ntenants = ["us"]\n[pools.both]\ntenants = ["us", "theirs"]\n'


@pytest.fixture(scope="module")
def tenants_kvd(open_folder: Path) -> Iterator[RunningKvd]:
    config = open_folder / "kvd.toml"
    config.write_text(rule("worker") + POOLS)
    arguments = ("--host-memory", "64MiB", "--config", str(config), "--socket-group", str(OTHER_GID))
    with running_kvd(open_folder, *arguments) as kvd:
        yield kvd


def test_a_worker_leases_and_maps_as_the_tenant_of_its_rule(tenants_kvd: RunningKvd) -> None:
    with other_worker(tenants_kvd.run_dir) as worker:
        assert worker.opened.tenant == "theirs"
        for pool in ("both", "anybodys"):
            done = [worker.create_pool(pool), worker.map(pool), worker.lease(pool)]
            assert done == ["done", "done", "done"], pool


def test_a_pool_of_other_tenants_can_be_neither_made_nor_mapped_nor_leased(tenants_kvd: RunningKvd) -> None:
    with other_worker(tenants_kvd.run_dir) as worker:
        tried = [worker.create_pool("ours"), worker.map("ours"), worker.lease("ours")]
        assert tried == ["PERMISSION_DENIED"] * 3


def test_another_tenant_finds_neither_prefixes_nor_pins_nor_published_leases(tenants_kvd: RunningKvd) -> None:
    """Though the pool is everybody's, and it knows hashes, ids and keys."""
    hashes = [bytes([depth]) * 32 for depth in range(2)]
    with RawWorker(tenants_kvd.run_dir) as owner, other_worker(tenants_kvd.run_dir) as stranger:
        owner.create_pool("commons", 16)
        sealed, published = owner.lease(32, 32, pool="commons")
        owner.seal(sealed, hashes)
        pin_id = owner.match(hashes, "commons").pin_id
        publish = pb.PublishRequest(progress=at(published, 32), key="key")
        publish.session_token, publish.request_id = owner.token, fresh_id()
        owner.shares.Publish(publish, timeout=TIMEOUT_S)
        wanted = {"pool": "commons", "prefix_hashes": hashes}
        match = pb.MatchRequest(session_token=stranger.opened.session_token, request_id=fresh_id(), **wanted)
        assert kvd_pb2_grpc.ShareServiceStub(stranger.channel).Match(match, timeout=TIMEOUT_S).found == 0
        assert stranger.asks("Pin", pb.PinRequest(**wanted)) == "PREFIX_NOT_FOUND"
        assert stranger.asks("Unpin", pb.UnpinRequest(pin_id=pin_id)) == "PIN_NOT_FOUND"
        assert stranger.asks("Adopt", pb.AdoptRequest(pool="commons", key="key")) == "OFFER_NOT_FOUND"
        assert stranger.asks("Fork", pb.ForkRequest(progress=at(sealed, 32), count=1)) == "NOT_OWNER"
        transfer = pb.PublishRequest(progress=at(sealed, 32), to_session=stranger.opened.session_id)
        transfer.session_token, transfer.request_id = owner.token, fresh_id()
        assert outcome(owner.shares.Publish, transfer) == "RECEIVER_NOT_FOUND"
        refused = stranger.asks("Adopt", pb.AdoptRequest(pool="ours", key="key"))
        assert refused == "PERMISSION_DENIED"


def test_a_token_that_another_process_stole_maps_nothing(tenants_kvd: RunningKvd) -> None:
    with other_worker(tenants_kvd.run_dir) as worker, other_process(tenants_kvd.run_dir) as thief:
        worker.create_pool("anybodys")
        stolen = ab.MapRequest(session_token=worker.opened.session_token, pool="anybodys")
        assert mapped(thief, stolen) == "NOT_OWNER"


def test_sockets_of_a_group_are_for_the_group_only(tenants_kvd: RunningKvd) -> None:
    found = {
        path.name: path.stat() for path in (tenants_kvd.run_dir, *tenants_kvd.run_dir.glob("host0/*.sock"))
    }
    modes = {name: stat.st_mode & 0o777 for name, stat in found.items()}
    assert modes == {"run": 0o750, "grpc.sock": 0o660, "attach.sock": 0o660}
    assert {stat.st_gid for stat in found.values()} == {OTHER_GID}


def test_who_has_no_rule_is_refused_and_whom_no_group_lets_in_does_not_even_ask(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(rule())
    with other_process(kvd.run_dir) as refused:
        assert refused.refusal() == "PERMISSION_DENIED"
    if IS_ROOT:  # else there is no user that file permissions would keep out
        with other_process(kvd.run_dir, OTHER_GID + 1) as outside, pytest.raises(PermissionError):
            outside.ticket()


def test_a_group_rule_counts_for_those_who_are_in_the_group_besides_their_own(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(f'[[access.rules]]\ngid = {OTHER_GID}\nroles = ["read-only"]\n')
    with other_process(kvd.run_dir, OTHER_GID + 1, [OTHER_GID + 2, OTHER_GID]) as other:
        assert len(other.ticket()) == 32


def test_a_group_rule_counts_for_its_members(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(f'[[access.rules]]\ngid = {OTHER_GID}\nroles = ["worker"]\n')
    with other_worker(kvd.run_dir) as worker:
        assert worker.opened.tenant == f"uid:{OTHER_UID}"


def test_a_rule_that_is_withdrawn_ends_the_sessions_it_let_in(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(rule("worker"))
    with other_worker(kvd.run_dir) as worker:
        assert worker.create_pool("p") == "done"
        (kvd.run_dir.parent / "kvd.toml").write_text(rule("read-only"))
        os.kill(kvd.process.pid, signal.SIGHUP)
        with pytest.raises(grpc.RpcError) as ended:
            worker.stream.until("nothing that comes")
        assert reason_of(ended.value) == "PERMISSION_DENIED"
        assert worker.map("p") == "PERMISSION_DENIED"
        ticket = worker.process.ticket()
        again = Stream(worker.channel, pb.ConnectRequest(open=pb.OpenSession(ticket=ticket)))
        with pytest.raises(grpc.RpcError) as refused:
            again.next()
        assert reason_of(refused.value) == "PERMISSION_DENIED"
        again.lose()


def test_a_worker_that_is_another_tenant_by_now_opens_another_session(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(rule("worker"))
    with other_worker(kvd.run_dir) as worker:
        (kvd.run_dir.parent / "kvd.toml").write_text(rule("worker", tenant="others"))
        os.kill(kvd.process.pid, signal.SIGHUP)
        with pytest.raises(grpc.RpcError) as ended:
            worker.stream.until("nothing that comes")
        assert reason_of(ended.value) == "SESSION_NOT_FOUND"
        for resume_token, answer in ((worker.opened.session_token, "SESSION_NOT_FOUND"), (b"", "others")):
            opening = pb.OpenSession(ticket=worker.process.ticket(), resume_token=resume_token)
            assert tenant_of(worker.channel, opening) == answer


def test_limits_that_are_lowered_count_at_once(ruled_kvd: Ruled) -> None:
    kvd = ruled_kvd(rule("worker"))
    with other_worker(kvd.run_dir) as worker:
        assert worker.create_pool("p") == "done"
        assert worker.lease("p") == "done"
        (kvd.run_dir.parent / "kvd.toml").write_text(rule("worker") + "[limits]\nleases_per_session = 1\n")
        os.kill(kvd.process.pid, signal.SIGHUP)
        eventually(lambda: worker.lease("p") == "LIMIT_EXCEEDED", "the new limit")
