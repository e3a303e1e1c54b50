"""The disk worker's process: `python -m kvd_daemon.kernel.disk_worker FD PARENT_PID THREADS CACHE`.

It copies slots between the host tier and files, so that nobody but who waits for a disk stands still with it.
Like the kernel worker it owns nothing and can be killed at any time.
"""

import logging
import mmap
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from zlib import crc32

import numpy as np

from kvd_daemon.kernel import messages as m
from kvd_daemon.kernel import wire
from kvd_daemon.kernel.daemon_link import DaemonGoneError, DaemonLink, Voice
from kvd_daemon.kernel.punching import punch
from kvd_daemon.processes import die_with_parent

LOG = logging.getLogger("kvd.disk")


def main() -> None:
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the daemon decides
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    link = DaemonLink(socket.socket(fileno=fd))
    try:
        link.send(m.Ready())
        _serve(link)
    except (DaemonGoneError, ConnectionError):
        LOG.info("the daemon is gone; disk worker %d ends", os.getpid())


def _serve(link: DaemonLink) -> None:
    voice = Voice(link)
    while True:
        request = link.receive()
        started = time.monotonic_ns()
        try:
            done = _perform(request, link, voice)
        except OSError as error:
            link.send(m.Failed(f"{error.strerror} (errno {error.errno})", caller_mistake=False))
        else:
            link.send(replace(done, kernel_ns=time.monotonic_ns() - started))


def _perform(request: m.Message, link: DaemonLink, voice: Voice) -> m.Done:
    match request:
        case m.CopySlots():
            with link.lent_fds() as [source, destination]:
                return m.Done(damaged=_copy(request, source, destination, voice))
        case m.Punch(slot_bytes, slots):
            with link.lent_fds() as [file]:
                punch(file, slot_bytes, slots)
        case m.Ping():
            pass
        case _:
            raise wire.WireError(f"{type(request).__name__} is no request to a disk worker")
    return m.Done()


def _copy(request: m.CopySlots, source: int, destination: int, voice: Voice) -> m.IntArray:
    """Indices of damaged slots. Raises OSError."""
    stride, size = request.slot_bytes, request.content_bytes
    damaged = []
    with mmap.mmap(-1, stride) as page, memoryview(page) as buffer:  # O_DIRECT wants pages
        pairs = zip(request.source.tolist(), request.destination.tolist(), strict=True)
        for index, (from_slot, to_slot) in enumerate(pairs):
            read = os.preadv(source, [buffer], from_slot * stride)
            if read < size or crc32(buffer[:size]) != request.checksums[index]:
                damaged.append(index)
            elif os.pwrite(destination, buffer, to_slot * stride) < stride:
                raise OSError(28, "No space left on device")
            voice.step()
    return np.array(damaged, np.int32)


if __name__ == "__main__":
    main()
