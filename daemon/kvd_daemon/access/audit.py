"""The audit log of a device: JSON lines of who was refused what, and what operators took away. No secrets.

Writing never fails a call: what cannot be written is told in the daemon's log instead. A caller that is
refused again and again gets a line at most every REPEAT_S, which counts the others.
"""

import errno
import json
import logging
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvd.errors import (
    KvdError,
    LimitExceededError,
    NotOwnerError,
    PermissionDeniedError,
    UnauthenticatedError,
)

MAX_FILE_BYTES = 4 << 20  # bytes; some 15,000 lines
KEPT_FILES = 3  # older ones: audit.jsonl.1 is the newest of them
MAX_VALUE_CHARS = 300  # characters of one value: a caller must not fill the log with its own words
OPENED = (
    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
)  # no link to elsewhere, and no wait for whoever reads a pipe: others may write to the folder
REPEAT_S = 1.0  # seconds between two lines about the same refusal
MAX_REMEMBERED = 1024  # refusals told apart, the oldest forgotten first
REFUSALS = (UnauthenticatedError, PermissionDeniedError, NotOwnerError, LimitExceededError)
"""Failures that are about who asks or how much, not about what is there."""
LOG = logging.getLogger("kvd.audit")


@dataclass(frozen=True)
class Caller:
    """Whoever called: through which door, as whom, and what is known of its process or address."""

    door: str
    name: str
    details: tuple[tuple[str, object], ...] = ()


class AuditLog:
    """`path` is made with mode 0600 when there is something to write."""

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._device = device
        self._fd = -1
        self._size = 0
        self._refusals: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()

    def refused(self, caller: Caller, what: str, error: KvdError) -> None:
        """Somebody asked for what it may not have."""
        key, now = (caller.door, caller.name, what, error.reason), time.monotonic()
        written_s, left_out = self._refusals.pop(key, (-REPEAT_S, 0))
        if now - written_s < REPEAT_S:
            self._refusals[key] = written_s, left_out + 1
            return
        self._refusals[key] = now, 0
        if len(self._refusals) > MAX_REMEMBERED:
            self._refusals.popitem(last=False)
        told: dict[str, object] = {"reason": error.reason, "why": str(error)}
        self._write("refusal", caller, what, told | ({"left_out": left_out} if left_out else {}))

    def acted(self, caller: Caller, what: str, details: Mapping[str, object]) -> None:
        """An operator changed something, or tried to."""
        self._write("action", caller, what, details)

    def noted(self, event: str, what: str, details: Mapping[str, object]) -> None:
        """Something kvd did by itself or by a signal: a drain, settings that were read again."""
        self._write(event, Caller("kvd", "kvd"), what, details)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, event: str, caller: Caller, what: str, details: Mapping[str, object]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = {"time": now, "device": self._device, "event": event, "door": caller.door, "who": caller.name}
        record = {**head, **dict(caller.details), "what": what, **details}
        line = json.dumps({key: _bounded(value) for key, value in record.items()}) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            LOG.error("%s cannot be written (%s): %s", self._path, error.strerror, line.rstrip())

    def _append(self, line: bytes) -> None:
        if self._fd < 0:
            self._open()
        if self._size + len(line) > MAX_FILE_BYTES and self._size:
            self._rotate()
        self._size += os.write(self._fd, line)

    def _open(self) -> None:
        fd = os.open(self._path, OPENED, 0o600)
        found = os.fstat(fd)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
        if not is_own and self._path != Path(os.devnull):
            os.close(fd)
            raise OSError(errno.EPERM, f"no file of user {os.geteuid()} alone; remove it")
        self._fd, self._size = fd, found.st_size

    def _rotate(self) -> None:
        self.close()
        for age in range(KEPT_FILES, 0, -1):
            newer = self._path if age == 1 else self._path.with_name(f"{self._path.name}.{age - 1}")
            if newer.exists():
                os.replace(newer, self._path.with_name(f"{self._path.name}.{age}"))
        self._open()


def _bounded(value: object) -> object:
    """Numbers as they are, words cut."""
    if isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
