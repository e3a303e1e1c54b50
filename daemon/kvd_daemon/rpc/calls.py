"""Calls that are one event of the core: what a journal has to know to carry them out again."""

from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kvd.errors import InvalidArgumentError
from kvd.v1 import kvd_pb2 as pb
from kvd_daemon.core import Change, Extended, Granted, LeaseWish, Progress
from kvd_daemon.journal import CallKind, CallKinds

from .requests import progress_of, wish_of
from .views import show_lease

Kind = TypeVar("Kind", bound=Message)


def wishes_of(request: pb.LeaseRequest) -> list[LeaseWish]:
    """Raises InvalidArgumentError on a policy that makes no sense."""
    return [wish_of(item, request.scratch) for item in request.items]


def growth_of(request: pb.ExtendRequest) -> list[tuple[Progress, int]]:
    """How far each lease is filled, and for how many more tokens there shall be room."""
    return [(progress_of(item.progress), item.tokens) for item in request.items]


def granted(answer: Granted, epoch: str) -> pb.LeaseResponse:
    reply = pb.LeaseResponse(epoch=epoch)
    for lease in answer.leases:
        show_lease(Change(lease, 0), reply.leases.add())
    return reply


def extended(answer: Extended, epoch: str) -> pb.ExtendResponse:
    reply = pb.ExtendResponse(epoch=epoch)
    for change in answer.leases:
        show_lease(change, reply.leases.add())
    return reply


def _parsed(message: Kind, content: bytes) -> Kind:
    """Raises InvalidArgumentError if the bytes are of no such message."""
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise InvalidArgumentError(f"no {type(message).__name__}: {error}") from error
    return message


def _lease_arguments(content: bytes, session_id: str, now_ns: int) -> tuple[str, tuple[Any, ...]]:
    request = _parsed(pb.LeaseRequest(), content)
    return request.request_id, (session_id, request.pool, wishes_of(request), now_ns)


def _extend_arguments(content: bytes, session_id: str, now_ns: int) -> tuple[str, tuple[Any, ...]]:
    request = _parsed(pb.ExtendRequest(), content)
    return request.request_id, (session_id, growth_of(request), now_ns)


def _lease_reply(answer: Granted, told: bytes) -> bytes:
    return granted(answer, _parsed(pb.LeaseResponse(), told).epoch).SerializeToString()


def _extend_reply(answer: Extended, told: bytes) -> bytes:
    return extended(answer, _parsed(pb.ExtendResponse(), told).epoch).SerializeToString()


_KINDS = (
    CallKind("LeaseRequest", "lease", _lease_arguments, _lease_reply),
    CallKind("ExtendRequest", "extend", _extend_arguments, _extend_reply),
)
CALLS: CallKinds = {kind.method: kind for kind in _KINDS}
