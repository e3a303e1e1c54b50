"""What commands say: on stdout, where a program may wait for it, and on stderr, to people."""

import os
import sys
from typing import TextIO


class StdoutError(Exception):
    """Nobody can be told what was asked for: stdout goes to a full disk, or to a reader that has gone."""


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
