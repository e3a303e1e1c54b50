"""A daemon that cannot write down what it grants grants nothing: its health must not say otherwise."""

import errno
import os
import time
from pathlib import Path

import pytest

from kvd.errors import UnavailableError
from kvd_daemon.core import Limits, SessionIdentity
from kvd_daemon.journal import JournalSettings, RecordingDevice, open_journal

SMALL = JournalSettings(segment_bytes=8 << 10, reserve_bytes=4 << 10)


def opened(folder: Path) -> RecordingDevice:
    return open_journal(folder, 1 << 20, Limits(), SMALL).device


def open_session(device: RecordingDevice, number: int) -> None:
    device.open_session(SessionIdentity(f"session {number}", "tenant", 1, 1), 10**9, 0)


def open_sessions_for_ever(device: RecordingDevice) -> None:
    for number in range(10**6):
        open_session(device, number)


def no_space(fd: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_rehearsal_fails_while_the_journal_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = opened(tmp_path / "journal")
    device.rehearse(time.monotonic_ns())
    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(UnavailableError, match="no room"):
            open_sessions_for_ever(device)
        with pytest.raises(UnavailableError, match="no room"):
            device.rehearse(time.monotonic_ns())
    device.rehearse(time.monotonic_ns())
    assert device.journal is not None
    device.journal.close()


def test_a_rehearsal_leaves_no_record(tmp_path: Path) -> None:
    device = opened(tmp_path / "journal")
    open_session(device, 1)
    for _ in range(10):
        device.rehearse(time.monotonic_ns())
    open_session(device, 2)
    assert device.journal is not None
    device.journal.close()
    again = open_journal(tmp_path / "journal", 1 << 20, Limits(), SMALL)
    assert again.found.records == 2
    assert again.device.journal is not None
    again.device.journal.close()
