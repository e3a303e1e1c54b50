"""One record: the events of one call, with their arguments and what came of them, and perhaps its reply.

The bytes are values one after the other: name, arguments and digest of each event, then the reply.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from zlib import crc32

import numpy as np

from kvd_daemon.core import Device, Lease, Pool, Session

from .codec import CodecError, Decoder, encode
from .replies import Reply

READS = {"check", "rehearse", "need_of_lease", "needs_of_extend"}  # methods that change nothing
EVENTS: dict[str, Callable[..., Any]] = {
    name: method
    for name, method in vars(Device).items()
    if callable(method) and not name.startswith("_") and name not in READS
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
    return encode(tuple(reply))


def decoded(payload: bytes, decoder: Decoder) -> Record:
    """Raises CodecError if it is no record."""
    values = decoder.decode_all(payload)
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


def digest(answer: Any) -> int:
    """32 bits of what an event answered: another decision shows in it, and in any process the same."""
    return crc32(repr(_summary(answer)).encode())


def _summary(value: Any) -> Any:
    summarize = _SUMMARIES.get(type(value))
    if summarize is not None:
        return summarize(value)
    if isinstance(value, list | tuple):
        return [_summary(item) for item in value]
    assert is_dataclass(value), f"an answer of a type that has no digest: {type(value)}"
    return [_summary(getattr(value, field.name)) for field in fields(value)]


def _lease(lease: Lease) -> Any:
    table = crc32(lease.blocks.packed())
    return (lease.lease_id, lease.generation, lease.length, lease.position, lease.sealed_blocks, table)


def _same(value: Any) -> Any:
    return value


_SUMMARIES: dict[type[Any], Callable[[Any], Any]] = {
    Lease: _lease,
    Session: lambda session: (session.session_id, session.renewed_ns, session.state.value),
    Pool: lambda pool: (pool.name, pool.pool_id, *pool.counts),
    np.ndarray: lambda array: crc32(array.tobytes()),
    bool: _same,
    int: _same,
    str: _same,
    type(None): _same,
}
