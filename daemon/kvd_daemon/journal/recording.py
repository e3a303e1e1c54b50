"""A Device that writes every event down, in records that outlive its process."""

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvd_daemon.core import Device, Limits
from kvd_daemon.core.image import capture

from .calls import CallKinds, ToldCall
from .codec import encode, encode_tuple
from .log import Journal
from .records import EVENTS, digest, encoded_reply
from .replies import Replies, Reply
from .snapshots import Moment

TAKES = {
    *("create_pool", "open_session", "lease", "extend", "seal", "begin_compress", "begin_observe"),
    *(
        "match",
        "pin",
        "publish",
        "adopt",
        "fork",
        "begin_press",
        "begin_suspend",
        "begin_resume",
        "begin_restore",
        "begin_move",
        "begin_demotion",
        "begin_recall",
        "begin_spill",
        "begin_promotion",
    ),
}
"""Events that may be refused when the journal has no room; all others end something, or tell what is so."""


class RecordingDevice(Device):
    """A Device with a journal, or without one ("volatile"): then nothing outlives it.

    Its methods are those of Device; when one returns, what it did is durable. An error was raised before
    anything was written, UnavailableError also when there would have been no room to write.
    """

    def __init__(
        self, memory_bytes: int, limits: Limits | None = None, calls: CallKinds | None = None
    ) -> None:
        super().__init__(memory_bytes, limits)
        self.journal: Journal | None = None
        self.replies = Replies()
        self.call_kinds: CallKinds = calls or {}
        self._batch = Batch(self._write)
        self._written: list[bytes] = []

    def batch(self) -> "Batch":
        """`with device.batch():` makes one record of the events inside and their reply. Never await there."""
        return self._batch

    def call(self, session_id: str, method: str, request: bytes) -> "Batch":
        """As `batch`, for the events that a session's request leads to: its bytes tell of them in short."""
        batch = self._batch
        if not batch.depth:
            kind = self.call_kinds.get(method)
            if kind is not None:
                batch.event, batch.session_id, batch.method, batch.request = (
                    kind.event,
                    session_id,
                    method,
                    request,
                )
        return batch

    def replied(self, reply: Reply) -> None:
        """The reply belongs to the events of the batch: a repeated request gets it, after a restart too."""
        self.replies.keep(reply, self.sessions)
        if self.journal is not None:
            self._batch.reply = reply
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

    def carry_out(self, name: str, event: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """And write down what it was, with arguments and a digest of its answer."""
        batch = self._batch
        if batch.untold is not None:
            self._spell_out()
        if batch.event == name and not self._written:
            answer = event(self, *arguments)
            batch.untold = name, arguments, answer
            return answer
        written = encode_tuple(arguments)  # before: what cannot be written must not happen
        answer = event(self, *arguments)
        self._happened(b"".join((_NAMES[name], written, encode(digest(answer)))))
        return answer

    def _happened(self, event: bytes) -> None:
        if self._batch.depth:
            self._written.append(event)
        elif self.journal is not None:
            self.journal.append(event)

    def _spell_out(self) -> None:
        """The event that the call's request would have told of."""
        batch = self._batch
        assert batch.untold is not None, "there is one"
        name, arguments, answer = batch.untold
        batch.untold, batch.event = None, ""
        self._written.append(b"".join((_NAMES[name], encode_tuple(arguments), encode(digest(answer)))))

    def _write(self) -> None:
        """What happened in a batch that is over."""
        batch, parts = self._batch, self._written
        if batch.untold is not None:
            reply, now_ns = batch.reply, batch.untold[1][-1]
            if reply is not None and reply.session_id == batch.session_id and reply.method == batch.method:
                told = ToldCall(batch.method, batch.session_id, now_ns, batch.request, reply.content)
                parts.append(told.encoded())
                batch.reply = batch.untold = None
            else:
                self._spell_out()
        batch.event = ""
        if batch.reply is not None:
            parts.append(encoded_reply(batch.reply))
            batch.reply = None
        if parts and self.journal is not None:
            payload = b"".join(parts)
            parts.clear()
            self.journal.append(payload)


class Batch:
    """Batches may lie in each other; the outermost one writes.

    `event` is what the call under way will lead to, `untold` that event once it was carried out: its name,
    arguments and answer. Its record is the request and the reply, if nothing else happens in this batch.
    """

    __slots__ = ("_write", "depth", "event", "method", "reply", "request", "session_id", "untold")

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self.depth = 0
        self.event = self.session_id = self.method = ""
        self.request = b""
        self.reply: Reply | None = None
        self.untold: tuple[str, tuple[Any, ...], Any] | None = None

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if not self.depth:
            self._write()


def _recorded(name: str, event: Callable[..., Any]) -> Callable[..., Any]:
    takes, signature = name in TAKES, inspect.signature(event)

    @functools.wraps(event)
    def recorded(device: RecordingDevice, *arguments: Any, **named: Any) -> Any:
        if device.journal is None:
            return event(device, *arguments, **named)
        if named:
            arguments = signature.bind(device, *arguments, **named).args[1:]
        if takes:
            device.journal.require_room()
        return device.carry_out(name, event, arguments)

    return recorded


_NAMES = {name: encode(name) for name in EVENTS}
for _name, _event in EVENTS.items():
    setattr(RecordingDevice, _name, _recorded(_name, _event))
