"""Journals in a folder of their own: small ones, copies as a crash would leave them, and what they tell."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from tests.core.snapshot import state_of

from kvd_daemon.core import Limits
from kvd_daemon.journal import JournalSettings, Opened, open_journal

MEMORY_BYTES = 24_000
SMALL = JournalSettings(segment_bytes=16_384, reserve_bytes=4_096)
TINY = JournalSettings(segment_bytes=2_048, reserve_bytes=512)
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def shelf() -> Iterator[Path]:
    """A folder for journals, in memory where there is such a place."""
    folder = Path(mkdtemp(prefix="kvd-journal-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def opened(folder: Path, settings: JournalSettings = SMALL) -> Opened:
    return open_journal(folder, MEMORY_BYTES, Limits(), settings)


def told(folder: Path, settings: JournalSettings = SMALL) -> tuple[object, list[object]]:
    """The state and the replies that a journal tells of, which must be good."""
    found = opened(folder, settings)
    assert found.found.state == "recovered", found.found.detail
    found.device.check()
    found.device.journal.close()
    return state_of(found.device), found.device.replies.kept(found.device.sessions)


def copied(folder: Path, to: Path) -> Path:
    """The files as they are now: what a daemon leaves that is killed now."""
    if to.exists():
        shutil.rmtree(to)
    shutil.copytree(folder, to)
    return to
