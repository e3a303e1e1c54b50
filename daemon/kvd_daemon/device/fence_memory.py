"""The fences' memory: a file that this process writes and workers map read-only.

A seal could forbid writing for ever, but then the next daemon could not write either, and a worker that
still has the old words mapped would never see its lease end. So workers get a descriptor that was opened for
reading, and the file's mode keeps other users from opening it in another way.
"""

import mmap
import os

import numpy as np
import numpy.typing as npt

from .sealed import sealed_memfd

WORD_BYTES = 8
READ_BY_OWNER = 0o400
NAME = "kvd-fences"


class FenceMemory:
    """Owns `fd` and `readers_fd` until `close`."""

    def __init__(self, fd: int, word_count: int) -> None:
        """Of a daemon before this one."""
        self.fd = fd
        self.byte_count = word_count * WORD_BYTES
        self.words: npt.NDArray[np.uint64] = np.frombuffer(mmap.mmap(fd, self.byte_count), np.uint64)
        self.readers_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def create(cls, word_count: int) -> "FenceMemory":
        """All words are 0. Raises DeviceFullError."""
        fd = sealed_memfd(NAME, word_count * WORD_BYTES)
        os.fchmod(fd, READ_BY_OWNER)
        return cls(fd, word_count)

    def lower_all(self) -> None:
        """Whoever still has them mapped sees every lease end."""
        self.words[np.flatnonzero(self.words)] = 0

    def close(self) -> None:
        """The mapping goes with its last user."""
        os.close(self.readers_fd)
        os.close(self.fd)
