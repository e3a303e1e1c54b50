"""A process of another user that asks the attach socket: as root a real other user, else ourselves.

Not as root there is no other user to be, so the rules of the kvd under test must then speak of our own.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvd.v1 import attach_pb2 as ab

IS_ROOT = os.geteuid() == 0
OTHER_UID = 54_321 if IS_ROOT else os.geteuid()
OTHER_GID = 54_322 if IS_ROOT else os.getegid()
RELAY = """
import os, socket, sys
uid, gid, *groups = map(int, sys.argv[3:])
if os.geteuid() == 0:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
ours = socket.socket(fileno=int(sys.argv[1]))
while packet := ours.recv(1 << 16):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as theirs:
        try:
            theirs.connect(sys.argv[2])
            theirs.send(packet)
            answer, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 8)
        except OSError as error:
            answer, fds = b"refused by the kernel", []
        socket.send_fds(ours, [b"!" + answer], fds)
"""


class OtherProcess:
    """Alive until closed; what it is answered comes here, descriptors too."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def ask(self, request: ab.AttachRequest) -> tuple[ab.AttachResponse, list[int]]:
        """Raises PermissionError if the kernel does not let it connect."""
        self._connection.send(request.SerializeToString())
        answer, fds, _, _ = socket.recv_fds(self._connection, 1 << 16, 8)
        if answer == b"!refused by the kernel":
            raise PermissionError(answer)
        return ab.AttachResponse.FromString(answer[1:]), fds

    def ticket(self) -> bytes:
        """Empty if it gets none."""
        return self.ask(ab.AttachRequest(ticket=ab.TicketRequest()))[0].ticket.ticket

    def refusal(self) -> str:
        """The reason why it gets no ticket."""
        return self.ask(ab.AttachRequest(ticket=ab.TicketRequest()))[0].error.reason


@contextlib.contextmanager
def other_process(run_dir: Path, gid: int = OTHER_GID, groups: Sequence[int] = ()) -> Iterator[OtherProcess]:
    """It becomes the other user once it runs: our interpreter and files may be closed to that one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", RELAY]
    with ours, theirs:
        process = subprocess.Popen(
            [
                *command,
                str(theirs.fileno()),
                *map(str, (run_dir / "host0/attach.sock", OTHER_UID, gid, *groups)),
            ],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(60)
        try:
            yield OtherProcess(ours)
        finally:
            ours.close()
            assert process.wait(60) == 0
