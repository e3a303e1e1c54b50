"""Idempotency: a repeated request gets the first one's reply and changes nothing."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvd.errors import InvalidArgumentError, RequestReusedError

MAX_REPLIES = 256  # per session; a worker repeats a call within seconds, or never
MAX_REQUEST_ID_CHARS = 128  # a UUID is 36

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class _Known(Generic[Reply]):
    digest: bytes
    outcome: "Reply | asyncio.Future[Reply]"


class Replies(Generic[Reply]):
    """One session's replies by request id, the oldest forgotten first. Failed requests are not kept."""

    def __init__(self, limit: int = MAX_REPLIES) -> None:
        self._limit = limit
        self._known: OrderedDict[str, _Known[Reply]] = OrderedDict()

    def once(
        self, request_id: str, digest: bytes, act: "Callable[[], Reply | asyncio.Future[Reply]]"
    ) -> "Reply | asyncio.Future[Reply]":
        """What `act` answers, or answered when it was asked the same before; a future while it is at it.

        An empty id is never remembered. Raises RequestReusedError if the id came with another digest.
        """
        if not request_id:
            return act()
        known = self._known.get(request_id)
        if known is None:
            return self._first(request_id, digest, act)
        if known.digest != digest:
            raise RequestReusedError(
                f"request_id {request_id!r} came with another request before; use a new id for every request"
            )
        return known.outcome

    def _first(
        self, request_id: str, digest: bytes, act: "Callable[[], Reply | asyncio.Future[Reply]]"
    ) -> "Reply | asyncio.Future[Reply]":
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise InvalidArgumentError(
                f"request_id of {len(request_id)} characters; {MAX_REQUEST_ID_CHARS} allowed"
            )
        outcome = act()
        self._known[request_id] = _Known(digest, outcome)
        if isinstance(outcome, asyncio.Future):
            outcome.add_done_callback(lambda done: self._settle(request_id, done))
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        return outcome

    def _settle(self, request_id: str, done: "asyncio.Future[Reply]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._known.pop(request_id, None)
