"""The owner of one pool's GPU memory: `python -m kvd_daemon.device.legacy_owner SOCKET_FD UUID BYTES`.

Sends a descriptor of a memory file with the cuIpc handle in it, or why there is none. Then it waits until
nobody has that descriptor any more: its description carries a lock (flock) that this process wants too.
"""

import fcntl
import json
import os
import socket
import sys

from kvd_cuda.driver import CudaError, GpuMemoryFullError, OwnedMemory, gpu_of, load_driver

ALIVE_AT = 64  # offset of a byte behind the handle: whoever cannot lock it (lockf) knows that the owner lives
WRITE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def main() -> None:
    connection, uuid, byte_count = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    try:
        memory = OwnedMemory(gpu_of(load_driver(), uuid), byte_count)
        memory.zero()  # it may hold what another process left there
        handle = memory.handle()
    except CudaError as error:
        full = isinstance(error, GpuMemoryFullError)
        connection.send(json.dumps({"message": str(error), "full": full}).encode())
        return
    wait_until_unused(connection, handle)


def wait_until_unused(connection: socket.socket, handle: bytes) -> None:
    """Give the handle away, and return when it has gone everywhere. Raises OSError if nobody takes it."""
    shared = os.memfd_create("kvd-cuipc-handle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(shared, handle)
    fcntl.fcntl(shared, fcntl.F_ADD_SEALS, WRITE_SEALS)
    fcntl.flock(shared, fcntl.LOCK_SH)
    own = os.open(f"/proc/self/fd/{shared}", os.O_RDWR | os.O_CLOEXEC)  # a description without that lock
    with connection:
        socket.send_fds(connection, [b"handle"], [shared])
        os.close(shared)
    fcntl.lockf(own, fcntl.LOCK_EX, 1, ALIVE_AT)  # after that, which takes such locks away
    fcntl.flock(own, fcntl.LOCK_EX)


if __name__ == "__main__":
    main()
