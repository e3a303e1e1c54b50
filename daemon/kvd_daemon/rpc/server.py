"""The gRPC servers of one device, one for each door: services, health, reflection, limits.

grpc.aio, not the thread pool: one loop is the only mutator, so the core needs no lock, and it is no slower.
`benchmarks/bench_echo_server.py`, 64 bytes, one client, 2 cores: p50 358 us against 431 us for the thread
pool, p99 653 and 648 us, server CPU 294 and 312 us a call.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvd.errors import InvalidArgumentError
from kvd.v1 import kvd_pb2, kvd_pb2_grpc
from kvd_daemon.access.listening import Listening
from kvd_daemon.engine.connections import TCP_CONNECTIONS, unix_connections
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.health import HealthState

from .admin_service import AdminService
from .doors import Door, UnixDoor
from .guard import Guard, GuardedMethods
from .lease_service import LeaseService
from .pool_service import PoolService
from .session_service import SessionService
from .share_service import ShareService
from .tcp_server import TcpServer

MAX_REPLY_BYTES = 64 << 20  # bytes; block tables of the largest pool, every second block taken
STOP_GRACE_S = 0.5  # seconds that calls under way get when the daemon stops
TCP_MESSAGE_BYTES = 64 << 10  # bytes; an operator's requests are below 2 KB, and strangers can send them
TCP_STREAMS = 64  # calls at a time on one connection; kvctl makes one
SILENT = ("grpc.server_handshake_timeout_ms", 10_000)  # ms; for whoever connects and says nothing
TCP_OPTIONS = (
    ("grpc.max_receive_message_length", TCP_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.max_concurrent_streams", TCP_STREAMS),
    ("grpc.max_allowed_incoming_connections", TCP_CONNECTIONS),
    ("grpc.max_connection_age_ms", 300_000),  # then it must pass the handshake again, and today's authority
    ("grpc.max_connection_age_grace_ms", 60_000),
    SILENT,
    ("grpc.so_reuseport", 0),
)
SERVICES = tuple(service.full_name for service in kvd_pb2.DESCRIPTOR.services_by_name.values())


class Server:
    """Listens on a Unix socket from `start` to `stop`, and on a TCP port as `tcp` is told."""

    def __init__(self, engine: Engine, socket_path: str, listening: Listening | None = None) -> None:
        """Raises InvalidArgumentError if the socket cannot be had."""
        self._engine = engine
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not re-exported by name
        self._unix = self._open_unix(socket_path)
        self.tcp = TcpServer(engine, listening, lambda door: self._serving(door, TCP_OPTIONS))

    def _serving(self, door: Door, options: tuple[tuple[str, int], ...]) -> grpc.aio.Server:
        """A server of all services behind that door."""
        engine, server = self._engine, grpc.aio.server(options=options)
        guarded: Any = GuardedMethods(Guard(door, engine.gate))
        kvd_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(engine), guarded)
        kvd_pb2_grpc.add_PoolServiceServicer_to_server(PoolService(engine), guarded)
        kvd_pb2_grpc.add_LeaseServiceServicer_to_server(LeaseService(engine), guarded)
        kvd_pb2_grpc.add_ShareServiceServicer_to_server(ShareService(engine), guarded)
        kvd_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(engine), guarded)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, guarded)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflecting = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # nor is this
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflecting, guarded)
        server.add_generic_rpc_handlers((guarded,))
        return server

    def _open_unix(self, socket_path: str) -> grpc.aio.Server:
        limits = self._engine.gate.limits
        options = (
            ("grpc.max_receive_message_length", limits.message_bytes),
            ("grpc.max_send_message_length", MAX_REPLY_BYTES),
            ("grpc.max_concurrent_streams", limits.streams),
            ("grpc.max_allowed_incoming_connections", unix_connections(limits)),
            SILENT,
        )
        server = self._serving(UnixDoor(self._engine), options)
        try:
            server.add_insecure_port(f"unix:{socket_path}")
        except RuntimeError as error:
            raise InvalidArgumentError(
                f"{socket_path} cannot be bound; make room or way there, or choose another --run-dir"
            ) from error
        return server

    async def bind_again(self, socket_path: str, publish: Callable[[], None]) -> None:
        """The Unix socket anew, where somebody deleted it. Streams end, and workers resume them there.

        Raises InvalidArgumentError if that cannot be bound; then all is as before.
        """
        server = self._open_unix(socket_path)
        await server.start()
        publish()
        old, self._unix = self._unix, server
        await old.stop(STOP_GRACE_S)

    async def start(self) -> None:
        await self._show_health()
        self._engine.health.listen(self._health_changed)
        await self._unix.start()

    def _health_changed(self) -> None:
        self._engine.spawn(self._show_health())

    async def _show_health(self) -> None:
        serving = self._engine.health.state is HealthState.SERVING
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in ("", *SERVICES):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        await asyncio.gather(self._unix.stop(STOP_GRACE_S), self.tcp.stop(STOP_GRACE_S))
