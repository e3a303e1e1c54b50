"""PoolService: see proto/kvd/v1/kvd.proto."""

# ruff: noqa: N802 - the methods are named by the proto

from kvd.convert import spec_from_proto
from kvd.errors import PoolNotFoundError
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc
from kvd_daemon.engine.sessions import OpenSession

from .answering import Answering, Context, answered, once
from .views import pool_view


class PoolService(Answering, kvd_pb2_grpc.PoolServiceServicer):
    """Named regions of device memory."""

    @answered
    async def CreatePool(self, request: pb.CreatePoolRequest, context: Context) -> pb.CreatePoolResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._create(opened, request))

    def _create(self, opened: OpenSession, request: pb.CreatePoolRequest) -> pb.CreatePoolResponse:
        self.engine.gate.pools.require(opened.session.tenant, request.name)
        pool, created = self.engine.pools.create(request.name, spec_from_proto(request.spec), request.blocks)
        return pb.CreatePoolResponse(epoch=self.engine.epoch, pool=pool_view(pool), created=created)

    @answered
    async def GetPool(self, request: pb.GetPoolRequest, context: Context) -> pb.GetPoolResponse:
        pool = self.engine.device.pools.get(request.name)
        if pool is None:
            raise PoolNotFoundError(f"no pool {request.name!r}; create it first")
        return pb.GetPoolResponse(epoch=self.engine.epoch, pool=pool_view(pool))
