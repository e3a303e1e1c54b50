"""How many connections the gRPC doors hold, and whose: each is a descriptor of the daemon.

gRPC itself refuses what is beyond a door's limit, at the accept, whoever that hits; it has no hook to ask
who is there. So the daemon looks at its own sockets: SO_PEERCRED tells whose each is. A process or user that
has more than its share loses what is beyond, until the others find room.
"""

import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvd_daemon.access.serving_limits import ServingLimits
from kvd_daemon.processes import peer_credentials, room_for_connections

CONNECTIONS_PER_PROCESS = 256  # a worker has one, and one for each further client it makes
TCP_CONNECTIONS = 256  # on the TCP port; an operator needs one for a moment
TCP_CONNECTIONS_PER_ADDRESS = 64  # of them
FOLDER = "/proc/self/fd"

Owner = tuple[int, int]
"""(uid, pid). A pid of 0 is a process in a pid namespace that is not visible here."""


@dataclass(frozen=True)
class Connection:
    """One end of ours, and who has the other: an owner on the Unix socket, an address on the TCP port."""

    number: int  # of its inode: older ones have mostly lower ones
    owner: Owner | None
    address: str = ""


@dataclass(frozen=True)
class Shares:
    """What one user, process or address may hold."""

    per_user: int
    per_process: int = CONNECTIONS_PER_PROCESS
    per_address: int = TCP_CONNECTIONS_PER_ADDRESS

    @classmethod
    def of(cls, limits: ServingLimits) -> "Shares":
        """Nobody's is all there is, however few that are."""
        there = unix_connections(limits)
        return cls(
            per_user=min(limits.connections_per_user, there * 3 // 4),
            per_process=min(CONNECTIONS_PER_PROCESS, there // 8),
        )


def unix_connections(limits: ServingLimits) -> int:
    """As many as the Unix socket takes: where few descriptors may be opened, fewer than the limit says."""
    return min(limits.connections, room_for_connections())


@dataclass(frozen=True)
class Offence:
    """Somebody has more than its share; `excess` are the connections it loses."""

    who: str
    held: int
    excess: Sequence[Connection]


def offences(found: Iterable[Connection], at_work: Collection[Owner], shares: Shares) -> Iterator[Offence]:
    """`at_work` are the processes that have a session: another process's flood costs them nothing.

    Of the others of a user that has too many, and of an address, all go: a flood that had to be cut down to
    its share only would fill all room again before anybody else came in.
    """
    processes, users, addresses = defaultdict(list), defaultdict(list), defaultdict(list)
    for one in sorted(found, key=lambda connection: connection.number):
        if one.owner is None:
            addresses[one.address].append(one)
        elif one.owner[1] != os.getpid():
            users[one.owner[0]].append(one)
            if one.owner[1] > 0:
                processes[one.owner].append(one)
    for (uid, pid), held in processes.items():
        if len(held) > shares.per_process:
            yield Offence(f"uid:{uid} pid:{pid}", len(held), held[shares.per_process :])
    for uid, held in users.items():
        if len(held) > shares.per_user:
            yield Offence(f"uid:{uid}", len(held), [one for one in held if one.owner not in at_work])
    for address, held in addresses.items():
        if len(held) > shares.per_address:
            yield Offence(f"address:{address}", len(held), held)


class OpenSockets:
    """The daemon's accepted sockets at this moment."""

    def __init__(self, unix_path: str, tcp_port: int) -> None:
        """`tcp_port` is 0 if there is none. Raises OSError where there is no descriptor to look with."""
        self._unix_path = unix_path
        self._tcp_port = tcp_port
        self._fds: dict[Connection, int] = {}
        for name in os.listdir(FOLDER):
            with (
                contextlib.suppress(OSError),
                _held(int(name)) as ours,
            ):  # closed by now, or no socket
                connection = self._connection(ours)
                if connection is not None:
                    self._fds[connection] = int(name)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._fds)

    def _connection(self, ours: socket.socket) -> Connection | None:
        """None for a socket that is not one of a gRPC door."""
        if ours.type != socket.SOCK_STREAM or ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        number, name = os.fstat(ours.fileno()).st_ino, ours.getsockname()
        if ours.family == socket.AF_UNIX and name == self._unix_path:
            pid, uid = peer_credentials(ours)
            return Connection(number, (uid, pid))
        if ours.family in (socket.AF_INET, socket.AF_INET6) and self._tcp_port and name[1] == self._tcp_port:
            return Connection(number, None, ours.getpeername()[0])
        return None

    def cut(self, connections: Sequence[Connection]) -> None:
        """The other end reads that it is over; so does gRPC, which closes its descriptor."""
        for connection in connections:
            with contextlib.suppress(OSError), _held(self._fds[connection]) as ours:  # it is over already
                if os.fstat(ours.fileno()).st_ino == connection.number:
                    ours.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _held(fd: int) -> Iterator[socket.socket]:
    """The socket of that number, which means no other one meanwhile. Raises OSError if it is none."""
    copy = os.dup(fd)
    try:
        ours = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with ours:
        yield ours
