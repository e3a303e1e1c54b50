"""Calls that are one event: their request and their reply say all that a record has to.

Such a record is half the work of an event that is spelled out. What the bytes mean is not known here: a
`CallKind` reads them, the same that made the event's arguments and the reply when the call was answered.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

from .replies import Reply

DIGEST_BYTES = 4  # of a request: a worker that takes an id twice by mistake is told, nobody is kept out by it


@dataclass(frozen=True)
class CallKind:
    """The calls of one `method`, each the event of that name.

    arguments  of the event, from request, session id and time in ns; and the request's id
    reply      to the event's answer, as bytes, given those of the reply that was sent: what does not follow
               from the answer (the epoch) is taken from there
    """

    method: str
    event: str
    arguments: Callable[[bytes, str, int], tuple[str, tuple[Any, ...]]]
    reply: Callable[[Any, bytes], bytes]


CallKinds = Mapping[str, CallKind]
"""By method."""


class ToldCall(NamedTuple):
    """A record that is a call: method, whose it was, when, its request and its reply."""

    method: str
    session_id: str
    now_ns: int
    request: bytes
    reply: bytes

    @classmethod
    def of(cls, values: list[Any]) -> "ToldCall | None":
        """`values` of a record, if it is one of a call."""
        return cls(*values) if [*map(type, values)] == [str, str, int, bytes, bytes] else None

    def encoded(self) -> bytes:
        """As journal/codec.py writes values, but at once."""
        method, session_id = self.method.encode(), self.session_id.encode()
        return b"".join(
            (
                _text(b"s", len(method)),
                method,
                _text(b"s", len(session_id)),
                session_id,
                _number_and_bytes(b"i", self.now_ns, b"b", len(self.request)),
                self.request,
                _text(b"b", len(self.reply)),
                self.reply,
            )
        )

    def as_reply(self, request_id: str) -> Reply:
        """What a repeated request gets."""
        return Reply(
            self.session_id, request_id, digest_of(self.method, self.request), self.method, self.reply
        )


def digest_of(method: str, request: bytes) -> bytes:
    return crc32(request, _sum_of(method)).to_bytes(DIGEST_BYTES, "little")


@functools.cache
def _sum_of(method: str) -> int:
    return crc32(method.encode())


_text = Struct("<cI").pack
_number_and_bytes = Struct("<cqcI").pack
