"""Packets between a daemon and its supervisor: JSON, and descriptors as SCM_RIGHTS.

SOCK_SEQPACKET: a packet comes whole or not at all, and once `send` has returned True the kernel holds its
descriptors, whatever becomes of the sender. Neither end ever waits for the other.
"""

import array
import fcntl
import json
import logging
import os
import socket
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_PACKET_BYTES = 128 << 10  # bytes; settings are the largest, everything else is below 2 KiB
MAX_FDS = 1  # descriptors per packet
BUFFER_BYTES = 1 << 20  # of packets not yet read (the system may allow less); hundreds of descriptors
LOG = logging.getLogger("kvd.channel")


class ChannelEndedError(Exception):
    """The other end is closed and everything it sent was read."""


@dataclass(frozen=True)
class Packet:
    """`fds` are the receiver's now."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Of descriptors that nobody wants."""
        for fd in self.fds:
            os.close(fd)


class Channel:
    """One end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    @classmethod
    def of(cls, fd: int) -> "Channel":
        """An inherited end; no child of this process inherits it."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def unread_bytes(self) -> int:
        """Memory of what the other end has not read yet."""
        return int.from_bytes(fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def send(self, packet: Packet) -> bool:
        """Whether the kernel has it. Not if the other end is gone, or has not read for long."""
        content = json.dumps({"kind": packet.kind, **packet.fields}).encode()
        assert len(content) <= MAX_PACKET_BYTES, f"a packet {packet.kind} of {len(content)} bytes"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", packet.fds))] if packet.fds else []
        try:
            self._connection.sendmsg([content], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            LOG.warning("a packet %r was not sent: %s", packet.kind, error.strerror)
            return False
        return True

    def receive(self) -> Packet | None:
        """The next packet; None while there is none. Raises ChannelEndedError."""
        while True:
            try:
                received = self._connection.recvmsg(
                    MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # it left without reading all of ours; what it sent is still there
            content, ancillary, flags, _ = received
            if not content:
                raise ChannelEndedError
            packet = _packet(content, ancillary)
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                LOG.error("a packet %r lost its end or its descriptor; are there too many open?", packet.kind)
            return packet


def _packet(content: bytes, ancillary: Sequence[tuple[int, int, bytes]]) -> Packet:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    try:
        fields = json.loads(content)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or "kind" not in fields:
        LOG.error("a packet that is no packet of kvd's: %r", content[:80])
        return Packet("", {}, tuple(fds))
    return Packet(str(fields.pop("kind")), fields, tuple(fds))
