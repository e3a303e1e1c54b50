"""The process at the other end of a socket, held by a pidfd: a pid alone may become another process."""

import asyncio
import os
import socket
from collections.abc import Callable

from kvd.errors import UnauthenticatedError
from kvd_daemon.processes import identity_of, peer_credentials, peer_groups, peer_pidfd


class Peer:
    """Owns a pidfd until `close`. Its pid is 0 if it lives in a pid namespace that is not visible here.

    `gids` is empty for one that a daemon before this one met, until it shows itself again.
    """

    def __init__(self, pidfd: int, pid: int, uid: int, gids: frozenset[int] = frozenset()) -> None:
        """Raises UnauthenticatedError if nothing tells the process from others; then `pidfd` is closed."""
        self.pid, self.uid, self.gids = pid, uid, gids
        self.pidfd = pidfd
        try:
            self.identity = identity_of(pidfd, pid)
        except UnauthenticatedError:
            os.close(pidfd)
            raise

    @classmethod
    def of(cls, connection: socket.socket) -> "Peer":
        """Raises UnauthenticatedError if the process is gone or not visible."""
        return cls(peer_pidfd(connection), *peer_credentials(connection), peer_groups(connection))

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` as soon as the process has exited."""
        asyncio.get_running_loop().add_reader(self.pidfd, on_exit)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        os.close(self.pidfd)
