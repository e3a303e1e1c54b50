"""The attach socket: who is there (SO_PEERCRED), a ticket for gRPC, and memory as descriptors.

SOCK_SEQPACKET: one packet is one AttachRequest, one packet back is its AttachResponse. A peer that is slow,
silent or talks nonsense costs nobody else anything.
"""

import asyncio
import itertools
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from kvd.errors import (
    InternalError,
    InvalidArgumentError,
    KvdError,
    LimitExceededError,
    NotOwnerError,
    PoolNotFoundError,
)
from kvd.v1 import attach_pb2 as pb
from kvd_daemon.access.audit import REFUSALS, Caller
from kvd_daemon.engine.connections import Owner
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.peers import Peer
from kvd_daemon.processes import peer_credentials

MAX_PACKET_BYTES = 4096  # bytes; a token and a pool's name are below 200
MAX_CONNECTIONS = 256  # at a time; beyond, the longest silent one of the user that has most is closed
CONNECTIONS_PER_PROCESS = 64  # of them; beyond, its own longest silent one is. A worker has one for a moment
KNOCKS_PER_SECOND = 1000  # of one process; one that starts a client in each of many threads stays below
ACCEPTED_AT_ONCE = 16  # connections; then it is the turn of who was accepted, and of all calls
SILENCE_S = 30.0  # seconds after which a silent connection is closed; workers ask and leave
RETRY_ACCEPT_S = 0.1  # seconds before the next attempt when no descriptor is left for a connection
BACKLOG = 1024  # connections not yet accepted; a node's workers may all start at once
LOG = logging.getLogger("kvd.attach")


class AttachServer:
    """Listens from construction to `close`; `run` serves."""

    def __init__(self, engine: Engine, path: Path) -> None:
        """Raises InvalidArgumentError if nothing can be bound there."""
        self._engine = engine
        self._path = path
        self._connections: dict[asyncio.Task[None], Owner] = {}  # the longest silent first
        self._knocks: Counter[Owner] = Counter()
        self._knocks_since_s = 0.0
        self._listener = _bound(path)
        self._accepting: asyncio.Task[None] | None = None

    def bind_again(self) -> None:
        """At the same path, where somebody deleted the socket. Raises as the constructor."""
        self._listener = _bound(self._path)
        if self._accepting is not None:
            self._accepting.cancel()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with self._listener as listener:
                self._accepting = asyncio.create_task(self._accept(listener))
                try:
                    await asyncio.wait([self._accepting])
                finally:
                    self._accepting.cancel()
            if not self._accepting.cancelled():
                self._accepting.result()

    async def _accept(self, listener: socket.socket) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            if number % ACCEPTED_AT_ONCE == 0:  # while others knock, nothing else lets go of the loop
                await asyncio.sleep(0)
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors: whoever knocks stays in the backlog
                LOG.warning("no connection is accepted for now: %s", error.strerror)
                self._close_longest_silent()
                await asyncio.sleep(RETRY_ACCEPT_S)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        pid, uid = peer_credentials(connection)
        if self._knocks_too_often((uid, pid), connection):
            connection.close()
            return
        own = [task for task, owner in self._connections.items() if owner == (uid, pid)]
        if len(own) >= CONNECTIONS_PER_PROCESS and pid > 0:
            self._close(own[0])
        elif len(self._connections) >= MAX_CONNECTIONS:
            self._close_longest_silent()
        task = self._engine.spawn(self._serve(connection))
        self._connections[task] = uid, pid
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    def _knocks_too_often(self, owner: Owner, connection: socket.socket) -> bool:
        """Then it is sent away at once: whoever waits behind it in the queue has its turn sooner."""
        now_s = time.monotonic()
        if now_s > self._knocks_since_s + 1.0:
            self._knocks_since_s, self._knocks = now_s, Counter()
        self._knocks[owner] += 1
        if self._knocks[owner] == KNOCKS_PER_SECOND + 1:
            refusal = LimitExceededError(f"more than {KNOCKS_PER_SECOND} connections within a second")
            self._engine.gate.audit.refused(_caller_of(connection), "connect", refusal)
        return self._knocks[owner] > KNOCKS_PER_SECOND

    def _close_longest_silent(self) -> None:
        """Of the user that has most: what one does is no other one's loss."""
        if self._connections:
            [(most, _)] = Counter(uid for uid, _ in self._connections.values()).most_common(1)
            self._close(next(task for task, (uid, _) in self._connections.items() if uid == most))

    def _close(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        task.cancel()

    def close(self) -> None:
        self._listener.close()
        for task in self._connections:
            task.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            try:
                while packet := await asyncio.wait_for(
                    loop.sock_recv(connection, MAX_PACKET_BYTES + 1), SILENCE_S
                ):
                    self._spoke()
                    response, fds = self._answer(connection, packet)
                    socket.send_fds(connection, [response.SerializeToString()], list(fds))
            except (TimeoutError, OSError):
                return  # silent, gone, or does not read what it asked for

    def _spoke(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if task in self._connections:
            self._connections[task] = self._connections.pop(task)

    def _answer(self, connection: socket.socket, packet: bytes) -> tuple[pb.AttachResponse, Sequence[int]]:
        self._engine.called()
        response = pb.AttachResponse(epoch=self._engine.epoch)
        fds: tuple[int, ...] = ()
        what = "attach"
        try:
            request = _parsed(packet)
            what = request.WhichOneof("request") or what
            fds = self._perform(connection, request, response)
        except KvdError as error:
            response.error.CopyFrom(_refusal(error))
            if isinstance(error, REFUSALS):
                self._engine.gate.audit.refused(_caller_of(connection), what, error)
        except Exception as bug:  # noqa: BLE001 - the top of a loop
            response.error.CopyFrom(_refusal(self._incident(bug)))
        return response, fds

    def _perform(
        self, connection: socket.socket, request: pb.AttachRequest, response: pb.AttachResponse
    ) -> tuple[int, ...]:
        match request.WhichOneof("request"):
            case "ticket":
                response.ticket.ticket = self._ticket(connection)
                return ()
            case "map":
                return self._map(connection, request.map, response.map)
        raise InvalidArgumentError("neither `ticket` nor `map` is asked for")

    def _ticket(self, connection: socket.socket) -> bytes:
        peer = Peer.of(connection)
        try:
            self._engine.gate.rules.of_user(peer.uid, peer.gids)
            return self._engine.sessions.issue_ticket(peer)
        except KvdError:
            peer.close()
            raise

    def _map(
        self, connection: socket.socket, request: pb.MapRequest, response: pb.MapResponse
    ) -> tuple[int, ...]:
        opened = self._engine.sessions.by_token(request.session_token)
        peer = _peer_of(connection)
        if opened.peer.identity != peer.identity:
            raise NotOwnerError("only the session's own process may map its pools; open a session there")
        gate = self._engine.gate
        gate.worker_of(peer.uid, peer.gids)
        gate.pools.require(opened.session.tenant, request.pool)
        pool = self._engine.device.pools.get(request.pool)
        if pool is None:
            raise PoolNotFoundError(f"no pool {request.pool!r}; create it first")
        memory = self._engine.pools.memory_of(pool)
        pools = self._engine.pools
        response.device_kind, response.device_uuid = pools.device_kind, pools.device_uuid
        response.pool_id = pool.pool_id
        response.pool_bytes, response.sidecar_bytes = memory.pool_bytes, memory.sidecar_bytes
        response.fence_bytes = self._engine.fences.byte_count
        return memory.pool_fd, memory.sidecar_fd, self._engine.fences.readers_fd

    def _incident(self, bug: Exception) -> KvdError:
        incident = secrets.token_hex(4)
        LOG.error("incident %s", incident, exc_info=bug)
        self._engine.health.find(
            f"incident {incident} at the attach socket; the daemon's log has the details"
        )
        return InternalError(f"a bug in kvd, incident {incident}", incident=incident)


def _peer_of(connection: socket.socket) -> Peer:
    """Who is there, without a hold on it."""
    peer = Peer.of(connection)
    peer.close()
    return peer


def _caller_of(connection: socket.socket) -> Caller:
    pid, uid = peer_credentials(connection)
    return Caller("attach", f"uid:{uid}", (("pid", pid),))


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidArgumentError(
            f"{path} cannot be bound: {error.strerror}; make room or way there, or choose another --run-dir"
        ) from error
    return listener


def _parsed(packet: bytes) -> pb.AttachRequest:
    if len(packet) > MAX_PACKET_BYTES:
        raise InvalidArgumentError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
    try:
        return pb.AttachRequest.FromString(packet)
    except DecodeError as error:
        raise InvalidArgumentError("the packet is no kvd.v1.AttachRequest") from error


def _refusal(error: KvdError) -> pb.AttachError:
    return pb.AttachError(reason=error.reason, message=str(error), metadata=error.metadata)
