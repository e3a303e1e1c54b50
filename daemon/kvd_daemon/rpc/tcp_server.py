"""The TCP port for operators: opened when it can be, and not what workers depend on.

A kvd that starts refuses a port that cannot be opened. A daemon that follows another one does not: its port
may be taken since, its certificate gone bad, and workers need none of it. It serves the Unix sockets, says
that it lacks the port, and opens it as soon as that works.
"""

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from kvd.errors import InvalidArgumentError
from kvd_daemon.access.listening import Listening
from kvd_daemon.engine.engine import Engine

from .doors import Door, TlsDoor
from .tls_port import LOOK_S, TlsPort

LOOKS_PER_ATTEMPT = 3  # an attempt to open it that fails is a line in the log
LOG = logging.getLogger("kvd.tcp")


class TcpServer:
    """`port` is the true one where it is open, 0 while it is not."""

    def __init__(
        self, engine: Engine, listening: Listening | None, serving: Callable[[Door], grpc.aio.Server]
    ) -> None:
        """`serving` makes a server of all services behind a door. Without `listening` there is no port."""
        self._engine = engine
        self._listening = listening
        self._serving = serving
        self._port: TlsPort | None = None
        self._server: grpc.aio.Server | None = None
        self._opening = asyncio.Lock()
        self.port = 0

    async def open(self) -> None:
        """Raises InvalidArgumentError if the port or one of its files cannot be had; then nothing is open."""
        async with self._opening:
            if self._listening is not None and self._port is None:
                await self._open(self._listening)

    async def _open(self, listening: Listening) -> None:
        port = TlsPort(listening, self._engine.settings.name)
        server = self._serving(TlsDoor(self._engine, port))
        try:
            number = server.add_secure_port(port.address, port.credentials())
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"--listen: {port.address} cannot be opened; choose a free port of this machine"
            ) from error
        await server.start()
        self._port, self._server = port, server
        self.port = number
        LOG.info("operators may call %s:%d", port.address.rpartition(":")[0], number)

    async def try_to_open(self) -> None:
        """Or say in health why it is not open."""
        trouble = ""
        try:
            await self.open()
        except InvalidArgumentError as error:
            trouble = f"degraded, operators cannot call by TCP: {error}"
        self._engine.health.lacks(trouble)

    async def run(self) -> None:
        """Until cancelled: files that change are read again, a port that could not be opened is."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            if self._port is not None:
                self._port.refresh(self._engine.gate.audit)
            elif looks % LOOKS_PER_ATTEMPT == LOOKS_PER_ATTEMPT - 1:
                await self.try_to_open()
            looks += 1

    def reload(self, listening: Listening | None) -> None:
        """An open port stays where it is; one that could not be opened is tried where it shall be now."""
        if self._port is not None:
            self._port.refresh(self._engine.gate.audit)
        else:
            self._listening = listening
            self._engine.spawn(self.try_to_open())

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
