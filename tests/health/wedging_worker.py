"""A kernel worker that hangs: `python wedging_worker.py FD PARENT_PID HOW OVER FLAG`.

It speaks the real wire. Its first job of kind OVER (or its "Start") it does not finish: it is stopped, spins,
or is stuck in a system call ("stop", "spin", "block"), a compression after it said `Moving`; FLAG is a file
that says that this has happened, so the next worker does everything. "slow" finishes, but says `Working` many
times before.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel import wire

SLOW_S = 0.1  # from one word of a slow worker to the next
SLOW_WORDS = 15


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    how, over, flag = sys.argv[3], sys.argv[4], Path(sys.argv[5])
    if over == "Start" and not flag.exists():
        flag.touch()
        wedge(how, connection)
    connection.sendall(wire.encode(m.Ready()))
    with connection.makefile("rb") as stream:
        while prefix := stream.read(wire.PREFIX.size):
            header_bytes, body_bytes = wire.sizes(prefix)
            request = wire.decode(stream.read(header_bytes), stream.read(body_bytes))
            if type(request).__name__ == over and not flag.exists():
                flag.touch()
                if isinstance(request, m.Compress):
                    connection.sendall(wire.encode(m.Moving()))
                wedge(how, connection)
            kept = request.target_tokens if isinstance(request, m.Compress) else 0
            connection.sendall(wire.encode(m.Done(kept_tokens=kept)))


def wedge(how: str, connection: socket.socket) -> None:
    match how:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            while True:
                pass
        case "block":
            os.read(os.pipe()[0], 1)
        case "slow":
            for _ in range(SLOW_WORDS):
                time.sleep(SLOW_S)
                connection.sendall(wire.encode(m.Working()))


if __name__ == "__main__":
    main()
