"""Memory files that never change their size.

The size seals promise everyone who maps them that no access ever meets a truncated file (SIGBUS).
"""

import fcntl
import os

from kvd.errors import DeviceFullError

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def holds(fd: int, size_bytes: int) -> bool:
    """Whether this is a memory file of that size, for ever."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS == SIZE_SEALS
    except OSError:
        return False
    return sealed and os.fstat(fd).st_size == size_bytes


def sealed_memfd(name: str, size_bytes: int) -> int:
    """Raises DeviceFullError."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise DeviceFullError(f"no memory file of {size_bytes} bytes: {error.strerror}") from error
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except OSError as error:
        os.close(fd)
        raise DeviceFullError(f"no memory file of {size_bytes} bytes: {error.strerror}") from error
    return fd
