"""GPU memory by cuIpc handles, for GPUs and drivers that share no descriptors. A pool has an owner process.

The descriptor of such a pool is a memory file with the handle in it. It carries a lock that the owner waits
for: like memory that is a descriptor, the pool ends when nobody has it any more, whatever dies. Creating one
takes as long as a CUDA context does, a second or two, in which this daemon answers nobody.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys

from kvd.errors import DeviceFullError, GpuError, GpuHandleError
from kvd_cuda.driver import Gpu

from .legacy_owner import ALIVE_AT
from .pool_memories import PoolMemories
from .sealed import holds

HANDLE_BYTES = 64
PATIENCE_S = 20.0  # seconds for a process, the driver and a context; usually two
MAX_REPORT_BYTES = 4096  # bytes; an error in words, the longest thing the helper says, is far below


class CudaLegacyMemory(PoolMemories):
    """Of one GPU."""

    kind = "cuda_legacy"

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.uuid = gpu.uuid
        self._owners: list[subprocess.Popen[bytes]] = []

    def _make(self, pool_id: str, byte_count: int) -> int:
        self._owners = [owner for owner in self._owners if owner.poll() is None]  # collects those that ended
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            arguments = [str(theirs.fileno()), self.uuid, str(byte_count)]
            owner = subprocess.Popen(
                [sys.executable, "-m", "kvd_daemon.device.legacy_owner", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            self._owners.append(owner)
            return self._received(ours, owner)

    def _received(self, connection: socket.socket, owner: "subprocess.Popen[bytes]") -> int:
        connection.settimeout(PATIENCE_S)
        try:
            packet, fds, _, _ = socket.recv_fds(connection, MAX_REPORT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            owner.kill()
            raise GpuError(
                f"{self.uuid}: no GPU memory came within {PATIENCE_S:g} s; look at nvidia-smi"
            ) from error
        if fds:
            return fds[0]
        report = json.loads(packet or b'{"message": "its owner ended", "full": false}')
        if report["full"]:
            raise DeviceFullError(f"{self.uuid} gives no memory: {report['message']}")
        raise GpuHandleError(
            f"{self.uuid} shares no memory: {report['message']}. WSL2 never does; serve host memory there: "
            "kvd --host-memory SIZE"
        )

    def _is_such(self, fd: int, byte_count: int) -> bool:
        return holds(fd, HANDLE_BYTES) and _owner_lives(fd)


def _owner_lives(fd: int) -> bool:
    """An owner that is there holds a lock; see `legacy_owner`."""
    probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.lockf(probe, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, ALIVE_AT)
    except OSError:
        return True
    finally:
        os.close(probe)
    return False
