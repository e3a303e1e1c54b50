"""A kernel worker that dies with its first compression or copy: `dying_worker.py FD PARENT_PID THREADS`.

It speaks the real wire, so that the daemon meets a death at a point that no test could hit by chance. After
`Moving`, it is dead; every other job it answers at once.
"""

import os
import socket
import sys

from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel import wire


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.sendall(wire.encode(m.Ready()))
    with connection.makefile("rb") as stream:
        while prefix := stream.read(wire.PREFIX.size):
            header_bytes, body_bytes = wire.sizes(prefix)
            request = wire.decode(stream.read(header_bytes), stream.read(body_bytes))
            if isinstance(request, m.Compress | m.Observe):
                connection.sendall(wire.encode(m.Moving()))
                os._exit(1)
            if isinstance(request, m.Scrub) and request.copies.size:
                os._exit(1)
            connection.sendall(wire.encode(m.Done()))


if __name__ == "__main__":
    main()
