"""A running kvd as its operator sees it, freezes it and kills it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from tests.running_kvd import PATIENCE_S, RunningKvd, eventually, is_alive

from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc as rpc


class Daemon:
    """One of the device daemons of a kvd."""

    def __init__(self, kvd: RunningKvd, device: str = "host0") -> None:
        self._kvd = kvd
        self._device = device

    @property
    def run_dir(self) -> Path:
        return self._kvd.run_dir

    @contextmanager
    def admin(self) -> Iterator[rpc.AdminServiceStub]:
        with grpc.insecure_channel(f"unix:{self.run_dir}/{self._device}/grpc.sock") as channel:
            yield rpc.AdminServiceStub(channel)

    def status(self) -> pb.GetStatusResponse:
        with self.admin() as admin:
            return admin.GetStatus(pb.GetStatusRequest(), timeout=PATIENCE_S)

    def pool_status(self, name: str) -> pb.PoolStatus:
        return next(pool for pool in self.status().pools if pool.pool.name == name)

    def lease_info(self, lease_id: int) -> pb.LeaseInfo:
        with self.admin() as admin:
            return admin.GetLease(pb.GetLeaseRequest(lease_id=lease_id), timeout=PATIENCE_S).lease

    def session_names(self) -> list[str]:
        """What workers call themselves."""
        with self.admin() as admin:
            listed = admin.ListSessions(pb.ListSessionsRequest(page_size=1000), timeout=PATIENCE_S)
        return [session.client_name for session in listed.sessions]

    def revoke(self, lease_id: int, cause: str) -> None:
        with self.admin() as admin:
            admin.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease_id, cause=cause), timeout=PATIENCE_S)

    def pins(self, pool: str) -> list[pb.PinInfo]:
        """Matches and pins there."""
        with self.admin() as admin:
            return list(admin.ListPins(pb.ListPinsRequest(pool=pool), timeout=PATIENCE_S).pins)

    def drop_pin(self, pin_id: int) -> None:
        with self.admin() as admin:
            admin.DropPin(pb.DropPinRequest(pin_id=pin_id), timeout=PATIENCE_S)

    def drop_pool(self, name: str) -> None:
        with self.admin() as admin:
            admin.DropPool(pb.DropPoolRequest(name=name), timeout=PATIENCE_S)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It answers nothing meanwhile."""
        pid = self._kvd.daemon_pid(self._device)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """The supervisor starts another one."""
        os.kill(self._kvd.daemon_pid(self._device), signal.SIGKILL)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """It ends in good order, and nobody starts another one meanwhile."""
        os.kill(self._kvd.process.pid, signal.SIGSTOP)
        try:
            pid = self._kvd.daemon_pid(self._device)
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: not is_alive(pid), "the daemon to end")
            yield
        finally:
            os.kill(self._kvd.process.pid, signal.SIGCONT)
