"""The top of every call: errors become statuses, bugs become incidents, repeated requests old replies."""

import asyncio
import functools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvd.errors import InternalError, KvdError
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.access.audit import REFUSALS, Caller
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.requests import Call, Requests
from kvd_daemon.engine.sessions import OpenSession
from kvd_daemon.journal import OPERATORS, digest_of

from .status import code_of, details_of, message_of

INCIDENT_BYTES = 4  # enough to find it in the log
LOG = logging.getLogger("kvd.rpc")

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")
Reply = TypeVar("Reply", bound=Message)
Service = TypeVar("Service", bound="Answering")
Conclude = Callable[[Reply], Reply]
Act = Callable[[Conclude[Reply]], "Reply | asyncio.Future[Reply]"]
"""Carries a request out."""


class Answering:
    """Base of the services: they have an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine


def answered(
    method: "Callable[[Service, Any, Context], Awaitable[Answer]]",
) -> "Callable[[Service, Any, Context], Awaitable[Answer]]":
    """A KvdError becomes its status. Anything else is a bug: logged, INTERNAL, and health turns red."""

    @functools.wraps(method)
    async def call(self: Service, request: Any, context: Context) -> Answer:
        self.engine.called()
        try:
            return await method(self, request, context)
        except KvdError as error:
            failure = error
        except grpc.aio.AbortError:
            raise
        except Exception as bug:  # noqa: BLE001 - the top of a call
            failure = incident(self.engine, method.__name__, bug)
        if isinstance(failure, REFUSALS):
            self.engine.gate.audit.refused(_caller_of(self.engine, request), method.__name__, failure)
        await context.abort(code_of(failure), message_of(failure), details_of(failure))

    return call


def _caller_of(engine: Engine, request: Any) -> Caller:
    """By the session whose token the request carries."""
    try:
        opened = engine.sessions.by_token(getattr(request, "session_token", b""))
    except KvdError:
        return Caller("session", "unproven")
    identity = opened.session.identity
    details = ("session", identity.session_id), ("pid", identity.pid), ("tenant", identity.tenant)
    return Caller("session", f"uid:{identity.uid}", details)


def incident(engine: Engine, method: str, bug: Exception) -> KvdError:
    incident = secrets.token_hex(INCIDENT_BYTES)
    LOG.error("incident %s in %s", incident, method, exc_info=bug)
    engine.health.find(f"incident {incident} in {method}; the daemon's log has the details")
    return InternalError(
        f"a bug in kvd, incident {incident}; the daemon's log has the details", incident=incident
    )


async def once(engine: Engine, opened: OpenSession, request: Any, act: Callable[[], Reply]) -> Reply:
    """The reply to `request`, or to the first one of its request_id."""
    outcome: Reply | asyncio.Future[Reply] = begun(engine, opened, request, lambda conclude: act())
    return await settled(outcome) if isinstance(outcome, asyncio.Future) else outcome


def begun(
    engine: Engine, opened: OpenSession, request: Any, act: Act[Reply]
) -> "Reply | asyncio.Future[Reply]":
    """What `act` answers now or later, or answered to the first request of that request_id.

    What has begun is carried out, also when the caller has left. The reply and the events that led to it
    are one record: if `act` answers later, it calls its `conclude` in the batch of the last of them.
    """
    content, method = _without_secret(request), type(request).__name__
    session_id = opened.session.identity.session_id
    call = Call(session_id, request.request_id, digest_of(method, content), method)
    known = engine.requests.known(call)
    if known is not None:
        return cast("Reply | asyncio.Future[Reply]", _repeated(engine, call, known))
    with engine.device.call(session_id, method, content):
        outcome = act(lambda reply: _concluded(engine, call, reply))
        if not isinstance(outcome, asyncio.Future):
            return _concluded(engine, call, outcome)
    engine.requests.begins(call, outcome)
    return outcome


def repeatable(engine: Engine, requests: Requests, request: Any, act: Callable[[], Reply]) -> Reply:
    """As `once`, for operators. `requests` is where such requests are remembered."""
    content, method = request.SerializeToString(), type(request).__name__
    call = Call(OPERATORS, request.request_id, digest_of(method, content), method)
    known = requests.known(call)
    if known is not None:
        return cast("Reply", _repeated(engine, call, known))
    with engine.device.batch():
        reply = act()
        requests.answered(call, reply.SerializeToString())
    return reply


def _without_secret(request: Any) -> bytes:
    """The request's bytes, which are kept: whoever reads them must not learn the session's token."""
    token = request.session_token
    request.ClearField("session_token")
    content: bytes = request.SerializeToString()
    request.session_token = token
    return content


def _concluded(engine: Engine, call: Call, reply: Reply) -> Reply:
    engine.requests.answered(call, reply.SerializeToString())
    return reply


def _repeated(engine: Engine, call: Call, known: "bytes | asyncio.Future[Any]") -> Any:
    """As it was, but told by this daemon."""
    if isinstance(known, asyncio.Future):
        return known
    reply = getattr(pb, call.method.removesuffix("Request") + "Response").FromString(known)
    reply.epoch = engine.epoch
    return reply


async def carried_out(
    engine: Engine,
    opened: OpenSession,
    request: Any,
    work: Callable[[Conclude[Reply]], Coroutine[Any, Any, Reply]],
) -> Reply:
    """As `once`, for what takes its time: `work` runs to its end whoever stops waiting for it."""
    return await settled(begun(engine, opened, request, lambda conclude: engine.spawn(work(conclude))))


async def settled(outcome: "Reply | asyncio.Future[Reply]") -> Reply:
    return await asyncio.shield(outcome) if isinstance(outcome, asyncio.Future) else outcome
