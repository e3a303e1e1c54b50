"""Descriptors that outlive the daemon: its supervisor keeps copies of them, under names.

`pool.POOL_ID.bytes`, `pool.POOL_ID.sidecar`, `fence`, and `session.SESSION_ID` for the pidfd of a session's
process: its end is then proven across daemons, without mistaking another process of the same number for it.
A name is given once, never to a second descriptor.
"""

import json
import os
from collections.abc import Collection
from typing import Protocol

from kvd.errors import DeviceUnavailableError
from kvd_daemon.channel import Channel, Packet

MAX_NAME_CHARS = 128  # characters; systemd allows 255, the device's name in front
RETRY_AFTER_NS = 1_000_000_000  # nanoseconds; a supervisor that is being replaced needs less


class DescriptorStore(Protocol):
    """What the daemon needs of it."""

    @property
    def survives(self) -> bool:
        """Whether there is anybody to keep descriptors. If not, nothing outlives the daemon."""

    def put(self, name: str, fd: int) -> None:
        """Have a copy of `fd` kept. The caller's own stays the caller's.

        When it returns, the descriptor outlives this process. Raises DeviceUnavailableError; then it was not
        kept, and whatever needed it must not happen.
        """

    def drop(self, name: str) -> None:
        """Have the copy closed. Never fails: what cannot be said now is said with the next word."""

    def take_all(self) -> dict[str, int]:
        """Once, at the start: what the last daemon had put, by name. They are the caller's from now on."""

    def keep(self, names: Collection[str]) -> None:
        """Once, after `take_all`: drops what it gave under other names, and closes those descriptors here."""


class NoFdStore:
    """The store of a daemon without a supervisor."""

    survives = False

    def put(self, name: str, fd: int) -> None:
        """Not kept, which `survives` has said."""

    def drop(self, name: str) -> None:
        """There is nothing."""

    def take_all(self) -> dict[str, int]:
        return {}

    def keep(self, names: Collection[str]) -> None:
        assert not names, "nothing was given"


NO_STORE = NoFdStore()


class FdStore:
    """The daemon's end. The last daemon's descriptors were inherited; `kept_fd` is a file that names them."""

    survives = True

    def __init__(self, channel: Channel, kept_fd: int) -> None:
        self._channel = channel
        self._taken = _inherited(kept_fd)
        self._to_drop: list[str] = []

    def put(self, name: str, fd: int) -> None:
        assert 0 < len(name) <= MAX_NAME_CHARS, f"a name of {len(name)} characters"
        self._send_drops()
        if self._to_drop or not self._channel.send(Packet("put", {"name": name}, (fd,))):
            raise DeviceUnavailableError(
                "kvd's supervisor does not answer, nothing new would outlive this daemon; retry in a second",
                retry_after_ns=RETRY_AFTER_NS,
            )

    def drop(self, name: str) -> None:
        self._to_drop.append(name)
        self._send_drops()

    def _send_drops(self) -> None:
        while self._to_drop and self._channel.send(Packet("drop", {"name": self._to_drop[0]})):
            del self._to_drop[0]

    def take_all(self) -> dict[str, int]:
        return dict(self._taken)

    def keep(self, names: Collection[str]) -> None:
        for name in self._taken.keys() - set(names):
            os.close(self._taken[name])
            self.drop(name)
        self._taken = {}


def names_file(fds: dict[str, int]) -> int:
    """A file that names inherited descriptors, for `FdStore`: the caller's to pass on and to close."""
    fd = os.memfd_create("kvd-kept", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "w") as file:
        json.dump(fds, file)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _inherited(kept_fd: int) -> dict[str, int]:
    with os.fdopen(kept_fd) as file:
        fds: dict[str, int] = json.load(file)
    for fd in fds.values():
        os.set_inheritable(fd, False)
    return fds
