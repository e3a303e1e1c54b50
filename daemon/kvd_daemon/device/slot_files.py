"""Files without a name, in which slots of the tiers lie: nothing is left of them, whatever dies."""

import contextlib
import fcntl
import os
import tempfile


def memory_file(name: str) -> int:
    """Raises OSError."""
    return os.memfd_create(f"kvd-{name}", os.MFD_CLOEXEC)


def disk_file(folder: str) -> int:
    """Read and written past the page cache where the file system can. Raises OSError."""
    fd, path = tempfile.mkstemp(prefix="kvd-", dir=folder)
    os.unlink(path)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    return fd
