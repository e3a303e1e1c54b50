"""What commands say: on stdout, where a program may wait for it, and on stderr, to people."""

import os
import sys
from typing import TextIO

STDERR_FD = 2


class StdoutError(Exception):
    """Nobody can be told what was asked for: stdout goes to a full disk, or to a reader that has gone."""


def have_standard_streams() -> None:
    """Where this process was started without one (`>&-`): nothing else must ever get its number.

    Else what libraries print, here or in a child, goes into a file that was opened later.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR_FD:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(STDERR_FD, "w")  # noqa: SIM115


def say(text: str) -> None:
    """Write whole lines to stdout, at once. Raises StdoutError, or BrokenPipeError if the reader has gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _silence(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise StdoutError(f"stdout: {error.strerror}; make room there, or send it elsewhere") from error


def complain(line: str) -> None:
    """Write a line to stderr. If that cannot be done, the exit status must tell."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """What it still has in its buffer must not be written at exit, where that would fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
