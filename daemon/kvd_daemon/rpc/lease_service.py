"""LeaseService: see proto/kvd/v1/kvd.proto."""

# ruff: noqa: N802 - the methods are named by the proto

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from kvd.convert import policy_from_proto
from kvd.errors import (
    DeviceUnavailableError,
    InvalidArgumentError,
    SessionNotFoundError,
)
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc
from kvd_daemon import core
from kvd_daemon.core import Change
from kvd_daemon.engine.admission import Asker
from kvd_daemon.engine.compressions import Outcome
from kvd_daemon.engine.health import HealthState
from kvd_daemon.engine.kernel_jobs import Given
from kvd_daemon.engine.sessions import OpenSession

from .answering import Act, Answering, Conclude, Context, answered, begun, carried_out, once, settled
from .calls import extended, granted, growth_of, wishes_of
from .requests import asker_of, progress_of, queries_of, refuse_another_pool, rope_of
from .views import report, show_lease

Reply = TypeVar("Reply", pb.LeaseResponse, pb.ExtendResponse)


class LeaseService(Answering, kvd_pb2_grpc.LeaseServiceServicer):
    """Rights to blocks."""

    @answered
    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:
        try:
            opened = self.engine.sessions.by_token(request.session_token)
        except SessionNotFoundError:
            if not self.engine.probing.owns(request.session_token):
                raise
            self.engine.probing.rehearse()
            return pb.LeaseResponse(epoch=self.engine.epoch)
        asker = asker_of(opened, request, context.time_remaining)
        return await self._in_turn(
            opened, asker, request, lambda conclude: self._lease(asker, request, conclude)
        )

    async def _in_turn(
        self,
        opened: OpenSession,
        asker: Asker,
        request: pb.LeaseRequest | pb.ExtendRequest,
        act: Act[Reply],
    ) -> Reply:
        """As `once`; a call that waits for blocks has not begun yet, so it ends with its caller."""
        engine = self.engine
        outcome = await engine.admission.admitted(asker, lambda: begun(engine, opened, request, act))
        return await settled(outcome) if isinstance(outcome, asyncio.Future) else outcome

    def _lease(
        self, asker: Asker, request: pb.LeaseRequest, conclude: Conclude[pb.LeaseResponse]
    ) -> "pb.LeaseResponse | asyncio.Future[pb.LeaseResponse]":
        if self.engine.health.state is HealthState.DRAINING:
            raise DeviceUnavailableError("the daemon stops; lease elsewhere, or retry in a second")
        self.engine.call_limits.check_count(len(request.items))
        refuse_another_pool(request, self.engine.device.pools)
        wishes = wishes_of(request)
        self.engine.call_limits.check_lease(asker, request.pool, wishes)
        answer = self.engine.leases.lease(asker, request.pool, wishes)
        reply = granted(answer, self.engine.epoch)
        return self._when_zeroed(answer.leases, reply, conclude) if answer.scrub else reply

    @answered
    async def Extend(self, request: pb.ExtendRequest, context: Context) -> pb.ExtendResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        growing = [item.progress.lease_id for item in request.items]
        asker = asker_of(opened, request, context.time_remaining, growing)
        return await self._in_turn(
            opened, asker, request, lambda conclude: self._extend(asker, request, conclude)
        )

    def _extend(
        self, asker: Asker, request: pb.ExtendRequest, conclude: Conclude[pb.ExtendResponse]
    ) -> "pb.ExtendResponse | asyncio.Future[pb.ExtendResponse]":
        self.engine.call_limits.check_count(len(request.items))
        items = growth_of(request)
        self.engine.call_limits.check_extend(items)
        answer = self.engine.leases.extend(asker, items)
        reply = extended(answer, self.engine.epoch)
        leases = [change.lease for change in answer.leases]
        return self._when_zeroed(leases, reply, conclude) if answer.scrub or answer.copies else reply

    def _when_zeroed(
        self, leases: Sequence[core.Lease], reply: Reply, conclude: Conclude[Reply]
    ) -> "asyncio.Future[Reply]":
        """The reply when what held another tenant's bytes holds zeros, and shared tails are copied."""
        return self.engine.spawn(self.engine.leases.scrub(leases, lambda: conclude(reply)))

    @answered
    async def Compress(self, request: pb.CompressRequest, context: Context) -> pb.CompressResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await carried_out(
            self.engine, opened, request, lambda conclude: self._compress(opened, request, conclude)
        )

    async def _compress(
        self, opened: OpenSession, request: pb.CompressRequest, conclude: Conclude[pb.CompressResponse]
    ) -> pb.CompressResponse:
        given = Given(
            queries_of(request.queries) if request.HasField("queries") else None,
            rope_of(request.rope) if request.HasField("rope") else None,
            request.park,
        )
        return await self.engine.compressions.compress(
            opened,
            progress_of(request.progress),
            policy_from_proto(request.policy) if request.HasField("policy") else None,
            given,
            lambda outcome: conclude(self._compressed(outcome)),
        )

    def _compressed(self, outcome: Outcome) -> pb.CompressResponse:
        kept_blocks = 0 if outcome.compressed else len(outcome.lease.blocks)
        answer = pb.CompressResponse(epoch=self.engine.epoch, report=report(outcome))
        show_lease(Change(outcome.lease, kept_blocks), answer.lease)
        return answer

    @answered
    async def Observe(self, request: pb.ObserveRequest, context: Context) -> pb.ObserveResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await carried_out(
            self.engine, opened, request, lambda conclude: self._observe(opened, request, conclude)
        )

    async def _observe(
        self, opened: OpenSession, request: pb.ObserveRequest, conclude: Conclude[pb.ObserveResponse]
    ) -> pb.ObserveResponse:
        if not request.HasField("queries"):
            raise InvalidArgumentError("queries are missing; pass those of the new tokens in a scratch lease")
        queries = queries_of(request.queries)
        return await self.engine.compressions.observe(
            opened,
            progress_of(request.progress),
            queries,
            lambda lease: conclude(
                pb.ObserveResponse(epoch=self.engine.epoch, observed_length=lease.observed_length)
            ),
        )

    @answered
    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._seal(opened, request))

    def _seal(self, opened: OpenSession, request: pb.SealRequest) -> pb.SealResponse:
        hashes = list(request.prefix_hashes)
        change = self.engine.leases.seal(opened, progress_of(request.progress), hashes)
        answer = pb.SealResponse(epoch=self.engine.epoch)
        show_lease(change, answer.lease)
        return answer

    @answered
    async def ReleaseBlocks(
        self, request: pb.ReleaseBlocksRequest, context: Context
    ) -> pb.ReleaseBlocksResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._release_blocks(opened, request))

    def _release_blocks(
        self, opened: OpenSession, request: pb.ReleaseBlocksRequest
    ) -> pb.ReleaseBlocksResponse:
        block_ids = list(request.block_ids)
        change = self.engine.leases.release_blocks(opened, progress_of(request.progress), block_ids)
        answer = pb.ReleaseBlocksResponse(epoch=self.engine.epoch)
        show_lease(change, answer.lease)
        return answer

    @answered
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        opened = self.engine.sessions.by_token(request.session_token)
        return await once(self.engine, opened, request, lambda: self._release(opened, request))

    def _release(self, opened: OpenSession, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        self.engine.leases.release(opened, list(request.lease_ids))
        return pb.ReleaseResponse(epoch=self.engine.epoch)
