"""An engine with its gRPC server and its probes, whose kernel workers hang as a test wants it."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon.engine_room import running_engine

from kvd.policy import Dense
from kvd_daemon.core import LeaseWish, Progress
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.health import HealthState
from kvd_daemon.engine.sessions import OpenSession
from kvd_daemon.kernel.link import WorkerCommand
from kvd_daemon.rpc.probe import LeaseProbe
from kvd_daemon.rpc.server import Server

WEDGING_WORKER = Path(__file__).with_name("wedging_worker.py")
PATIENCE_S = 60.0  # before a test gives up; nothing takes that long unless it hangs


@dataclass(frozen=True)
class WedgingCommand(WorkerCommand):
    """Starts workers that hang once, see wedging_worker.py."""

    how: str = field(kw_only=True)
    over: str = field(kw_only=True)
    flag: Path = field(kw_only=True)

    def start(self, worker_end: socket.socket) -> "subprocess.Popen[bytes]":
        fd = worker_end.fileno()
        told = [str(fd), str(os.getpid()), self.how, self.over, str(self.flag)]
        return subprocess.Popen([sys.executable, str(WEDGING_WORKER), *told], pass_fds=[fd])


def wedging(folder: Path, how: str, over: str) -> WedgingCommand:
    return WedgingCommand(1, folder, how=how, over=over, flag=folder / "wedged")


@dataclass
class Served:
    """An engine that is served and probed."""

    engine: Engine

    async def becomes(self, state: HealthState) -> str:
        """Wait for it; answers the detail of then."""
        health, there = self.engine.health, asyncio.Event()
        health.listen(lambda: there.set() if health.state is state else None)
        if health.state is not state:
            await asyncio.wait_for(there.wait(), PATIENCE_S)
        return health.detail


@contextlib.asynccontextmanager
async def served(folder: Path, command: WorkerCommand) -> AsyncIterator[Served]:
    """Nothing of it is left afterwards."""
    path = folder / "grpc.sock"
    async with running_engine(command) as engine:
        server = Server(engine, str(path))
        await server.start()
        probing = asyncio.create_task(engine.probing.ask(LeaseProbe(str(path))))
        try:
            yield Served(engine)
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            await server.stop()


def leased(engine: Engine, opened: OpenSession, tokens: int) -> Progress:
    """A new lease of pool "pool", filled with `tokens`."""
    session_id = opened.session_id
    [lease] = engine.device.lease(session_id, "pool", [LeaseWish(tokens, Dense())], 0).leases
    return Progress(lease.lease_id, lease.generation, tokens, tokens)
