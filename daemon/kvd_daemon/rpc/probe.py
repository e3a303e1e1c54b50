"""The daemon as its own client: what `engine.probing` asks with."""

import grpc
import grpc.aio

from kvd.errors import DeviceUnavailableError
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc

OPTIONS = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own, as a new worker would make
MAX_REASON_CHARS = 200  # characters of gRPC's words; a line of kvctl's page


class LeaseProbe:
    """Leases over the daemon's own socket."""

    def __init__(self, socket_path: str) -> None:
        self._target = f"unix:{socket_path}"

    async def __call__(self, session_token: bytes) -> None:
        """One round trip. Raises DeviceUnavailableError."""
        async with grpc.aio.insecure_channel(self._target, options=OPTIONS) as channel:
            try:
                await kvd_pb2_grpc.LeaseServiceStub(channel).Lease(
                    pb.LeaseRequest(session_token=session_token)
                )
            except grpc.aio.AioRpcError as error:
                words = (error.details() or "")[:MAX_REASON_CHARS]
                raise DeviceUnavailableError(f"{error.code().name}: {words}") from error
