"""ShareService: see proto/kvd/v1/kvd.proto. Apart from LeaseService, whose calls every token waits for."""

# ruff: noqa: N802 - the methods are named by the proto

import asyncio
from collections.abc import Callable

from kvd.convert import policy_to_proto
from kvd.errors import DeviceUnavailableError, InvalidArgumentError
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc
from kvd_daemon.core import Change, Fetched, Lease, Offer
from kvd_daemon.engine.admission import Asker
from kvd_daemon.engine.health import HealthState
from kvd_daemon.engine.parcel_line import Parcel
from kvd_daemon.engine.sessions import OpenSession

from .answering import Answering, Conclude, Context, Reply, answered, begun, carried_out, once, settled
from .requests import asker_of, progress_of, refuse_another_pool, wait_of
from .views import show_lease

DEFAULT_MATCH_TTL_NS = 10 * 10**9  # ns; a lease follows its match in milliseconds, or waits in line
MATCH_SHARE = 0.5  # of a match's time it may wait for a disk; the rest is for what comes then, and the answer
DEFAULT_SHELF_TTL_NS = 60 * 10**9  # ns; whoever adopts is there already, or comes with its process


class ShareService(Answering, kvd_pb2_grpc.ShareServiceServicer):
    """Blocks and leases that change hands."""

    @answered
    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        left_s = context.time_remaining()
        patience_s = MATCH_SHARE * left_s if left_s is not None else float("inf")
        await self.engine.caching.promoted(opened, request.pool, list(request.prefix_hashes), patience_s)
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

    @answered
    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._fork(opened, request))

    def _fork(self, opened: OpenSession, request: pb.ForkRequest) -> pb.ForkResponse:
        if self.engine.health.state is HealthState.DRAINING:
            raise DeviceUnavailableError("the daemon stops; lease elsewhere, or retry in a second")
        forked = self.engine.handing.fork(opened, progress_of(request.progress), request.count)
        answer = pb.ForkResponse(epoch=self.engine.epoch)
        show_lease(Change(forked.parent, len(forked.parent.blocks)), answer.lease)
        for child in forked.children:
            show_lease(Change(child, 0), answer.forks.add())
        return answer

    @answered
    async def Rest(self, request: pb.RestRequest, context: Context) -> pb.RestResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._rest(opened, request))

    def _rest(self, opened: OpenSession, request: pb.RestRequest) -> pb.RestResponse:
        floor = request.floor_tokens if request.HasField("floor_tokens") else None
        self.engine.leases.rest(opened, progress_of(request.progress), floor)
        return pb.RestResponse(epoch=self.engine.epoch)

    @answered
    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        await self.engine.pressing.settled(request.lease_id)
        return await once(self.engine, opened, request, lambda: self._wake(opened, request))

    def _wake(self, opened: OpenSession, request: pb.WakeRequest) -> pb.WakeResponse:
        answer = pb.WakeResponse(epoch=self.engine.epoch)
        show_lease(Change(self.engine.leases.wake(opened, request.lease_id), 0), answer.lease)
        return answer

    @answered
    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._publish(opened, request))

    def _publish(self, opened: OpenSession, request: pb.PublishRequest) -> pb.PublishResponse:
        if not request.key and not request.to_session:
            raise InvalidArgumentError("no key to publish under; name one, or a session to transfer to")
        ttl_ns = request.ttl.ToNanoseconds() if request.HasField("ttl") else DEFAULT_SHELF_TTL_NS
        offer = Offer(request.key, ttl_ns, request.to_session)
        lease = self.engine.handing.publish(opened, progress_of(request.progress), offer)
        assert lease.shelved is not None, "it was published"
        return pb.PublishResponse(epoch=self.engine.epoch, key=lease.shelved.key)

    @answered
    async def Adopt(self, request: pb.AdoptRequest, context: Context) -> pb.AdoptResponse:
        """A call that waits has not begun yet: it ends with its caller."""
        engine, opened = self.engine, self.engine.sessions.by_token(request.session_token)
        wait_ns = wait_of(request, context.time_remaining)
        place = opened.session.tenant, request.pool, request.key
        outcome = await engine.handing.adopted(
            place,
            wait_ns,
            lambda: begun(engine, opened, request, lambda conclude: self._adopt(opened, request)),
        )
        return await settled(outcome) if isinstance(outcome, asyncio.Future) else outcome

    def _adopt(self, opened: OpenSession, request: pb.AdoptRequest) -> pb.AdoptResponse:
        refuse_another_pool(request, self.engine.device.pools)
        lease = self.engine.handing.adopt(opened, request.pool, request.key)
        answer = pb.AdoptResponse(epoch=self.engine.epoch, policy=policy_to_proto(lease.policy))
        show_lease(Change(lease, 0), answer.lease)
        return answer

    @answered
    async def Suspend(self, request: pb.SuspendRequest, context: Context) -> pb.SuspendResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await carried_out(
            self.engine, opened, request, lambda conclude: self._suspend(opened, request, conclude)
        )

    async def _suspend(
        self, opened: OpenSession, request: pb.SuspendRequest, conclude: Conclude[pb.SuspendResponse]
    ) -> pb.SuspendResponse:
        def answer(lease: Lease) -> pb.SuspendResponse:
            reply = pb.SuspendResponse(epoch=self.engine.epoch)
            show_lease(Change(lease, 0), reply.lease)
            return conclude(reply)

        return await self.engine.parking.suspend(opened, progress_of(request.progress), answer)

    @answered
    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """A call that waits for blocks has not begun yet: it ends with its caller."""
        place = request.lease_id, False
        return await self._brought_back(
            request, context, place, lambda asker, conclude: self._resume(asker, request, conclude)
        )

    async def _brought_back(
        self,
        request: pb.ResumeRequest | pb.RestoreRequest,
        context: Context,
        place: Parcel,
        act: Callable[[Asker, Conclude[Reply]], "asyncio.Future[Reply]"],
    ) -> Reply:
        """What `act` answers when `place` is at hand and there are blocks for it."""
        engine, opened = self.engine, self.engine.sessions.by_token(request.session_token)
        async with engine.spilling.at_hand(place, opened.session_id, request.max_wait.ToNanoseconds()):
            asker = asker_of(opened, request, context.time_remaining)
            outcome = await engine.admission.admitted(
                asker,
                lambda: begun(engine, opened, request, lambda conclude: act(asker, conclude)),
            )
        return await settled(outcome) if isinstance(outcome, asyncio.Future) else outcome

    def _resume(
        self, asker: Asker, request: pb.ResumeRequest, conclude: Conclude[pb.ResumeResponse]
    ) -> "asyncio.Future[pb.ResumeResponse]":
        def answer(fetched: Fetched) -> pb.ResumeResponse:
            reply = pb.ResumeResponse(epoch=self.engine.epoch)
            show_lease(Change(fetched.lease, 0), reply.lease)
            return conclude(reply)

        plan = self.engine.parking.resume(asker, request.lease_id, request.generation)
        return self.engine.spawn(self.engine.parking.fetched(plan, answer))

    @answered
    async def DropCheckpoint(
        self, request: pb.DropCheckpointRequest, context: Context
    ) -> pb.DropCheckpointResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._drop_checkpoint(opened, request))

    def _drop_checkpoint(
        self, opened: OpenSession, request: pb.DropCheckpointRequest
    ) -> pb.DropCheckpointResponse:
        self.engine.parking.drop_checkpoint(opened, request.lease_id)
        return pb.DropCheckpointResponse(epoch=self.engine.epoch)

    @answered
    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        """A call that waits for blocks has not begun yet: it ends with its caller."""
        place = request.progress.lease_id, True
        return await self._brought_back(
            request, context, place, lambda asker, conclude: self._restore(asker, request, conclude)
        )

    def _restore(
        self, asker: Asker, request: pb.RestoreRequest, conclude: Conclude[pb.RestoreResponse]
    ) -> "asyncio.Future[pb.RestoreResponse]":
        def answer(fetched: Fetched) -> pb.RestoreResponse:
            reply = pb.RestoreResponse(epoch=self.engine.epoch, dropped_tokens=fetched.dropped_tokens)
            show_lease(Change(fetched.lease, 0), reply.lease)
            return conclude(reply)

        plan = self.engine.parking.restore(asker, progress_of(request.progress))
        return self.engine.spawn(self.engine.parking.fetched(plan, answer))
