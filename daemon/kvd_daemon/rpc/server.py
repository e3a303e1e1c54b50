"""The gRPC server of one device: services, health, reflection, limits.

grpc.aio, not the thread pool: one loop is the only mutator, so the core needs no lock, and it is no slower.
`benchmarks/bench_echo_server.py`, 64 bytes, one client, 2 cores: p50 358 us against 431 us for the thread
pool, p99 653 and 648 us, server CPU 294 and 312 us a call.
"""

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvd.v1 import kvd_pb2, kvd_pb2_grpc
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.health import HealthState

from .admin_service import AdminService
from .lease_service import LeaseService
from .pool_service import PoolService
from .session_service import SessionService

MAX_MESSAGE_BYTES = 4 << 20  # bytes; 65,536 prefix hashes are 2.3 MB, 1,024 leases far less
MAX_REPLY_BYTES = 64 << 20  # bytes; block tables of the largest pool, every second block taken
MAX_CONCURRENT_STREAMS = 1024  # calls at a time on one connection; a worker needs a handful
STOP_GRACE_S = 0.5  # seconds that calls under way get when the daemon stops
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
    ("grpc.so_reuseport", 0),
)
SERVICES = tuple(service.full_name for service in kvd_pb2.DESCRIPTOR.services_by_name.values())


class Server:
    """Listens on a Unix socket from `start` to `stop`."""

    def __init__(self, engine: Engine, socket_path: str) -> None:
        self._engine = engine
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not re-exported by name
        kvd_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(engine), self._server)
        kvd_pb2_grpc.add_PoolServiceServicer_to_server(PoolService(engine), self._server)
        kvd_pb2_grpc.add_LeaseServiceServicer_to_server(LeaseService(engine), self._server)
        kvd_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(engine), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._server.add_insecure_port(f"unix:{socket_path}")

    async def start(self) -> None:
        await self._show_health()
        self._engine.health.listen(self._health_changed)
        await self._server.start()

    def _health_changed(self) -> None:
        self._engine.spawn(self._show_health())

    async def _show_health(self) -> None:
        serving = self._engine.health.state is HealthState.SERVING
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in ("", *SERVICES):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        await self._server.stop(STOP_GRACE_S)
