"""Run as a program: connects to the attach socket again and again, as fast as it can, and says nothing there.

python knocking.py PATH; ends by being killed.
"""

import contextlib
import socket
import sys
import time

HELD = 500  # connections; the oldest makes room for a new one


def main() -> None:
    held: list[socket.socket] = []
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        held.append(connection)
        with contextlib.suppress(BlockingIOError):  # the listener's queue is full
            connection.connect(sys.argv[1])
            if len(held) < HELD:
                continue
        if len(held) == HELD:
            print("knocking", flush=True)
        if len(held) > HELD:
            held.pop(0).close()
            time.sleep(0.0002)


main()
