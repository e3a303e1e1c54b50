"""SessionService: one long stream per worker. See proto/kvd/v1/kvd.proto."""

# ruff: noqa: N802 - the methods are named by the proto

import asyncio
from collections.abc import AsyncIterator

from kvd.errors import InvalidArgumentError, KvdError
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc
from kvd_daemon.engine import events
from kvd_daemon.engine.sessions import Opening, OpenSession, Outbox

from .answering import Answering, Context, answered, incident
from .requests import progress_of
from .views import duration


class SessionService(Answering, kvd_pb2_grpc.SessionServiceServicer):
    """Liveness up, events down."""

    @answered
    async def Connect(  # type: ignore[override]  # grpc.aio also takes a coroutine that writes by itself
        self, requests: AsyncIterator[pb.ConnectRequest], context: Context
    ) -> None:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidArgumentError("the first message of a session's stream must be `open`")
        asked = first.open
        opening = self.engine.sessions.open(asked.ticket, asked.client_name, asked.resume_token)
        opened, outbox = opening.opened, opening.opened.outbox
        reader = asyncio.create_task(self._read(opened, outbox, requests))
        try:
            await context.write(self._opened(opening))
            for offer in self.engine.handing.offers_to(opened.session_id):
                outbox.put(offer)
            await self._write(outbox, context)
        finally:
            reader.cancel()
            self.engine.sessions.stream_lost(opened, outbox)

    async def _write(self, outbox: Outbox, context: Context) -> None:
        """Everything that is written goes through the outbox: gRPC allows one write at a time."""
        while True:
            event = await outbox.get()
            if isinstance(event, events.Ended):
                if event.error is not None:
                    raise event.error
                return
            await context.write(self._message(event))

    async def _read(
        self, opened: OpenSession, outbox: Outbox, requests: AsyncIterator[pb.ConnectRequest]
    ) -> None:
        """Renewals and the close. Whatever goes wrong ends the stream through the outbox."""
        try:
            async for message in requests:
                self.engine.called()
                match message.WhichOneof("message"):
                    case "renew":
                        self.engine.sessions.renew(opened, [progress_of(p) for p in message.renew.progress])
                    case "close":
                        return self.engine.sessions.close_session(opened)
                    case _:
                        raise InvalidArgumentError("after `open` come only `renew` and `close`")
        except KvdError as error:
            outbox.put(events.Ended(error))
        except Exception as bug:  # noqa: BLE001 - the top of a loop
            outbox.put(events.Ended(incident(self.engine, "Connect", bug)))
        else:
            outbox.put(events.Ended())

    def _opened(self, opening: Opening) -> pb.ConnectResponse:
        session = opening.opened.session
        answer = pb.SessionOpened(
            session_id=session.session_id,
            session_token=opening.token,
            ttl=duration(session.ttl_ns),
            tenant=session.tenant,
            resumed=opening.resumed,
        )
        return pb.ConnectResponse(epoch=self.engine.epoch, opened=answer)

    def _message(self, event: events.Event) -> pb.ConnectResponse:
        response = pb.ConnectResponse(epoch=self.engine.epoch)
        match event:
            case events.Renewed():
                response.renewed.SetInParent()
            case events.Revoked(lease_id, cause):
                response.revoked.CopyFrom(pb.LeaseRevoked(lease_id=lease_id, cause=cause))
            case events.Pressure(pool, wanted_blocks, compressible):
                leases = [
                    pb.CompressibleLease(lease_id=lease.lease_id, floor_tokens=lease.floor)
                    for lease in compressible
                ]
                pressure = pb.Pressure(pool=pool, wanted_blocks=wanted_blocks, compressible=leases)
                response.pressure.CopyFrom(pressure)
            case events.Offered(pool, key, lease_id):
                response.offered.CopyFrom(pb.Offered(pool=pool, key=key, lease_id=lease_id))
            case events.Draining():
                response.draining.SetInParent()
        return response
