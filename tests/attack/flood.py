"""Run as a program: opens connections that say hello and nothing more, and tells how many were closed again.

python flood.py COUNT PATH, or python flood.py COUNT HOST PORT; ends when its stdin does.
"""

import contextlib
import resource
import socket
import sys
import time
from collections.abc import Iterator

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # RFC 9113, 3.4
PATIENCE_S = 20.0  # for the listener's queue to have room


def connected(where: list[str]) -> socket.socket:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        connection = socket.socket(socket.AF_UNIX if len(where) == 1 else socket.AF_INET)
        connection.setblocking(len(where) == 2)
        try:
            connection.connect(where[0] if len(where) == 1 else (where[0], int(where[1])))
        except BlockingIOError:
            connection.close()
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
            continue
        with contextlib.suppress(OSError):  # it was closed at once
            connection.send(HELLO)
        connection.setblocking(False)
        return connection


def closed_by_the_other_end(connections: list[socket.socket]) -> Iterator[socket.socket]:
    for connection in connections:
        try:
            while connection.recv(1 << 12):
                pass
        except BlockingIOError:
            continue
        except OSError:
            pass
        yield connection


def main() -> None:
    count = int(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = [connected(sys.argv[2:]) for _ in range(count)]
    print("connected", flush=True)
    while sys.stdin.readline():
        print(len(list(closed_by_the_other_end(connections))), flush=True)


if __name__ == "__main__":
    main()
