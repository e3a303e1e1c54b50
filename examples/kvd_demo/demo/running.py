"""The demo's processes: a kvd of its own, and workers that speak in lines of JSON."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc as rpc
from kvd_demo.demo.pool import HOST_MEMORY, POOL

STOP_TIMEOUT_S = 10  # seconds for a process that was asked to end; then it is killed
STATUS_TIMEOUT_S = 5  # seconds for a look at the daemon
REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = os.pathsep.join(str(REPOSITORY / folder) for folder in ("examples", "benchmarks"))

Event = dict[str, Any]


class DemoError(RuntimeError):
    """A process of the demo ended too early; the text has its last words."""


class Kvd(AbstractContextManager["Kvd"]):
    """`kvd --host-memory ...` in a run dir under /tmp, and an operator's view of it."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvd-demo-")
        self.run_dir = Path(self.folder.name)
        self._log = self.run_dir / "kvd.log"
        self.command = ["kvd", "--host-memory", HOST_MEMORY, "--run-dir", str(self.run_dir)]
        started = time.monotonic()
        self._process = _start([str(Path(sys.executable).with_name("kvd")), *self.command[1:]], self._log)
        assert self._process.stdout is not None
        self.ready_line = self._process.stdout.readline().strip()
        if not self.ready_line:
            raise DemoError(f"kvd did not start:\n{self._log.read_text()[-2000:]}")
        self.start_seconds = time.monotonic() - started
        self._channel = grpc.insecure_channel(f"unix:{self.run_dir}/host0/grpc.sock")
        self._admin = rpc.AdminServiceStub(self._channel)

    def pool(self) -> pb.PoolStatus:
        """The demo's pool as operators see it."""
        status = self._admin.GetStatus(pb.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
        return next(pool for pool in status.pools if pool.pool.name == POOL)

    def owners(self) -> dict[int, str]:
        """Which worker holds each leased block."""
        sessions = self._admin.ListSessions(pb.ListSessionsRequest(), timeout=STATUS_TIMEOUT_S).sessions
        names = {session.session_id: session.client_name for session in sessions}
        leases = self._admin.ListLeases(pb.ListLeasesRequest(page_size=1000), timeout=STATUS_TIMEOUT_S).leases
        owners: dict[int, str] = {}
        for lease in leases:
            for run in self._table(lease.lease_id):
                owner = names.get(lease.session_id, "")
                owners |= dict.fromkeys(range(run.start, run.start + run.count), owner)
        return owners

    def _table(self, lease_id: int) -> Sequence[pb.BlockRun]:
        """None if the lease has ended since it was listed: scratch leases come and go."""
        try:
            return self._admin.GetLease(pb.GetLeaseRequest(lease_id=lease_id), timeout=STATUS_TIMEOUT_S).table
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return ()
            raise

    def kvctl(self, *arguments: str, columns: int) -> str:
        """What `kvctl` prints about this kvd."""
        command = [str(Path(sys.executable).with_name("kvctl")), *arguments]
        environment = os.environ | {"KVD_RUN_DIR": str(self.run_dir), "COLUMNS": str(columns)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        _stop(self._process)
        self.folder.cleanup()


class Worker(AbstractContextManager["Worker"]):
    """`python -m kvd_demo.demo.MODULE`, a process of its own."""

    def __init__(self, kvd: Kvd, module: str, *arguments: str) -> None:
        self._log = kvd.run_dir / f"{'-'.join((module, *arguments[:1])).replace('/', '_')}.log"
        environment = {"KVD_RUN_DIR": str(kvd.run_dir), "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", f"kvd_demo.demo.{module}", *arguments]
        self._process = _start(command, self._log, environment)
        self.pid = self._process.pid

    def events(self, until: str | None = None) -> Iterator[Event]:
        """What it tells, up to the event `until`, or until it ends. Raises DemoError if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: Event = json.loads(line)
            yield event
            if event["event"] == until:
                return
        if self._process.wait() != 0 or until is not None:
            raise DemoError(f"a worker failed:\n{self._log.read_text()[-2000:]}")

    def order(self, word: str, until: str | None) -> Iterator[Event]:
        """Give it an order and hear what it tells, as `events`."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        yield from self.events(until)

    def kill(self) -> None:
        """SIGKILL: it cannot say goodbye."""
        os.kill(self.pid, signal.SIGKILL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _stop(self._process)


def together(*workers: Worker) -> Iterator[Event]:
    """Events of several workers as they come, until all have ended."""
    arrived: queue.Queue[Event | DemoError | None] = queue.Queue()

    def listen(worker: Worker) -> None:
        try:
            for event in worker.events():
                arrived.put(event)
        except DemoError as error:
            arrived.put(error)
        arrived.put(None)

    for worker in workers:
        threading.Thread(target=listen, args=(worker,), daemon=True).start()
    ended = 0
    while ended < len(workers):
        event = arrived.get()
        if isinstance(event, DemoError):
            raise event
        if event is None:
            ended += 1
        else:
            yield event


def _start(
    command: list[str], log: Path, environment: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    """In a session of its own, so that a Ctrl-C reaches the demo alone, which then stops everything."""
    with log.open("a") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
