"""Journals of another version of kvd, of another boot of the machine, and of other settings."""

import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from tests.core.snapshot import state_of

from kvd.errors import LimitExceededError
from kvd.spec import KVSpec
from kvd_daemon.core import Limits
from kvd_daemon.journal import RecordingDevice, log, recovery

from .shelf import MEMORY_BYTES, SMALL, opened, shelf
from .walking import Walk


@pytest.fixture
def folder():
    with shelf() as folder:
        yield folder / "journal"


def walked(folder: Path, steps: int = 60) -> RecordingDevice:
    device = opened(folder).device
    for _ in Walk(device, 11).steps(steps):
        pass
    return device


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch):
    """Call it, and the core decides differently from then on."""

    def begin() -> None:
        monkeypatch.setattr(log, "CORE_VERSION", log.CORE_VERSION + 1)
        monkeypatch.setattr(recovery, "CORE_VERSION", recovery.CORE_VERSION + 1)

    return begin


def test_another_version_goes_on_from_a_snapshot_without_records(folder, next_version) -> None:
    device = walked(folder)
    device.journal.snapshot_now()
    device.journal.close()
    next_version()
    for _ in range(2):
        again = opened(folder)
        assert again.found.state == "recovered", again.found.detail
        assert again.found.records == 0
        assert state_of(again.device) == state_of(device)
        again.device.journal.close()


def test_another_version_does_not_guess_what_records_mean(folder, next_version) -> None:
    device = walked(folder)
    device.journal.close()
    next_version()
    again = opened(folder)
    assert again.found.state == "quarantined"
    assert "another version" in again.found.detail
    assert not again.device.sessions
    again.device.journal.close()


def test_another_version_that_writes_on_is_read_by_itself(folder, next_version) -> None:
    device = walked(folder)
    device.journal.snapshot_now()
    device.journal.close()
    next_version()
    newer = opened(folder).device
    newer.create_pool("newer", KVSpec(1, 1, 4, 4), 1, "id")
    newer.journal.close()
    again = opened(folder)
    assert (again.found.state, again.found.records) == ("recovered", 1)
    assert state_of(again.device) == state_of(newer)
    again.device.journal.close()


def test_after_another_boot_there_is_no_memory_to_go_on_with(folder, monkeypatch, tmp_path) -> None:
    walked(folder).journal.close()
    boot = tmp_path / "boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    monkeypatch.setattr(log, "BOOT_ID", boot)
    again = opened(folder)
    assert again.found.state == "fresh"
    assert "started anew" in again.found.detail
    assert not again.device.sessions
    assert len(list(folder.parent.glob("journal.before-boot-*"))) == 1
    again.device.journal.close()


def test_the_operators_new_settings_count_and_are_remembered(folder) -> None:
    device = walked(folder)
    device.create_pool("kept", KVSpec(1, 1, 4, 4), 1, "id")
    used = device.memory_used_bytes
    device.journal.close()
    few = replace(Limits(), pools=len(device.pools))
    for _ in range(2):
        again = recovery.open_journal(folder, MEMORY_BYTES * 2, few, SMALL).device
        assert again.memory_bytes == MEMORY_BYTES * 2
        with pytest.raises(LimitExceededError):
            again.create_pool("more", KVSpec(1, 1, 4, 4), 1, "id")
        again.journal.close()
    assert used > 1
    less = recovery.open_journal(folder, 1, few, SMALL).device
    assert less.memory_bytes == used
    less.check()
    less.journal.close()
