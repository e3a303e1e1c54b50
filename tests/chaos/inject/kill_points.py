"""A daemon that kills itself around an append to its journal, and whose wall clock jumps."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

POINTS = ("before-write", "half-written", "before-reply")
SNAPSHOT_POINTS = ("snapshot-half-written", "snapshot-written")
CLOCK_FILE = "clock-offset-s"


def install(folder: str) -> None:
    from kvd_daemon.journal import log
    from kvd_daemon.journal.segments import Segment

    armed = Path(folder)
    log.write_snapshot = _dying_at_snapshots(log.write_snapshot, armed)
    Segment.append = _dying(Segment.append, armed)  # type: ignore[method-assign]
    _jump(armed / CLOCK_FILE)


def _dying(append: "Callable[..., bool]", armed: Path) -> "Callable[..., bool]":
    def dying(segment: "object", payload: bytes) -> bool:
        if _fires(armed / "before-write"):
            _die()
        if _fires(armed / "half-written"):
            _write_half(segment, payload)
            _die()
        room = append(segment, payload)
        if _fires(armed / "before-reply"):
            _die()
        return room

    return dying


def _dying_at_snapshots(write: "Callable[..., None]", armed: Path) -> "Callable[..., None]":
    def dying(path: Path, *of_what: object) -> None:
        if _fires(armed / "snapshot-half-written"):
            path.with_suffix(".writing").write_bytes(b"half")
            _die()
        write(path, *of_what)
        if _fires(armed / "snapshot-written"):
            _die()

    return dying


def _fires(trigger: Path) -> bool:
    """Once for each time the file is made."""
    try:
        trigger.unlink()
    except FileNotFoundError:
        return False
    return True


def _write_half(segment: "object", payload: bytes) -> None:
    """As if the process had died while it copied the record."""
    view, at = segment._view, segment.end  # type: ignore[attr-defined]
    half = (len(payload).to_bytes(4, "little") + b"\xff\xff\xff\xff" + payload)[: 8 + len(payload) // 2]
    if at + len(half) < len(view):
        view[at : at + len(half)] = half


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL is not survived")


def _jump(offset_file: Path) -> None:
    real_ns = time.time_ns

    def jumping_ns() -> int:
        try:
            return real_ns() + int(float(offset_file.read_text()) * 1e9)
        except (OSError, ValueError):
            return real_ns()

    time.time_ns = jumping_ns
    time.time = lambda: jumping_ns() / 1e9
