"""Files that are read again when they changed: renewed certificates and revoked tokens need no restart."""

import os
from collections.abc import Sequence
from pathlib import Path

from kvd.errors import InvalidArgumentError

MAX_FILE_BYTES = 1 << 20  # bytes; a chain of certificates is 10 KB, 1,000 tokens are 100 KB

Stamp = tuple[tuple[int, int, int] | None, ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Equal as long as nobody wrote or replaced one of the files (None: it is not there)."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_bounded(path: Path, what: str) -> bytes:
    """The file's bytes. Raises InvalidArgumentError naming `what`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{what} {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise InvalidArgumentError(
            f"{what} {path} has more than {MAX_FILE_BYTES} bytes; is it the right file?"
        )
    return content


def refuse_if_others_may(path: Path, mode_bits: int, what: str) -> None:
    """Raises InvalidArgumentError if the file's mode grants others any of `mode_bits`."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise InvalidArgumentError(f"{what} {path}: {error.strerror}") from error
    if mode & mode_bits:
        raise InvalidArgumentError(
            f"{what} {path} has mode {mode & 0o777:04o}; run: chmod {mode & 0o777 & ~mode_bits:04o} {path}"
        )
