"""A Device that writes every event down, in records that outlive its process."""

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvd_daemon.core import Device, Limits
from kvd_daemon.core.image import capture

from .codec import encode, encode_tuple
from .log import Journal
from .records import EVENTS, digest, encoded_reply
from .replies import Replies, Reply
from .snapshots import Moment

TAKES = {
    *("create_pool", "open_session", "lease", "extend", "seal", "begin_compress", "begin_observe"),
    *("match", "pin", "publish", "adopt"),
}
"""Events that may be refused when the journal has no room; all others end something, or tell what is so."""


class RecordingDevice(Device):
    """A Device with a journal, or without one ("volatile"): then nothing outlives it.

    Its methods are those of Device; when one returns, what it did is durable. An error was raised before
    anything was written, UnavailableError also when there would have been no room to write.
    """

    def __init__(self, memory_bytes: int, limits: Limits | None = None) -> None:
        super().__init__(memory_bytes, limits)
        self.journal: Journal | None = None
        self.replies = Replies()
        self._batch = Batch(self._write)
        self._written: list[bytes] = []

    def batch(self) -> "Batch":
        """`with device.batch():` makes one record of the events inside and their reply. Never await there."""
        return self._batch

    def replied(self, reply: Reply) -> None:
        """The reply belongs to the events of the batch: a repeated request gets it, after a restart too."""
        self.replies.keep(reply, self.sessions)
        if self.journal is not None:
            self._batch.reply = encoded_reply(reply)
            if not self._batch.depth:
                self._write()

    def moment(self) -> Moment:
        """Everything there is to know of it."""
        return Moment(capture(self), self.replies.kept(self.sessions))

    def rehearse(self, now_ns: int) -> None:
        """Whether a lease would be granted, and whether it could be written down."""
        if self.journal is not None:
            self.journal.require_room()
        super().rehearse(now_ns)

    def happened(self, event: bytes) -> None:
        """An event was carried out: its name, arguments and digest."""
        if self._batch.depth:
            self._written.append(event)
        elif self.journal is not None:
            self.journal.append(event)

    def _write(self) -> None:
        batch, parts = self._batch, self._written
        if batch.reply:
            parts.append(batch.reply)
            batch.reply = b""
        if parts and self.journal is not None:
            payload = b"".join(parts)
            parts.clear()
            self.journal.append(payload)


class Batch:
    """Batches may lie in each other; the outermost one writes."""

    __slots__ = ("_write", "depth", "reply")

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self.depth = 0
        self.reply = b""

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if not self.depth:
            self._write()


def _recorded(name: str, event: Callable[..., Any]) -> Callable[..., Any]:
    written_name, takes = encode(name), name in TAKES
    signature = inspect.signature(event)

    @functools.wraps(event)
    def recorded(device: RecordingDevice, *arguments: Any, **named: Any) -> Any:
        if device.journal is None:
            return event(device, *arguments, **named)
        if named:
            arguments = signature.bind(device, *arguments, **named).args[1:]
        if takes:
            device.journal.require_room()
        written = encode_tuple(arguments)  # before: what cannot be written must not happen
        answer = event(device, *arguments)
        device.happened(b"".join((written_name, written, encode(digest(answer)))))
        return answer

    return recorded


for _name, _event in EVENTS.items():
    setattr(RecordingDevice, _name, _recorded(_name, _event))
