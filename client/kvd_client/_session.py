"""A worker's session: the calls made in its name, and what it holds."""

import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

import grpc

from kvd.errors import (
    ClosedError,
    KvdError,
    LeaseBusyError,
    LeaseExpiredError,
    LeaseLostError,
    LeaseNotFoundError,
    NotOwnerError,
    PoolNotFoundError,
    SessionExpiredError,
    SessionNotFoundError,
    UnavailableError,
)
from kvd.v1 import kvd_pb2 as pb
from kvd.v1 import kvd_pb2_grpc as rpc
from kvd_client._endpoint import Endpoint
from kvd_client._errors import from_rpc_error
from kvd_client._events import Draining, Events, LeaseRevoked, Offer, Offers, Pressure, SessionLost
from kvd_client._fork import keep_in_children
from kvd_client._stream import FIRST_PAUSE_S, MAX_PAUSE_S, Identity, SessionStream

MAX_MESSAGE_BYTES = 64 << 20  # a lease of 1 M scattered blocks is about 10 MB
MAX_RELEASED_AT_ONCE = 1024  # leases; the daemon's limit for one call
SETTLE_S = 2.0  # for leases that nobody holds, after each renewal; events wait for that
RESTARTED_S = 2.0  # for a question about each pool after a restart; its events wait for that
MIN_TIMEOUT_S = 0.001  # a deadline that has passed still goes to gRPC, which then says so

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # else two clients of one process share a connection
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 2000),  # also for how long a socket may accept and say nothing
]


class SessionRequest(Protocol):
    """Every changing request of the wire."""

    session_token: bytes
    request_id: str


class Dependent(Protocol):
    """A lease or pool: made in one session, useless after it."""

    def lose(self, cause: KvdError) -> None: ...


class PoolDependent(Dependent, Protocol):
    """A pool: of no use either when the device has lost its memory."""

    name: str
    pool_id: str

    def lose_memory(self, cause: str) -> None: ...
    def settle(self, deadline: float) -> None: ...


class LeaseDependent(Dependent, Protocol):
    """A lease, as its session sees it."""

    wanted_floor: int

    def revoke(self, cause: str) -> None: ...
    def give_away(self, cause: KvdError) -> None: ...
    def unsaid_progress(self) -> pb.LeaseProgress | None: ...


Answer = TypeVar("Answer")
Question = TypeVar("Question")
Request = TypeVar("Request", bound=SessionRequest)
RpcMethod = Callable[..., Answer]


def new_request_id() -> str:
    """For a changing call: repeated with the same id it is carried out once."""
    return uuid.uuid4().hex


class Session:
    """Thread-safe. `timeout_s` is the deadline of calls that name none."""

    def __init__(self, endpoint: Endpoint, name: str, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(endpoint.grpc_target, options=CHANNEL_OPTIONS)
        self.lease_service = rpc.LeaseServiceStub(self._channel)
        self.share_service = rpc.ShareServiceStub(self._channel)
        self.pool_service = rpc.PoolServiceStub(self._channel)
        self._stream = SessionStream(endpoint, name, self._channel, self)
        self._held = threading.Lock()
        self._pools: weakref.WeakSet[PoolDependent] = weakref.WeakSet()
        self._leases: weakref.WeakValueDictionary[int, LeaseDependent] = weakref.WeakValueDictionary()
        self._closed = False
        self._orphans: deque[tuple[int, str]] = deque()
        self.check_usable = self._stream.check_usable
        self.events = Events(self.check_usable)
        self.offers = Offers(self.check_usable)
        self._pid = os.getpid()
        keep_in_children(self)

    @property
    def is_foreign(self) -> bool:
        """True in a forked child, which must leave everything alone."""
        return os.getpid() != self._pid

    def start(self) -> None:
        """Open the session. Raises UnavailableError, DeadlineExceededError; it is closed then."""
        self._stream.start()
        try:
            self.connected()
        except KvdError:
            self.abandon()
            raise

    def connected(self, deadline: float | None = None) -> Identity:
        """The session, once it is open. Raises the latest failure if it is not in time."""
        return self._stream.connected(self.deadline() if deadline is None else deadline)

    def close(self) -> None:
        """Release everything and end the session. Harmless twice and in a forked child."""
        if not self.is_foreign and not self._closed:
            self._closed = True
            if self._stream.close():
                self._channel.close()

    def abandon(self) -> None:
        """As `close`, but without waiting for anybody."""
        if not self.is_foreign and not self._closed:
            self._closed = True
            self._stream.abandon()

    def call(
        self,
        method: "RpcMethod[Answer]",
        request: Request,
        check: Callable[[], None],
        deadline: float | None = None,
    ) -> Answer:
        """Carry out a changing request once, whatever breaks meanwhile.

        `check` raises if what the request is about is gone. Raises that, the daemon's error,
        UnavailableError or DeadlineExceededError (then it may or may not have been carried out).
        """
        deadline = self.deadline() if deadline is None else deadline
        self._release_orphans(deadline)
        return self._carry_out(method, request, check, deadline)

    def ask(self, method: "RpcMethod[Answer]", request: Question, deadline: float) -> Answer:
        """Carry out a request that changes nothing. Raises the daemon's error, or as `call`."""
        pause_s = FIRST_PAUSE_S
        while True:
            self.check_usable()
            try:
                return self.attempt(method, request, deadline)
            except UnavailableError as failure:
                pause_s = self._pause(failure, pause_s, deadline)

    def _carry_out(
        self, method: "RpcMethod[Answer]", request: Request, check: Callable[[], None], deadline: float
    ) -> Answer:
        pause_s = FIRST_PAUSE_S
        while True:
            self.check_usable()
            identity = self._stream.connected(deadline)
            check()
            request.session_token = identity.token
            try:
                return self.attempt(method, request, deadline)
            except (SessionNotFoundError, SessionExpiredError) as failure:
                self._stream.drop(identity, failure)
            except UnavailableError as failure:
                pause_s = self._pause(failure, pause_s, deadline)

    def attempt(self, method: "RpcMethod[Answer]", request: Question, deadline: float) -> Answer:
        """One try. Raises the daemon's error, UnavailableError, DeadlineExceededError, ClosedError."""
        failure: KvdError
        try:
            return method(request, timeout=max(MIN_TIMEOUT_S, deadline - time.monotonic()))
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
        except ValueError:  # gRPC's word for a channel that was closed
            failure = ClosedError("this client was closed during a call")
        raise failure

    def _pause(self, failure: UnavailableError, pause_s: float, deadline: float) -> float:
        """Wait before the next attempt; answers the pause after that. Raises `failure` if time is up."""
        pause_s = max(pause_s, (failure.retry_after_ns or 0) / 1e9)
        if time.monotonic() + pause_s >= deadline:
            raise failure
        self._stream.pause(pause_s)
        return min(2 * pause_s, MAX_PAUSE_S)

    def deadline(self, timeout_s: float | None = None) -> float:
        """Of a call that begins now: all that it takes ends by then. In time.monotonic()'s seconds."""
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    # What it holds.

    def adopt_pool(self, pool: PoolDependent, session_id: str) -> None:
        """From now on `pool` is told when this session is lost; at once if it is another one by now."""
        with self._held:
            self._pools.add(pool)
        if not self._is_current(session_id):
            pool.lose(ClosedError("the session ended while this pool was attached; call client.pool() again"))

    def adopt_lease(self, lease_id: int, lease: LeaseDependent, session_id: str) -> None:
        """From now on `lease` is renewed, and told what happens to it.

        It may have been this session's before, and published by a call that broke off: what is left of that
        has nothing to release.
        """
        with self._held:
            earlier = self._leases.get(lease_id)
            self._leases[lease_id] = lease
            for _ in range(self._orphans.count((lease_id, session_id))):
                self._orphans.remove((lease_id, session_id))
        if earlier is not None:
            earlier.give_away(ClosedError(f"lease {lease_id} was published, and adopted again here"))
        if not self._is_current(session_id):
            lease.lose(LeaseLostError("the session of this lease ended while it was made; prefill again"))

    def _is_current(self, session_id: str) -> bool:
        identity = self._stream.identity
        return identity is not None and identity.session_id == session_id

    def orphan(self, lease_id: int, session_id: str) -> None:
        """Release this lease with the next call. Never blocks: garbage collection calls it."""
        self._orphans.append((lease_id, session_id))

    def release_orphans(self, deadline: float | None = None) -> None:
        """Release what nobody holds any more, in one call. What cannot be released now stays for later."""
        self._release_orphans(self.deadline() if deadline is None else deadline)

    def _release_orphans(self, deadline: float) -> None:
        identity = self._stream.identity
        lease_ids: list[int] = []
        with self._held:
            while self._orphans and len(lease_ids) < MAX_RELEASED_AT_ONCE:
                lease_id, session_id = self._orphans.popleft()
                if identity is not None and identity.session_id == session_id:
                    lease_ids.append(lease_id)
        if lease_ids and identity is not None:
            self._release(lease_ids, identity, deadline)

    def _release(self, lease_ids: list[int], identity: Identity, deadline: float) -> None:
        request = pb.ReleaseRequest(
            session_token=identity.token, request_id=new_request_id(), lease_ids=lease_ids
        )
        try:
            self.attempt(self.lease_service.Release, request, deadline)
        except (LeaseNotFoundError, NotOwnerError):  # it was released, or published, by a call that broke off
            self._release_each(lease_ids, identity, deadline)
        except LeaseBusyError:
            if len(lease_ids) == 1:
                return self.orphan(lease_ids[0], identity.session_id)
            self._release_each(lease_ids, identity, deadline)
        except KvdError:
            for lease_id in lease_ids:
                self.orphan(lease_id, identity.session_id)

    def _release_each(self, lease_ids: list[int], identity: Identity, deadline: float) -> None:
        """So that one that is gone or busy does not keep the others."""
        if len(lease_ids) > 1:
            for lease_id in lease_ids:
                self._release([lease_id], identity, deadline)

    # What the stream tells.

    def renewal(self) -> pb.RenewSession:
        """How far the leases are filled, as far as the daemon does not know it."""
        with self._held:
            leases = list(self._leases.values())
        said = [lease.unsaid_progress() for lease in leases]
        return pb.RenewSession(progress=[progress for progress in said if progress is not None])

    def receive(self, response: pb.ConnectResponse) -> None:
        """Pass an event on."""
        match response.WhichOneof("event"):
            case "revoked":
                lease = self._leases.get(response.revoked.lease_id)
                if lease is not None:
                    lease.revoke(response.revoked.cause)
                self.events.put(LeaseRevoked(response.revoked.lease_id, response.revoked.cause))
            case "renewed":
                self._settle()
            case "pressure":
                self._pressed(response.pressure)
            case "offered":
                offered = response.offered
                self.offers.put(Offer(offered.pool, offered.key, offered.lease_id))
            case "draining":
                self.events.put(Draining())

    def _pressed(self, pressure: pb.Pressure) -> None:
        """Every lease that would help knows it, whoever reads the events."""
        for compressible in pressure.compressible:
            lease = self._leases.get(compressible.lease_id)
            if lease is not None:
                lease.wanted_floor = compressible.floor_tokens
        asked = tuple(compressible.lease_id for compressible in pressure.compressible)
        self.events.put(Pressure(pressure.pool, pressure.wanted_blocks, asked))

    def _settle(self) -> None:
        """Give back what calls that broke off left with nobody: a worker may make no further call."""
        deadline = self.deadline(SETTLE_S)
        with self._held:
            pools = list(self._pools)
        for pool in pools:
            pool.settle(deadline)
        if self._orphans:
            self._release_orphans(deadline)

    def restarted(self) -> None:
        """Another daemon knows the session. What it has no memory of is of no use any more."""
        with self._held:
            pools = list(self._pools)
        for pool in pools:
            try:
                found = self.attempt(
                    self.pool_service.GetPool,
                    pb.GetPoolRequest(name=pool.name),
                    self.deadline(RESTARTED_S),
                )
            except PoolNotFoundError:
                pool.lose_memory(f"the memory of pool {pool.name!r} ended with the daemon")
            except KvdError:
                return  # it left again, or says so when the pool is used
            else:
                if found.pool.pool_id != pool.pool_id:
                    pool.lose_memory(f"pool {pool.name!r} is another one by now")

    def lost(self, identity: Identity, failure: KvdError) -> None:
        """The session is gone, and with it all it held."""
        with self._held:
            pools, leases = list(self._pools), list(self._leases.values())
            self._pools.clear()
            self._leases.clear()
        gone = LeaseExpiredError if isinstance(failure, SessionExpiredError) else LeaseLostError
        for lease in leases:
            lease.lose(gone(f"the session of this lease is gone ({failure}); prefill again"))
        for pool in pools:
            pool.lose(ClosedError(f"the session of this pool is gone ({failure}); call client.pool() again"))
        self.offers.lose(str(failure))
        self.events.put(SessionLost(identity.session_id, str(failure)))
