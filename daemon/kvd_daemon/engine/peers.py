"""The process at the other end of a socket, held by a pidfd: a pid alone may become another process."""

import asyncio
import os
import socket
from collections.abc import Callable

from kvd_daemon.processes import peer_credentials, peer_pidfd


class Peer:
    """Owns a pidfd until `close`."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises UnauthenticatedError if the process is gone or not visible."""
        self.pid, self.uid = peer_credentials(connection)
        self._pidfd = peer_pidfd(connection)

    @property
    def tenant(self) -> str:
        """Whom its bytes belong to: memory that passes to another one is scrubbed."""
        return f"uid:{self.uid}"

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` as soon as the process has exited."""
        asyncio.get_running_loop().add_reader(self._pidfd, on_exit)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
