"""The worker's end of the socket to the daemon."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel import wire

MAX_FDS = 2  # per message: a pool's bytes and its sidecar, or from where to where slots are copied
RECEIVE_BYTES = 1 << 20  # bytes per recvmsg
WORD_INTERVAL_S = 0.25  # seconds at least from one `Working` to the next: some hundred steps of a usual lease


class DaemonGoneError(Exception):
    """The daemon closed the socket."""


class DaemonLink:
    """The socket to the daemon: whole messages and the descriptors that come with them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self._fds: list[int] = []

    def receive(self) -> m.Message:
        """The next message. Raises DaemonGoneError at the end, WireError on nonsense."""
        header_bytes, body_bytes = wire.sizes(self._exactly(wire.PREFIX.size))
        return wire.decode(self._exactly(header_bytes), self._exactly(body_bytes))

    def take_fds(self) -> tuple[int, int]:
        """The two descriptors of the message just received."""
        pool_fd, sidecar_fd = self._fds
        self._fds = []
        return pool_fd, sidecar_fd

    @contextlib.contextmanager
    def lent_fds(self) -> Iterator[list[int]]:
        """The descriptors of the message just received, for as long as it is worked on."""
        fds, self._fds = self._fds, []
        try:
            yield fds
        finally:
            for fd in fds:
                os.close(fd)

    def send(self, reply: m.Reply) -> None:
        self._connection.sendall(wire.encode(reply))

    def _exactly(self, count: int) -> bytes:
        while len(self._received) < count:
            data, fds, _, _ = socket.recv_fds(self._connection, RECEIVE_BYTES, MAX_FDS)
            if not data:
                raise DaemonGoneError
            self._received += data
            self._fds += fds
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


class Voice:
    """Tells the daemon that the work goes on, but not after every step of microseconds."""

    def __init__(self, link: DaemonLink) -> None:
        self._link = link
        self._spoke_s = time.monotonic()

    def step(self) -> None:
        """A step is done."""
        now_s = time.monotonic()
        if now_s - self._spoke_s >= WORD_INTERVAL_S:
            self._spoke_s = now_s
            self._link.send(m.Working())
