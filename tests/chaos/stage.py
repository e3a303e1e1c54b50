"""What the faults are done to: a kvd, its workers, and a folder that can be filled up."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from tests.client.daemon import Daemon
from tests.running_kvd import RunningKvd, command_of, is_alive, start_kvd

import kvd_client
from kvd.errors import KvdError
from kvd.v1 import kvd_pb2 as pb

from .pattern import SPEC
from .worker import BLOCKS, POOL

HOST_TIER, DISK_TIER = "256KiB", "2MiB"  # 64 and 512 blocks' slots
PIN_BLOCKS = 40  # of all workers together
TTL_S = 6.0  # of a session; short, so that long silences fit into a short run
PATIENCE_S = 60.0  # for a recovery, before it counts as none
LOOK_S = 0.002  # between two looks while a recovery is timed
ASK_S = 3.0  # deadline of one question to the daemon
MAX_LOG_CHARS = 4000  # of each log that is shown when a run fails
DISK_WORKER = "kvd_daemon.kernel.disk_worker"
HERE = Path(__file__).parent


@dataclass(eq=False)
class RunningWorker:
    """A worker's process; `state` is what it last published."""

    number: int
    process: "subprocess.Popen[bytes]"
    state_file: Path

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.state_file.read_text())
        return found


@dataclass
class Stage:
    """One run's kvd and workers."""

    folder: Path
    seed: int
    kvd: RunningKvd = field(init=False)
    workers: list[RunningWorker] = field(default_factory=list)
    _started: int = 0

    def open(self) -> None:
        os.environ["KVD_CHAOS_DIR"] = str(self.folder)
        os.environ["KVD_CHAOS_TTL_S"] = str(TTL_S)
        paths = [str(HERE / "inject"), os.environ.get("PYTHONPATH", "")]
        with _environment("PYTHONPATH", os.pathsep.join(path for path in paths if path)):
            self.kvd = start_kvd(self.folder, *self._options())
        self.kvd.wait_until_ready()
        with kvd_client.connect(self.kvd.run_dir) as client:
            client.pool(POOL, SPEC, BLOCKS)

    def _options(self) -> list[str]:
        """Tiers that a few suspended leases fill, and pins for everybody."""
        config = self.folder / "kvd.toml"
        config.write_text(f'[tenants."*"]\npin_blocks = {PIN_BLOCKS}\n')
        return [
            *("--config", str(config), "--session-ttl", f"{TTL_S}s", "--host-memory", "64MiB"),
            *("--host-tier", HOST_TIER, "--spill-dir", str(self.folder.parent), "--spill-size", DISK_TIER),
        ]

    @property
    def daemon(self) -> Daemon:
        return Daemon(self.kvd)

    def start_worker(self) -> RunningWorker:
        number, self._started = self._started, self._started + 1
        state_file = self.folder / f"worker-{number}.json"
        arguments = [str(self.kvd.run_dir), str(state_file), str(number), str(self.seed * 1000 + number)]
        command = [sys.executable, "-m", "tests.chaos.worker", *arguments]
        with (self.folder / f"worker-{number}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=HERE.parent.parent, stderr=log, stdin=subprocess.DEVNULL)
        worker = RunningWorker(number, process, state_file)
        self.workers.append(worker)
        self.recovered_after(lambda: state_file.exists() or self._ended(worker), f"worker {number}")
        return worker

    # Looking.

    def status(self) -> pb.GetStatusResponse:
        with self.daemon.admin() as admin:
            return admin.GetStatus(pb.GetStatusRequest(), timeout=ASK_S)

    def session_pids(self) -> set[int]:
        with self.daemon.admin() as admin:
            listed = admin.ListSessions(pb.ListSessionsRequest(page_size=1000), timeout=ASK_S)
        return {session.pid for session in listed.sessions}

    def table_of(self, lease_id: int) -> tuple[str, list[int]]:
        """A lease's state and block table as the daemon knows them; "unknown" if it does not."""
        with self.daemon.admin() as admin:
            try:
                found = admin.GetLease(pb.GetLeaseRequest(lease_id=lease_id), timeout=ASK_S)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                return "unknown", []
        return found.lease.state, [run.start + i for run in found.table for i in range(run.count)]

    def lease_round_trip(self) -> bool:
        """Whether a newcomer gets a lease."""
        try:
            with kvd_client.connect(self.kvd.run_dir, timeout=ASK_S) as client:
                client.pool(POOL, SPEC, BLOCKS).lease().release()
        except KvdError:
            return False
        return True

    def recovered_after(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until it holds. Raises AssertionError after PATIENCE_S."""
        began = time.monotonic()
        while not _holds(condition):
            assert time.monotonic() < began + PATIENCE_S, f"no recovery within {PATIENCE_S:g} s: {what}"
            time.sleep(LOOK_S)
        return time.monotonic() - began

    def disk_worker(self) -> int:
        """Its pid, 0 if there is none just now."""
        children = psutil.Process(self.kvd.daemon_pid()).children()
        return next((one.pid for one in children if DISK_WORKER in command_of(one)), 0)

    # Pausing.

    def pause(self) -> list[dict[str, Any]]:
        """All workers check their leases and wait; what they hold."""
        for worker in self.workers:
            worker.state_file.unlink(missing_ok=True)
            worker.process.send_signal(signal.SIGUSR1)
        for worker in self.workers:
            self.recovered_after(
                lambda one=worker: one.state_file.exists() or self._ended(one),  # type: ignore[misc]
                f"an answer of worker {worker.number}",
            )
        return [worker.state() for worker in self.workers]

    def tidy(self, held: set[int]) -> None:
        """What outlives those who made it: pins, and what a worker published and was killed before it adopted
        it again. `held` are leases that workers know of."""
        for pin in self.daemon.pins(POOL):
            self.daemon.drop_pin(pin.pin_id)
        with self.daemon.admin() as admin:
            listed = admin.ListLeases(pb.ListLeasesRequest(page_size=1000), timeout=ASK_S)
        for lease in listed.leases:
            if lease.state == "shelved" and lease.lease_id not in held:
                self.daemon.revoke(lease.lease_id, "its publisher is dead")

    def resume(self) -> None:
        for worker in self.workers:
            worker.process.send_signal(signal.SIGUSR2)

    def _ended(self, worker: RunningWorker) -> bool:
        if worker.process.poll() is not None:
            log = (self.folder / f"worker-{worker.number}.log").read_text()
            raise AssertionError(f"worker {worker.number} ended by itself:\n{log}")
        return False

    def supervisor_costs(self) -> tuple[int, int]:
        """Open descriptors, resident bytes."""
        process = psutil.Process(self.kvd.process.pid)
        return process.num_fds(), process.memory_info().rss

    def last_words(self) -> str:
        """Of kvd, and of workers that ended by themselves."""
        said = [self.kvd.log.read_text()[-MAX_LOG_CHARS:]]
        for worker in self.workers:
            if worker.process.poll() is not None:
                log = self.folder / f"worker-{worker.number}.log"
                said.append(f"worker {worker.number}:\n{log.read_text()[-MAX_LOG_CHARS:]}")
        return "\n".join(said)

    def close(self) -> None:
        """Whatever state all of it is in."""
        for worker in self.workers:
            if is_alive(worker.process.pid):
                worker.process.kill()
            worker.process.wait()
        self.kvd.kill()


def _holds(condition: Callable[[], bool]) -> bool:
    """A daemon that is not there does not hold anything."""
    try:
        return condition()
    except (grpc.RpcError, KvdError, psutil.NoSuchProcess):
        return False


@contextlib.contextmanager
def _environment(name: str, value: str) -> "contextlib.Iterator[None]":  # type: ignore[name-defined]
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
