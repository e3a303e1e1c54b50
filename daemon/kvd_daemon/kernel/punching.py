"""Room of slots that nobody needs any more goes back to the system."""

import ctypes
import os

from kvd_daemon.kernel.messages import IntArray

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2  # linux/falloc.h


def punch(fd: int, stride: int, slots: IntArray) -> None:
    """Their room goes back to the system. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    for slot in slots.tolist():
        mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
        if libc.fallocate(fd, mode, slot * stride, stride):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
