"""A daemon and an echo server for the length of a benchmark, and a session without the client's comfort."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import grpc
from grpc_health.v1 import health_pb2_grpc
from rpc_bench.echo import METHOD

from kvd.convert import spec_to_proto
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc as rpc
from kvd_client._attach import ask_ticket
from kvd_client._endpoint import Endpoint

BLOCK_SIZE = 16  # tokens
TINY = KVSpec(1, 1, 1, 1, dtype="fp8", block_size=BLOCK_SIZE)  # 32 bytes a block: a million fit anywhere
HOST_MEMORY = "1GiB"
SESSION_TTL = "1h"  # sessions here never renew
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.02
CALL_TIMEOUT_S = 60.0
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20))


@contextlib.contextmanager
def running_kvd(folder: Path, *options: str) -> Iterator[Endpoint]:
    """A kvd of one host device, with more of its options."""
    bin_dir = Path(sys.executable).parent
    command = [str(bin_dir / "kvd"), "--host-memory", HOST_MEMORY, "--session-ttl", SESSION_TTL, *options]
    endpoint = Endpoint(folder / "host0")
    with _process([*command, "--run-dir", str(folder), "--log-level", "warning"]):
        _wait_for(endpoint.directory / "grpc.sock")
        with grpc.insecure_channel(endpoint.grpc_target) as channel:
            _wait_until_serving(rpc.AdminServiceStub(channel))
        yield endpoint


@contextlib.contextmanager
def running_echo(folder: Path) -> Iterator[tuple["grpc.UnaryUnaryMultiCallable[bytes, bytes]", int]]:
    """Its stub and its process id."""
    socket = folder / "echo.sock"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with _process([sys.executable, "-m", "rpc_bench.echo", str(socket)], environ) as pid:
        _wait_for(socket)
        with grpc.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(timeout=START_TIMEOUT_S)
            yield channel.unary_unary(METHOD, bytes, bytes), pid


@contextlib.contextmanager
def _process(command: Sequence[str], environ: dict[str, str] | None = None) -> Iterator[int]:
    process = subprocess.Popen(command, env=environ)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {START_TIMEOUT_S:g} s")
        time.sleep(LOOK_EVERY_S)


def _wait_until_serving(admin: "rpc.AdminServiceStub") -> None:
    """Until its kernel worker is warm too: that would take a core from what is measured."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while admin.GetStatus(pb.GetStatusRequest(), wait_for_ready=True).health != "serving":
        if time.monotonic() > deadline:
            raise TimeoutError(f"kvd does not serve within {START_TIMEOUT_S:g} s")
        time.sleep(LOOK_EVERY_S)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class RawSession:
    """A session spoken with bare stubs, so that only the wire and the daemon are measured."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._channel = grpc.insecure_channel(endpoint.grpc_target, options=CHANNEL_OPTIONS)
        self.leases = rpc.LeaseServiceStub(self._channel)
        self.admin = rpc.AdminServiceStub(self._channel)
        self.health = health_pb2_grpc.HealthStub(self._channel)
        self._to_daemon: SimpleQueue[pb.ConnectRequest | None] = SimpleQueue()
        ticket = ask_ticket(endpoint.attach_path, CALL_TIMEOUT_S)
        self._to_daemon.put(pb.ConnectRequest(open=pb.OpenSession(ticket=ticket, client_name="bench")))
        self._stream = rpc.SessionServiceStub(self._channel).Connect(iter(self._to_daemon.get, None))
        self.token = next(iter(self._stream)).opened.session_token
        self._ids = map(str, itertools.count())

    def create_pool(self, name: str, blocks: int) -> None:
        request = pb.AdminCreatePoolRequest(name=name, spec=spec_to_proto(TINY), blocks=blocks)
        self.admin.AdminCreatePool(request, timeout=CALL_TIMEOUT_S)

    def daemon_pid(self) -> int:
        return self.admin.GetStatus(pb.GetStatusRequest(), timeout=CALL_TIMEOUT_S).pid

    def lease_request(self, pool: str, block_counts: Sequence[int]) -> pb.LeaseRequest:
        items = [pb.LeaseItem(tokens=count * BLOCK_SIZE) for count in block_counts]
        return pb.LeaseRequest(session_token=self.token, request_id=next(self._ids), pool=pool, items=items)

    def extend_request(self, lease: pb.LeaseState, tokens: int) -> pb.ExtendRequest:
        """As if the lease's table were full of tokens."""
        length = sum(run.count for run in lease.appended) * BLOCK_SIZE
        progress = pb.LeaseProgress(
            lease_id=lease.lease_id, generation=lease.generation, length=length, position=length
        )
        item = pb.ExtendItem(progress=progress, tokens=tokens)
        return pb.ExtendRequest(session_token=self.token, request_id=next(self._ids), items=[item])

    def release_request(self, leases: Sequence[pb.LeaseState]) -> pb.ReleaseRequest:
        ids = [lease.lease_id for lease in leases]
        return pb.ReleaseRequest(session_token=self.token, request_id=next(self._ids), lease_ids=ids)

    def close(self) -> None:
        self._to_daemon.put(pb.ConnectRequest(close=pb.CloseSession()))
        self._to_daemon.put(None)
        for _ in self._stream:  # until the daemon has ended it
            pass
        self._channel.close()
