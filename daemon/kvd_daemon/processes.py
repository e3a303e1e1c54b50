"""Processes of which nothing stays behind: they die with their parent, and their end is seen at once."""

import contextlib
import ctypes
import errno
import functools
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path

from kvd.errors import DeviceUnavailableError, KvdError, UnauthenticatedError

OPERATOR_MISTAKE = 2  # exit status: told on stderr, starting again would not help
DEVICE_FAILED = (
    4  # exit status of a daemon whose GPU cannot be used: others may go on, this one is tried again
)
RESTART_WANTED = 3  # exit status of a daemon that left everything in order for the next one
FIRST, FOLLOWS = "first", "follows"
"""When a daemon starts. After kvd has served, workers may wait for it: then it serves what it can."""
STDERR_FD = 2
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5
INVISIBLE = (
    "the peer's process is not visible here, so its end could not be seen; share the pid namespace, or use "
    "Linux 6.9"
)
PEER_CREDENTIALS_BYTES = 12  # struct ucred: pid, uid, gid
SO_PEERGROUPS = 59  # asm-generic/socket.h, Linux 4.13
MAX_GROUPS_BYTES = 1024  # what Python asks for at most: 256 groups
GID_BYTES = 4
RETRY_AFTER_NS = 1_000_000_000  # ns; sessions that end, and connections that are silent, give some back


def allow_many_descriptors() -> None:
    """Every session is a stream and a pidfd; the usual soft limit of 1,024 is for select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections() -> int:
    """Half of the descriptors this process may open: the rest is for sessions, pools and their journal."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2


def lend_no_descriptor() -> None:
    """Whatever this process inherited, no child of its does unless it is told so."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed already
            if int(name) > STDERR_FD:
                os.set_inheritable(int(name), False)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process as soon as `parent_pid` is gone; exits if it is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, as the kernel saw it then."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS_BYTES)
    return int.from_bytes(raw[0:4], "little", signed=True), int.from_bytes(raw[4:8], "little")


def peer_groups(connection: socket.socket) -> frozenset[int]:
    """All groups of the process that connected; of more than 256 only its first: too few rights."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS_BYTES)
    try:
        raw = raw[8:12] + connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS_BYTES)
    except OSError:
        raw = raw[8:12]
    return frozenset(
        int.from_bytes(raw[at : at + GID_BYTES], "little") for at in range(0, len(raw), GID_BYTES)
    )


def peer_pidfd(connection: socket.socket) -> int:
    """A pidfd of the process that connected: readable when it has exited.

    Also of a process in another pid namespace, whose pid shows as 0 here. Raises UnauthenticatedError if it
    is gone already, or not visible to a kernel before Linux 6.5; DeviceUnavailableError where there is no
    descriptor left.
    """
    pid, _ = peer_credentials(connection)
    try:
        return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4), "little")
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise _unseen(pid, error) from error
    if pid <= 0:
        raise UnauthenticatedError(INVISIBLE)
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise _unseen(pid, error) from error


def _unseen(pid: int, error: OSError) -> KvdError:
    """Why there is no pidfd: nobody must take a live process for a dead one."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DeviceUnavailableError(
            f"the daemon has no descriptor left for process {pid} ({error.strerror}); retry in a second",
            retry_after_ns=RETRY_AFTER_NS,
        )
    return UnauthenticatedError(f"the peer's process {pid} is gone")


ProcessIdentity = tuple[int, ...]
"""Equal for two descriptors of one process, and different from every other process's since boot."""


def identity_of(pidfd: int, pid: int) -> ProcessIdentity:
    """Raises UnauthenticatedError if nothing tells this process from others of its pid."""
    found, ordinary = os.fstat(pidfd), _anonymous_inode()
    if (found.st_dev, found.st_ino) != ordinary:
        return found.st_dev, found.st_ino
    if pid <= 0:  # before Linux 6.9 all pidfds share one inode
        raise UnauthenticatedError(INVISIBLE)
    return pid, _start_ticks(pid)


def has_exited(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@functools.cache
def _anonymous_inode() -> tuple[int, int]:
    """The same as long as the machine runs, so it takes a descriptor once, and not when there is none."""
    fd = os.eventfd(0)
    try:
        return os.fstat(fd).st_dev, os.fstat(fd).st_ino
    finally:
        os.close(fd)


def _start_ticks(pid: int) -> int:
    """When it started, in clock ticks since boot. Raises UnauthenticatedError if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise UnauthenticatedError(f"the peer's process {pid} is gone") from error
    return int(stat.rpartition(")")[2].split()[19])
