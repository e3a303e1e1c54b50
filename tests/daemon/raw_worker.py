"""A worker made of bare stubs and sockets: what goes over the wire, and nothing that makes it comfortable.

As a script, `python raw_worker.py RUN_DIR`: opens a session, makes pool "pool", leases 160 tokens there,
prints the lease's id and waits to be killed.
"""

import contextlib
import queue
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo, QuotaFailure, RetryInfo
from grpc_status import rpc_status

from kvd.v1 import attach_pb2 as ab
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc

TIMEOUT_S = 60.0  # of every call; nothing takes that long unless it hangs
SPEC = pb.KVSpec(
    layers=2,
    kv_heads=2,
    head_dim_k=8,
    head_dim_v=8,
    dtype="float32",
    block_size=16,
    layout="block_outermost",
    backend="generic",
)


def error_info(error: grpc.RpcError) -> ErrorInfo:
    """The one ErrorInfo a failed call must carry."""
    return detail(error, ErrorInfo())


def detail(error: grpc.RpcError, kind: Any) -> Any:
    """The status detail of that kind."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error}"
    [packed] = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    packed.Unpack(kind)
    return kind


def reason_of(error: grpc.RpcError) -> str:
    info = error_info(error)
    assert info.domain == "kvd"
    return info.reason


def retry_info(error: grpc.RpcError) -> RetryInfo:
    return detail(error, RetryInfo())


def quota_failure(error: grpc.RpcError) -> QuotaFailure:
    return detail(error, QuotaFailure())


def attach_socket(run_dir: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(run_dir / "host0/attach.sock"))
    return connection


def ask(connection: socket.socket, request: ab.AttachRequest) -> tuple[ab.AttachResponse, list[int]]:
    """One packet there, one packet back, and the descriptors that came with it."""
    connection.send(request.SerializeToString())
    packet, fds, _, _ = socket.recv_fds(connection, 1 << 16, 8)
    return ab.AttachResponse.FromString(packet), fds


def new_ticket(run_dir: Path) -> bytes:
    with attach_socket(run_dir) as connection:
        response, _ = ask(connection, ab.AttachRequest(ticket=ab.TicketRequest()))
        return response.ticket.ticket


class Stream:
    """One Connect call: what is put is sent, what comes is iterated."""

    def __init__(self, channel: grpc.Channel, opening: pb.ConnectRequest) -> None:
        self._requests: queue.SimpleQueue[pb.ConnectRequest | None] = queue.SimpleQueue()
        self._requests.put(opening)
        stub = kvd_pb2_grpc.SessionServiceStub(channel)
        self.call = stub.Connect(iter(self._requests.get, None))

    def send(self, request: pb.ConnectRequest) -> None:
        self._requests.put(request)

    def next(self) -> pb.ConnectResponse:
        return next(self.call)

    def until(self, event: str) -> pb.ConnectResponse:
        """The next event of that kind; others are passed over."""
        return next(response for response in self.call if response.WhichOneof("event") == event)

    def lose(self) -> None:
        """As when the connection breaks."""
        self.call.cancel()
        self._requests.put(None)

    def end(self) -> list[pb.ConnectResponse]:
        """Close our side; what still comes."""
        self._requests.put(None)
        return list(self.call)


class RawWorker:
    """A session on `run_dir`'s host0."""

    def __init__(self, run_dir: Path, name: str = "raw", resume_token: bytes = b"") -> None:
        self.run_dir = run_dir
        self.channel = grpc.insecure_channel(
            f"unix:{run_dir}/host0/grpc.sock", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.pools = kvd_pb2_grpc.PoolServiceStub(self.channel)
        self.leases = kvd_pb2_grpc.LeaseServiceStub(self.channel)
        self.shares = kvd_pb2_grpc.ShareServiceStub(self.channel)
        self.admin = kvd_pb2_grpc.AdminServiceStub(self.channel)
        opening = pb.OpenSession(ticket=new_ticket(run_dir), client_name=name, resume_token=resume_token)
        self.stream = Stream(self.channel, pb.ConnectRequest(open=opening))
        self.opened = self.stream.next().opened
        self.token = self.opened.session_token

    def __enter__(self) -> "RawWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session by the worker's own word."""
        self.stream.send(pb.ConnectRequest(close=pb.CloseSession()))
        with contextlib.suppress(grpc.RpcError):  # it may be over already
            self.stream.end()
        self.channel.close()

    def vanish(self) -> None:
        """Lose the connection without a word."""
        self.stream.lose()
        self.channel.close()

    def renew(self, *progress: pb.LeaseProgress) -> None:
        self.stream.send(pb.ConnectRequest(renew=pb.RenewSession(progress=progress)))

    def create_pool(self, name: str = "pool", blocks: int = 64, spec: pb.KVSpec = SPEC) -> pb.Pool:
        request = pb.CreatePoolRequest(
            session_token=self.token, request_id=fresh_id(), name=name, spec=spec, blocks=blocks
        )
        return self.pools.CreatePool(request, timeout=TIMEOUT_S).pool

    def drop_pool(self, name: str) -> None:
        self.admin.DropPool(pb.DropPoolRequest(name=name), timeout=TIMEOUT_S)

    def lease_request(self, *tokens: int, pool: str = "pool", **fields: Any) -> pb.LeaseRequest:
        items = [pb.LeaseItem(tokens=count) for count in tokens]
        return pb.LeaseRequest(
            session_token=self.token, request_id=fresh_id(), pool=pool, items=items, **fields
        )

    def lease(self, *tokens: int, pool: str = "pool", **fields: Any) -> list[pb.LeaseState]:
        request = self.lease_request(*tokens, pool=pool, **fields)
        return list(self.leases.Lease(request, timeout=TIMEOUT_S).leases)

    def extend(self, lease: pb.LeaseState, length: int, tokens: int) -> pb.LeaseState:
        item = pb.ExtendItem(progress=at(lease, length), tokens=tokens)
        request = pb.ExtendRequest(session_token=self.token, request_id=fresh_id(), items=[item])
        [state] = self.leases.Extend(request, timeout=TIMEOUT_S).leases
        return state

    def release(self, *leases: pb.LeaseState) -> None:
        ids = [lease.lease_id for lease in leases]
        request = pb.ReleaseRequest(session_token=self.token, request_id=fresh_id(), lease_ids=ids)
        self.leases.Release(request, timeout=TIMEOUT_S)

    def release_blocks(self, lease: pb.LeaseState, length: int, block_ids: list[int]) -> pb.LeaseState:
        request = pb.ReleaseBlocksRequest(
            session_token=self.token,
            request_id=fresh_id(),
            progress=at(lease, length),
            block_ids=block_ids,
        )
        return self.leases.ReleaseBlocks(request, timeout=TIMEOUT_S).lease

    def seal(self, lease: pb.LeaseState, hashes: list[bytes]) -> pb.LeaseState:
        """As many blocks as there are hashes are full."""
        request = pb.SealRequest(
            session_token=self.token,
            request_id=fresh_id(),
            progress=at(lease, len(hashes) * SPEC.block_size),
            prefix_hashes=hashes,
        )
        return self.leases.Seal(request, timeout=TIMEOUT_S).lease

    def match(self, hashes: list[bytes], pool: str = "pool", seconds: int = 60) -> pb.MatchResponse:
        request = pb.MatchRequest(
            session_token=self.token, request_id=fresh_id(), pool=pool, prefix_hashes=hashes
        )
        request.ttl.FromSeconds(seconds)
        return self.shares.Match(request, timeout=TIMEOUT_S)

    def compress_request(self, lease: pb.LeaseState, length: int, policy: pb.Policy) -> pb.CompressRequest:
        return pb.CompressRequest(
            session_token=self.token, request_id=fresh_id(), progress=at(lease, length), policy=policy
        )

    def status(self) -> pb.GetStatusResponse:
        return self.admin.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)

    def pool_status(self, pool: str = "pool") -> pb.PoolStatus:
        [status] = [status for status in self.status().pools if status.pool.name == pool]
        return status

    def lease_info(self, lease: pb.LeaseState) -> pb.LeaseInfo:
        return self.admin.GetLease(pb.GetLeaseRequest(lease_id=lease.lease_id), timeout=TIMEOUT_S).lease

    def map_pool(self, pool: str = "pool") -> tuple[ab.AttachResponse, list[int]]:
        with attach_socket(self.run_dir) as connection:
            request = ab.MapRequest(session_token=self.token, pool=pool)
            return ask(connection, ab.AttachRequest(map=request))


def fresh_id() -> str:
    return uuid.uuid4().hex


def at(lease: pb.LeaseState, length: int) -> pb.LeaseProgress:
    """The worker has written `length` tokens of a lease that never was compressed."""
    return pb.LeaseProgress(
        lease_id=lease.lease_id, generation=lease.generation, length=length, position=length
    )


def block_ids(lease: pb.LeaseState) -> list[int]:
    """Of a fresh lease."""
    return [run.start + offset for run in lease.appended for offset in range(run.count)]


def wait_to_be_killed(run_dir: Path) -> None:
    worker = RawWorker(run_dir, "victim")
    worker.create_pool()
    [lease] = worker.lease(160)
    print(lease.lease_id, flush=True)
    _drain(iter(worker.stream.call))


def _drain(events: Iterator[pb.ConnectResponse]) -> None:
    for _ in events:
        pass


if __name__ == "__main__":
    wait_to_be_killed(Path(sys.argv[1]))
