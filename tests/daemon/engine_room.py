"""An engine without sockets, for what real workers could only show by luck or as root."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kvd_daemon.core import SessionIdentity
from kvd_daemon.device.host import HostMemory
from kvd_daemon.engine.engine import DeviceSettings, Engine
from kvd_daemon.engine.inheritance import inherit, open_state
from kvd_daemon.engine.peers import Peer
from kvd_daemon.engine.sessions import OpenSession, Outbox
from kvd_daemon.fd_store import NO_STORE
from kvd_daemon.kernel.link import WorkerCommand

DYING_WORKER = Path(__file__).with_name("dying_worker.py")
TTL_NS = 3600 * 10**9


@dataclass(frozen=True)
class DyingCommand(WorkerCommand):
    """Starts workers that die with their first compression."""

    def start(self, worker_end: socket.socket) -> "subprocess.Popen[bytes]":
        fd = worker_end.fileno()
        command = [sys.executable, str(DYING_WORKER), str(fd), str(os.getpid()), "1"]
        return subprocess.Popen(command, pass_fds=[fd])


def numba_cache() -> Path:
    """The one that daemons use, so that nothing is compiled twice."""
    from kvd_daemon.main import kernel_cache

    return kernel_cache(os.environ)


@contextlib.asynccontextmanager
async def running_engine(command: WorkerCommand | None = None) -> AsyncIterator[Engine]:
    """An engine of 64 MiB whose kernel worker is started; nothing of it is left afterwards."""
    settings = DeviceSettings("host0", 64 << 20, TTL_NS)
    memory = HostMemory()
    inheritance = inherit(open_state(Path("unused"), settings.memory_bytes, NO_STORE), memory, NO_STORE)
    engine = Engine(settings, memory, command or WorkerCommand(1, numba_cache()), inheritance)
    background = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        engine.close()


def open_session(engine: Engine, tenant: str) -> OpenSession:
    """A session of this process as that tenant, which no ticket would give it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = Peer.of(ours)
    identity = SessionIdentity(f"session of {tenant}", tenant, peer.pid, peer.uid)
    session = engine.device.open_session(identity, TTL_NS, time.monotonic_ns())
    return OpenSession(session, peer, Outbox())
