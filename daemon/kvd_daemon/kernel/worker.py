"""The kernel worker's process: `python -m kvd_daemon.kernel.worker FD PARENT_PID THREADS CACHE`.

Serves the inherited socket FD; compiled kernels are kept in the folder CACHE.
"""

import logging
import signal
import socket
import sys
from pathlib import Path

from kvd_daemon.processes import die_with_parent


def main() -> None:
    fd, parent_pid, threads = (int(argument) for argument in sys.argv[1:4])
    die_with_parent(parent_pid)  # first of all: importing torch takes seconds in which the daemon may die
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the daemon decides
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from kvd_daemon.kernel.serving import serve

    serve(socket.socket(fileno=fd), threads, Path(sys.argv[4]))


if __name__ == "__main__":
    main()
