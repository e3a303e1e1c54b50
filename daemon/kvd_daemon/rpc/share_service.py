"""ShareService: see proto/kvd/v1/kvd.proto. Apart from LeaseService, whose calls every token waits for."""

# ruff: noqa: N802 - the methods are named by the proto

from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc
from kvd_daemon.engine.sessions import OpenSession

from .answering import Answering, Context, answered, once

DEFAULT_MATCH_TTL_NS = 10 * 10**9  # ns; a lease follows its match in milliseconds, or waits in line


class ShareService(Answering, kvd_pb2_grpc.ShareServiceServicer):
    """Blocks and leases that change hands."""

    @answered
    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._match(opened, request))

    def _match(self, opened: OpenSession, request: pb.MatchRequest) -> pb.MatchResponse:
        ttl_ns = request.ttl.ToNanoseconds() if request.HasField("ttl") else DEFAULT_MATCH_TTL_NS
        hashes = list(request.prefix_hashes)
        matched = self.engine.sharing.match(opened, request.pool, hashes, ttl_ns)
        pin_id = matched.pin.pin_id if matched.pin is not None else 0
        return pb.MatchResponse(epoch=self.engine.epoch, found=matched.found, pin_id=pin_id)

    @answered
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._pin(opened, request))

    def _pin(self, opened: OpenSession, request: pb.PinRequest) -> pb.PinResponse:
        pin = self.engine.sharing.pin(opened, request.pool, list(request.prefix_hashes))
        return pb.PinResponse(epoch=self.engine.epoch, pin_id=pin.pin_id)

    @answered
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._unpin(opened, request))

    def _unpin(self, opened: OpenSession, request: pb.UnpinRequest) -> pb.UnpinResponse:
        self.engine.sharing.unpin(opened, request.pin_id)
        return pb.UnpinResponse(epoch=self.engine.epoch)
