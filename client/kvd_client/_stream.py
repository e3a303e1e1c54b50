"""The one stream that keeps a session alive, and the thread that owns it.

When the stream breaks, the thread resumes the session, or opens a new one if the daemon does not know the
old one any more; the owner is then told that all it had is lost.
"""

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from kvd.errors import (
    ClosedError,
    DeviceUnavailableError,
    ForkedClientError,
    KvdError,
    SessionExpiredError,
    SessionNotFoundError,
)
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc as rpc
from kvd_client._attach import ask_ticket
from kvd_client._endpoint import Endpoint
from kvd_client._errors import from_rpc_error

FIRST_PAUSE_S = 0.02  # between attempts; a daemon that restarts is back within two seconds
MAX_PAUSE_S = 0.2  # between attempts, after doubling
RENEWALS_PER_TTL = 3  # two may be lost
FIRST_RENEWAL_S = 1.0  # before the TTL is known
ATTACH_S = 5.0  # for one ticket; a daemon answers in milliseconds
CLOSE_S = 2.0  # how long close() waits for the daemon's goodbye

Outbox = queue.SimpleQueue[pb.ConnectRequest | None]


@dataclass(frozen=True)
class Identity:
    """One session as the daemon knows it."""

    session_id: str
    epoch: str
    tenant: str
    ttl_s: float
    token: bytes = field(repr=False)


class Cancellable(Protocol):
    """A gRPC call, of which more is not needed."""

    def cancel(self) -> bool: ...


class StreamOwner(Protocol):
    """Called in the stream's threads."""

    def renewal(self) -> pb.RenewSession: ...
    def receive(self, response: pb.ConnectResponse) -> None: ...
    def restarted(self) -> None: ...
    def lost(self, identity: Identity, failure: KvdError) -> None: ...


class SessionStream:
    """Thread-safe."""

    def __init__(self, endpoint: Endpoint, name: str, channel: grpc.Channel, owner: StreamOwner) -> None:
        self._endpoint = endpoint
        self._name = name
        self._service = rpc.SessionServiceStub(channel)
        self._owner = owner
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._identity: Identity | None = None
        self._connected = False
        self._closing = threading.Event()
        self._failure: KvdError = DeviceUnavailableError(f"no answer from {endpoint.directory} yet")
        self._outbox: Outbox = queue.SimpleQueue()
        self._call: Cancellable | None = None
        self._thread = threading.Thread(target=self._keep_connected, name="kvd-session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def identity(self) -> Identity | None:
        """The session while there is one, connected or about to be resumed."""
        return self._identity

    def check_usable(self) -> None:
        """Raises ForkedClientError in a forked child, ClosedError after close()."""
        if os.getpid() != self._pid:
            raise ForkedClientError(
                f"this client belongs to process {self._pid}, which forked; call kvd_client.connect() here"
            )
        if self._closing.is_set():
            raise ClosedError("this client is closed; call kvd_client.connect() again")

    def connected(self, deadline: float) -> Identity:
        """The session, once it is open. Raises the latest failure if it is not until the deadline."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._connected or self._closing.is_set(), max(0.0, deadline - time.monotonic())
            )
            self.check_usable()
            if self._connected and self._identity is not None:
                return self._identity
            raise self._failure.with_traceback(None)

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the client is closed."""
        self._closing.wait(seconds)

    def drop(self, identity: Identity, failure: KvdError) -> None:
        """A call was told that this session is gone: lose it and open a new one."""
        if self._lose(identity, failure):
            self._cancel()

    def close(self) -> bool:
        """End the session; True if the stream has ended. A daemon that does not answer now hears it later:
        cancelling the stream could overtake the goodbye."""
        self._set_closing()
        if not self._connected:
            self.abandon()
        self._outbox.put(pb.ConnectRequest(close=pb.CloseSession()))
        self._outbox.put(None)
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Stop without a word and without waiting; the daemon takes the leases back after the TTL."""
        self._set_closing()
        self._outbox.put(None)
        self._cancel()

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _set_closing(self) -> None:
        with self._changed:
            self._closing.set()
            self._changed.notify_all()

    def _keep_connected(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            identity = self._identity
            opened_at = time.monotonic()
            try:
                self._run(identity)
                self._failure = DeviceUnavailableError("the daemon ended the session; it may be restarting")
            except KvdError as failure:
                self._failure = failure
                if identity is not None and isinstance(failure, SessionNotFoundError | SessionExpiredError):
                    self._lose(identity, failure)
                    continue
            self._closing.wait(pause_s)
            short_lived = time.monotonic() - opened_at < MAX_PAUSE_S + pause_s
            pause_s = min(2 * pause_s, MAX_PAUSE_S) if short_lived else FIRST_PAUSE_S

    def _run(self, identity: Identity | None) -> None:
        """Open or resume the session and receive until the stream ends. Raises why it ended."""
        ticket = ask_ticket(self._endpoint.attach_path, ATTACH_S)
        resume_token = identity.token if identity else b""
        opening = pb.OpenSession(ticket=ticket, client_name=self._name, resume_token=resume_token)
        outbox: Outbox = queue.SimpleQueue()
        self._outbox = outbox
        call = self._service.Connect(self._messages(pb.ConnectRequest(open=opening), outbox))
        self._call = call
        if self._closing.is_set():
            self._cancel()
        try:
            for response in call:
                if response.WhichOneof("event") == "opened":
                    self._opened(response.epoch, response.opened)
                else:
                    self._owner.receive(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            outbox.put(None)
            self._connected = False

    def _messages(self, opening: pb.ConnectRequest, outbox: Outbox) -> Iterator[pb.ConnectRequest]:
        """What is sent: the opening, then renewals in time, until the outbox says that it is the end."""
        yield opening
        while True:
            try:
                message = outbox.get(timeout=self._renewal_s())
            except queue.Empty:
                message = pb.ConnectRequest(renew=self._owner.renewal())
            if message is None:
                return
            yield message

    def _renewal_s(self) -> float:
        identity = self._identity
        return identity.ttl_s / RENEWALS_PER_TTL if identity else FIRST_RENEWAL_S

    def _opened(self, epoch: str, opened: pb.SessionOpened) -> None:
        before = self._identity
        if before is not None and not opened.resumed:
            self._lose(before, SessionNotFoundError("the daemon restarted and does not know this session"))
        ttl_s = opened.ttl.ToNanoseconds() / 1e9
        identity = Identity(opened.session_id, epoch, opened.tenant, ttl_s, opened.session_token)
        with self._changed:
            self._identity, self._connected = identity, True
            self._changed.notify_all()
        self._outbox.put(
            pb.ConnectRequest(renew=self._owner.renewal())
        )  # the next ones follow at its TTL's pace
        if before is not None and before.session_id == identity.session_id and before.epoch != epoch:
            self._owner.restarted()

    def _lose(self, identity: Identity, failure: KvdError) -> bool:
        """Tell the owner, once. False if it was told before."""
        with self._changed:
            if self._identity is not identity:
                return False
            self._identity, self._connected = None, False
        self._owner.lost(identity, failure)
        return True
