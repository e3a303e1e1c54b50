"""Sessions by the hash of their secret token, their streams, and how they end: closed, gone, or expired."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvd.errors import (
    InvalidArgumentError,
    KvdError,
    NotOwnerError,
    PermissionDeniedError,
    SessionExpiredError,
    SessionNotFoundError,
    UnauthenticatedError,
)
from kvd.limits import MAX_CLIENT_NAME_CHARS
from kvd_daemon.access.gate import Gate
from kvd_daemon.core import Device, Progress, Session, SessionIdentity, SessionState
from kvd_daemon.fd_store import DescriptorStore

from .events import Ended, Event, Renewed
from .peers import Peer
from .tickets import Tickets

TOKEN_BYTES = 32  # 256 bits
SESSION_ID_BYTES = 6  # for people; unique enough for 4,096 sessions, and checked
MIN_STANDSTILL_NS = 250_000_000  # ns; less is how a busy machine runs, and time has to pass there too
STANDSTILLS_PER_TTL = 4  # a shorter one costs a worker one of its three renewals per TTL at most
MAX_OUTBOX_EVENTS = 1024  # per stream; a worker that reads none of them is cut off
LOG = logging.getLogger("kvd.sessions")


class Outbox:
    """Events on their way to one stream."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """A worker that does not read is cut off instead of filling memory."""
        if self._events.qsize() < MAX_OUTBOX_EVENTS:
            self._events.put_nowait(event)
        elif self._events.qsize() == MAX_OUTBOX_EVENTS:
            self._events.put_nowait(Ended())

    async def get(self) -> Event:
        return await self._events.get()


def hash_of(token: bytes) -> bytes:
    """What is kept of a token where it outlives the daemon."""
    return hashlib.sha256(token).digest()


def descriptor_of(session_id: str) -> str:
    """The name under which a session's pidfd outlives the daemon."""
    return f"session.{session_id}"


@dataclass(eq=False)
class OpenSession:
    """A session with its process and its stream; and its token, once a call has shown it."""

    session: Session
    peer: Peer
    outbox: Outbox
    token: bytes = field(default=b"", repr=False)

    @property
    def session_id(self) -> str:
        return self.session.session_id


@dataclass(frozen=True)
class Opening:
    """A session that was opened or resumed, and the token it answers to."""

    opened: OpenSession
    token: bytes = field(repr=False)
    resumed: bool


class Sessions:
    """All of a device's sessions."""

    def __init__(self, device: Device, ttl_ns: int, store: DescriptorStore, gate: Gate) -> None:
        self._device = device
        self._ttl_ns = ttl_ns
        self._store = store
        self._gate = gate
        self._by_hash: dict[bytes, OpenSession] = {}
        self._by_token: dict[bytes, OpenSession] = {}  # every call shows its token: it is hashed once
        self._beat_ns = time.monotonic_ns()
        self._tickets = Tickets()

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(self._by_hash.values())

    def adopt(self, session: Session, pidfd: int) -> None:
        """One that a daemon before this one opened: it waits to be resumed."""
        identity = session.identity
        try:
            peer = Peer(pidfd, identity.pid, identity.uid)
        except UnauthenticatedError:  # its process has ended since somebody looked
            self._device.session_gone(session.session_id)
            self._store.drop(descriptor_of(session.session_id))
        else:
            self._watch(OpenSession(session, peer, Outbox()))

    def issue_ticket(self, peer: Peer) -> bytes:
        return self._tickets.issue(peer, time.monotonic_ns())

    def redeem(self, ticket: bytes) -> Peer:
        """The process that asked for the ticket; the caller closes it. Raises TicketInvalidError."""
        return self._tickets.redeem(ticket, time.monotonic_ns())

    def open(self, ticket: bytes, client_name: str, resume_token: bytes) -> Opening:
        """A new session of the ticket's process, or its old one.

        Raises TicketInvalidError, PermissionDeniedError, SessionNotFoundError, SessionExpiredError,
        LimitExceededError, DeviceUnavailableError.
        """
        if len(client_name) > MAX_CLIENT_NAME_CHARS:
            raise InvalidArgumentError(
                f"client_name of {len(client_name)} characters; {MAX_CLIENT_NAME_CHARS} allowed"
            )
        peer = self.redeem(ticket)
        try:
            tenant = self._gate.worker_of(peer.uid, peer.gids).tenant
            if resume_token:
                resumed = self._resume(resume_token, peer, tenant)
                peer.close()
                return Opening(resumed, resume_token, True)
            self._check_room(tenant)
            return self._open(peer, tenant, client_name)
        except KvdError:
            peer.close()
            raise

    def _check_room(self, tenant: str) -> None:
        """Raises LimitExceededError if one more session of that tenant is too many."""
        own = sum(opened.session.tenant == tenant for opened in self)
        self._gate.limits.require("sessions", len(self._by_hash) + 1, "sessions")
        self._gate.limits.require("sessions_per_tenant", own + 1, f"sessions of tenant {tenant}")

    def _open(self, peer: Peer, tenant: str, client_name: str) -> Opening:
        """The pidfd is kept before there is a session: one without is one whose process is gone."""
        session_id, token = secrets.token_hex(SESSION_ID_BYTES), secrets.token_bytes(TOKEN_BYTES)
        identity = SessionIdentity(session_id, tenant, peer.pid, peer.uid, client_name, hash_of(token))
        self._store.put(descriptor_of(session_id), peer.pidfd)
        try:
            session = self._device.open_session(identity, self._ttl_ns, time.monotonic_ns())
        except KvdError:
            self._store.drop(descriptor_of(session_id))
            raise
        opened = OpenSession(session, peer, Outbox())
        self._watch(opened)
        LOG.info("session %s of pid %d (%r) opens", session_id, peer.pid, client_name)
        return Opening(opened, token, False)

    def _watch(self, opened: OpenSession) -> None:
        self._by_hash[opened.session.identity.token_hash] = opened
        opened.peer.watch(lambda: self._process_gone(opened))

    def _resume(self, token: bytes, peer: Peer, tenant: str) -> OpenSession:
        opened = self.by_token(token)
        if opened.peer.identity != peer.identity:
            raise NotOwnerError("only the session's own process may resume it; open a new session")
        _refuse_other_tenant(opened, tenant)
        self._device.renew(opened.session_id, (), time.monotonic_ns())
        opened.peer.gids = peer.gids
        opened.outbox.put(Ended())
        opened.outbox = Outbox()
        return opened

    def by_token(self, token: bytes) -> OpenSession:
        """Raises SessionNotFoundError."""
        self._excuse(time.monotonic_ns())
        opened = self._by_token.get(token)
        if opened is None:
            opened = self._by_hash.get(hash_of(token))
            if opened is None:
                raise SessionNotFoundError("unknown session token; open a new session")
            opened.token, self._by_token[token] = token, opened
        return opened

    def renew(self, opened: OpenSession, progress: Sequence[Progress]) -> None:
        """Raises what Device.renew does."""
        self._excuse(time.monotonic_ns())
        self._device.renew(opened.session_id, progress, time.monotonic_ns())
        opened.outbox.put(Renewed())

    def stream_lost(self, opened: OpenSession, outbox: Outbox) -> None:
        """Its leases stay until the TTL; unless another stream has taken over, or it is over anyway."""
        if not self._has(opened) or opened.outbox is not outbox:
            return
        self._excuse(time.monotonic_ns())
        if opened.session.is_over(time.monotonic_ns()):
            return
        self._device.detach(opened.session_id, time.monotonic_ns())
        LOG.info("session %s lost its stream", opened.session_id)

    def close_session(self, opened: OpenSession) -> None:
        """The worker's own word that it has stopped writing."""
        if self._has(opened):
            reclaimed = self._device.close_session(opened.session_id)
            LOG.info("session %s closes: %d blocks back", opened.session_id, reclaimed.block_count)
            self._end(opened, None)

    def _has(self, opened: OpenSession) -> bool:
        return self._by_hash.get(opened.session.identity.token_hash) is opened

    def _process_gone(self, opened: OpenSession) -> None:
        reclaimed = self._device.session_gone(opened.session_id)
        LOG.info(
            "pid %d of session %s is gone: %d blocks back",
            opened.peer.pid,
            opened.session_id,
            reclaimed.block_count,
        )
        self._end(opened, SessionNotFoundError("the session's process is gone"))

    def _end(self, opened: OpenSession, error: KvdError | None) -> None:
        """The pidfd is kept until there is no session any more."""
        self._store.drop(descriptor_of(opened.session_id))
        self._forget(opened, error)

    def _forget(self, opened: OpenSession, error: KvdError | None) -> None:
        del self._by_hash[opened.session.identity.token_hash]
        self._by_token.pop(opened.token, None)
        opened.peer.close()
        opened.outbox.put(Ended(error))

    def expire(self) -> None:
        """Fence what was not renewed in time, and tell the streams. To be called often: it is the beat."""
        now_ns = time.monotonic_ns()
        self._excuse(now_ns)
        self._beat_ns = now_ns
        self._tickets.expire(now_ns)
        due = [
            opened
            for opened in self
            if opened.session.state is not SessionState.EXPIRED and opened.session.is_over(now_ns)
        ]
        if not due:  # nothing happens, so nothing is written down
            return
        for lease in self._device.expire(now_ns):
            LOG.warning("lease %d of session %s expired", lease.lease_id, lease.session_id)
        for opened in due:
            opened.outbox.put(
                Ended(SessionExpiredError("the session was not renewed in time; open a new one"))
            )

    def _excuse(self, now_ns: int) -> None:
        """While this process stood still it heard nobody: that is no silence of its workers'."""
        stood_ns = now_ns - self._beat_ns
        if stood_ns > max(self._ttl_ns // STANDSTILLS_PER_TTL, MIN_STANDSTILL_NS):
            LOG.warning("stood still for %.1f s: sessions live so much longer", stood_ns / 1e9)
            self._beat_ns = now_ns
            self._device.excuse(stood_ns)

    def judge_again(self) -> None:
        """After the rules changed: who may be a worker no more, or is another tenant now, loses its stream.

        From then on its TTL runs, since it cannot resume.
        """
        for opened in self:
            if opened.peer.gids:
                try:
                    principal = self._gate.worker_of(opened.peer.uid, opened.peer.gids)
                    _refuse_other_tenant(opened, principal.tenant)
                except (PermissionDeniedError, SessionNotFoundError) as error:
                    LOG.warning("session %s ends: %s", opened.session_id, error)
                    opened.outbox.put(Ended(error))

    def tell_all(self, event: Event) -> None:
        for opened in self:
            opened.outbox.put(event)

    def tell(self, session_id: str, event: Event) -> None:
        """Nobody, if it is gone."""
        for opened in self:
            if opened.session_id == session_id:
                opened.outbox.put(event)

    def close(self) -> None:
        """The daemon ends: streams end, pidfds close. What outlives it, does."""
        for opened in list(self):
            self._forget(opened, None)
        self._tickets.close()


def _refuse_other_tenant(opened: OpenSession, tenant: str) -> None:
    """Raises SessionNotFoundError, which makes clients open a new session."""
    if opened.session.tenant != tenant:
        raise SessionNotFoundError(
            f"the session is tenant {opened.session.tenant}'s, and its process {tenant}'s now; open a new one"
        )
