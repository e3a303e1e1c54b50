"""Idempotency: a repeated request gets the first one's reply and changes nothing."""

import asyncio
from dataclasses import dataclass
from typing import Any

from kvd.errors import InvalidArgumentError, RequestReusedError
from kvd_daemon.journal import RecordingDevice, Reply

MAX_REQUEST_ID_CHARS = 128  # a UUID is 36


@dataclass(slots=True)
class Call:
    """One request: whose, by which id, a digest of its content, and what it asks for."""

    session_id: str
    request_id: str
    digest: bytes
    method: str


class Requests:
    """Those that were answered, which the device's journal keeps, and those under way."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self._under_way: dict[tuple[str, str], tuple[bytes, asyncio.Future[Any]]] = {}

    def known(self, call: Call) -> "bytes | asyncio.Future[Any] | None":
        """The reply to the first request of that id, or its reply to be. An empty id is never known.

        Raises RequestReusedError if that was another request.
        """
        if not call.request_id:
            return None
        if len(call.request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidArgumentError(
                f"request_id of {len(call.request_id)} characters; {MAX_REQUEST_ID_CHARS} allowed"
            )
        reply = self._device.replies.find(call.session_id, call.request_id)
        if reply is not None:
            _refuse_another(call, reply.digest)
            return reply.content
        under_way = self._under_way.get((call.session_id, call.request_id))
        if under_way is None:
            return None
        _refuse_another(call, under_way[0])
        return under_way[1]

    def begins(self, call: Call, outcome: "asyncio.Future[Any]") -> None:
        """It will be answered later. A request that fails is forgotten."""
        if call.request_id:
            key = call.session_id, call.request_id
            self._under_way[key] = call.digest, outcome
            outcome.add_done_callback(lambda done: self._under_way.pop(key, None))

    def answered(self, call: Call, content: bytes) -> None:
        """Call it in the batch of the events that led to the reply: it is kept with them."""
        if call.request_id:
            self._device.replied(Reply(call.session_id, call.request_id, call.digest, call.method, content))


def _refuse_another(call: Call, digest: bytes) -> None:
    if digest != call.digest:
        raise RequestReusedError(
            f"request_id {call.request_id!r} came with another request before; use a new id for every request"
        )
