"""One record: the events of one call, with their arguments and what came of them, and perhaps its reply.

The bytes are values one after the other: name, arguments and digest of each event, then the reply; or those
of a ToldCall.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from struct import Struct
from typing import Any
from zlib import crc32

import numpy as np

from kvd.policy import H2O, Dense, Dual, ExpectedAttention, KeyDiff, SnapKV, Span, Streaming
from kvd_daemon.core import Device, Lease, Pool, Session, Tier

from .calls import ToldCall
from .codec import CodecError, Decoder, encode_tuple
from .replies import Reply

READS = {
    "check",
    "rehearse",
    "need_of_lease",
    "needs_of_extend",
    "needs_of_resume",
    "needs_of_restore",
    "leading",
    "missing",
    "copyable",
    "uncopied",
    "demotable",
    "recallable",
    "copied_bytes",
    "copied_blocks",
}  # methods that change nothing
EVENTS: dict[str, Callable[..., Any]] = {
    name: method
    for name, method in inspect.getmembers(Device, inspect.isfunction)
    if not name.startswith("_") and name not in READS
}
"""Every other method of Device is an event: what a journal has to know."""


@dataclass(frozen=True)
class Event:
    """A method of Device, its arguments, and the digest of its answer."""

    name: str
    arguments: tuple[Any, ...]
    digest: int


@dataclass(frozen=True)
class Record:
    """What happened at once."""

    events: list[Event]
    reply: Reply | None


def encoded_reply(reply: Reply) -> bytes:
    return encode_tuple(reply)


def decoded(payload: bytes, decoder: Decoder) -> Record | ToldCall:
    """Raises CodecError if it is no record."""
    values = decoder.decode_all(payload)
    call = ToldCall.of(values)
    if call is not None:
        return call
    reply = Reply(*values.pop()) if len(values) % 3 == 1 and _is_reply(values[-1]) else None
    if len(values) % 3:
        raise CodecError(f"{len(values)} values are no events")
    events = [Event(*values[at : at + 3]) for at in range(0, len(values), 3)]
    for event in events:
        if event.name not in EVENTS or type(event.arguments) is not tuple or type(event.digest) is not int:
            raise CodecError(f"no event: {event}"[:200])
    return Record(events, reply)


def _is_reply(value: Any) -> bool:
    return isinstance(value, tuple) and [*map(type, value)] == [str, str, bytes, str, bytes]


def digest(answer: Any, before: int = 0) -> int:
    """32 bits of what an event answered: another decision shows in it, and in any process the same."""
    add = _DIGESTS.get(type(answer))
    if add is None:
        add = _DIGESTS[type(answer)] = _digest_of_fields(type(answer))
    return add(answer, before)


def _digest_of_fields(kind: type[Any]) -> Callable[[Any, int], int]:
    """For answers of several parts. A type that is neither known nor made of fields is a bug."""
    if issubclass(kind, tuple):
        return _digest_of_items
    names = [field.name for field in fields(kind)]
    return lambda value, before: _digest_of_items([getattr(value, name) for name in names], before)


def _digest_of_items(values: Sequence[Any], before: int) -> int:
    for value in values:
        add = _DIGESTS.get(type(value), digest)
        before = add(value, before)
    return before


def _digest_of_lease(lease: Lease, before: int) -> int:
    standing = _five_numbers(
        lease.lease_id, lease.generation, lease.length, lease.position, lease.sealed_blocks
    )
    return crc32(lease.blocks.packed(), crc32(standing, before))


def _digest_of_text(value: Any, before: int) -> int:
    return crc32(str(value).encode(), before)


_five_numbers = Struct("<5q").pack
_DIGESTS: dict[type[Any], Callable[[Any, int], int]] = {
    list: _digest_of_items,
    tuple: _digest_of_items,
    Lease: _digest_of_lease,
    Session: lambda session, before: _digest_of_text((session.session_id, session.renewed_ns), before),
    Pool: lambda pool, before: _digest_of_text((pool.name, pool.pool_id, pool.counts), before),
    Tier: _digest_of_text,
    bytes: crc32,
    np.ndarray: lambda array, before: crc32(array.tobytes(), before),
    **dict.fromkeys((bool, int, str, type(None)), _digest_of_text),
    **dict.fromkeys((Dense, Streaming, SnapKV, Dual, H2O, Span, KeyDiff, ExpectedAttention), _digest_of_text),
}
