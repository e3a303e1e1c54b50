"""A full disk: what takes something is refused before, what ends something works, nothing is forgotten."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from tests.core.snapshot import state_of

from kvd.errors import KvdError, UnavailableError
from kvd.spec import KVSpec
from kvd_daemon.core import LeaseWish, Limits, Progress, SessionIdentity
from kvd_daemon.journal import JournalSettings, RecordingDevice, open_journal

from .shelf import shelf

SPEC = KVSpec(layers=1, kv_heads=1, head_dim_k=4, head_dim_v=4, block_size=4)
SETTINGS = JournalSettings(segment_bytes=4_096, reserve_bytes=1_024)
LATER = 10**15


class Disk:
    """Says no as the system does, as long as it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._fallocate = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.fallocate)

    def fallocate(self, fd: int, offset: int, size: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fallocate(fd, offset, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def folder():
    with shelf() as folder:
        yield folder / "journal"


@pytest.fixture
def device(folder: Path):
    device = open_journal(folder, 1 << 30, Limits(), SETTINGS).device
    device.create_pool("pool", SPEC, 5_000, "id")
    device.open_session(SessionIdentity("ann", "red", 1, 1), LATER, 0)
    yield device
    device.journal.close()


def lease(device: RecordingDevice) -> int:
    return device.lease("ann", "pool", [LeaseWish(16)], 0).leases[0].lease_id


def leases_until_refused(device: RecordingDevice) -> list[int]:
    taken = []
    while len(taken) < 10_000:
        try:
            taken.append(lease(device))
        except UnavailableError:
            return taken
    raise AssertionError("nothing was refused")


def read_again(folder: Path, device: RecordingDevice) -> None:
    device.journal.close()
    again = open_journal(folder, 1 << 30, Limits(), SETTINGS)
    assert again.found.state == "recovered", again.found.detail
    assert state_of(again.device) == state_of(device)
    again.device.journal.close()


def test_on_a_full_disk_leases_are_refused_by_an_error_that_says_what_is_missing_where(
    device, disk, folder
) -> None:
    disk.is_full = True
    assert len(leases_until_refused(device)) > 10
    with pytest.raises(UnavailableError, match="no room") as caught:
        lease(device)
    assert caught.value.metadata == {"folder": str(folder), "missing_bytes": "4096"}
    device.check()


def test_on_a_full_disk_releases_and_renewals_go_on_out_of_a_reserve(device, disk, folder) -> None:
    disk.is_full = True
    taken = leases_until_refused(device)
    for lease_id in taken[:5]:
        device.renew("ann", [Progress(lease_id, 1, 1, 1)], 5)
        device.release("ann", [lease_id])
    read_again(folder, device)


def test_a_daemon_that_finds_the_disk_full_goes_on_from_its_journal(device, disk, folder) -> None:
    disk.is_full = True
    leases_until_refused(device)
    read_again(folder, device)


def test_as_soon_as_there_is_room_again_leases_are_granted(device, disk, folder) -> None:
    disk.is_full = True
    leases_until_refused(device)
    disk.is_full = False
    lease(device)
    read_again(folder, device)


def test_when_the_reserve_is_used_up_too_nothing_false_is_left_behind(device, disk, folder) -> None:
    disk.is_full = True
    for lease_id in leases_until_refused(device):
        for length in range(1, 4):
            device.renew("ann", [Progress(lease_id, 1, length, length)], length)
        device.release("ann", [lease_id])
    assert not device.leases
    with pytest.raises(UnavailableError):
        lease(device)
    assert list(folder.iterdir()) == []
    device.check()


def test_a_journal_that_was_given_up_is_begun_again_with_all_there_is(device, disk, folder) -> None:
    disk.is_full = True
    [kept, *others] = leases_until_refused(device)
    for lease_id in others:
        for length in range(1, 4):
            device.renew("ann", [Progress(lease_id, 1, length, length)], length)
    disk.is_full = False
    device.release("ann", others[:1])
    lease(device)
    assert kept in device.leases
    read_again(folder, device)


def test_no_journal_on_a_full_disk_is_an_error_that_names_the_folder(disk, tmp_path) -> None:
    disk.is_full = True
    with pytest.raises(UnavailableError, match=str(tmp_path)):
        open_journal(tmp_path / "journal", 1 << 30, Limits(), SETTINGS)


def test_a_snapshot_that_finds_no_room_changes_nothing(device, disk, folder) -> None:
    lease(device)
    disk.is_full = True
    with pytest.raises(UnavailableError, match="make some"):
        device.journal.snapshot_now()
    lease(device)
    read_again(folder, device)


def test_a_record_larger_than_a_segment_gets_its_own(device, folder) -> None:
    lease_id = device.lease("ann", "pool", [LeaseWish(4 * 2_000)], 0).leases[0].lease_id
    hashes = [number.to_bytes(32, "big") for number in range(2_000)]
    device.seal("ann", Progress(lease_id, 1, 8_000, 8_000), hashes)
    device.release("ann", [lease_id])
    device.journal.settle()
    read_again(folder, device)


def test_a_folder_that_somebody_removed_is_made_again_with_all_there_is_and_refuses_nothing(
    device, folder
) -> None:
    kept = lease(device)
    shutil.rmtree(folder)
    for _ in range(100):  # more than a segment holds
        device.release("ann", [lease(device)])
    assert list(device.leases) == [kept]
    device.journal.settle()
    read_again(folder, device)


@pytest.mark.parametrize("gone", ["*", "*.snapshot", "*.segment"])
def test_files_that_somebody_removed_are_missed_at_the_next_look_and_written_again(
    device, folder, gone
) -> None:
    kept = lease(device)
    assert device.journal.look() == ""
    for path in folder.glob(gone):
        path.unlink()
    assert device.journal.look() == ""
    assert kept in device.leases
    read_again(folder, device)


def test_a_folder_that_is_gone_is_missed_too_and_trouble_is_told_as_long_as_it_lasts(
    device, disk, folder
) -> None:
    lease(device)
    shutil.rmtree(folder)
    disk.is_full = True
    assert "nothing would survive: No space left on device" in device.journal.look()
    disk.is_full = False
    assert device.journal.look() == ""
    read_again(folder, device)


def test_a_folder_that_a_file_took_the_place_of_is_named(device, folder) -> None:
    shutil.rmtree(folder)
    folder.touch()
    assert f"{folder}: File exists" in device.journal.look()
    folder.unlink()
    assert device.journal.look() == ""


def test_in_a_place_that_is_anothers_by_now_nothing_is_touched_and_workers_go_on(device, folder) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (theirs := folder / "0000000001.segment").write_text("theirs")
    device.journal.only_while(lambda: False)
    assert "another kvd's" in device.journal.look()
    for _ in range(200):  # more than a segment holds
        device.release("ann", [lease(device)])
    device.journal.remove()
    assert [path.name for path in folder.iterdir()] == [theirs.name]
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
@pytest.mark.parametrize("name", ["0000000000.segment", "0000000009.snapshot"])
def test_what_is_no_file_among_a_journals_files_is_named_and_set_aside(device, folder, make, name) -> None:
    device.journal.close()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    again = open_journal(folder, 1 << 30, Limits(), SETTINGS)
    assert again.found.state == "quarantined"
    assert f"{name} is no file" in again.found.detail
    again.device.journal.close()


def test_a_folder_in_the_place_of_the_next_segment_is_an_error_that_names_it(device, folder) -> None:
    (blocked := folder / "0000000001.new").mkdir()
    leases_until_refused(device)
    with pytest.raises(UnavailableError, match=f"{blocked}: Is a directory"):
        lease(device)
    blocked.rmdir()
    lease(device)
    read_again(folder, device)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_what_is_left_of_a_journal_that_was_being_made_is_in_nobodys_way(tmp_path, make) -> None:
    make(tmp_path / "journal.new")
    opened = open_journal(tmp_path / "journal", 1 << 30, Limits(), SETTINGS)
    assert opened.found.state == "fresh"
    opened.device.journal.remove()


def test_a_place_where_nothing_can_be_made_is_named_and_no_room_is_asked_for(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match=r"file/journal\.new: Not a directory; make way there"):
        open_journal(tmp_path / "file" / "journal", 1 << 30, Limits(), SETTINGS)


def test_what_happens_after_the_close_is_not_written(device, folder) -> None:
    before = state_of(device)
    device.journal.close()
    device.detach("ann", 5)
    with pytest.raises(KvdError):
        lease(device)
    again = open_journal(folder, 1 << 30, Limits(), SETTINGS)
    assert state_of(again.device) == before
    again.device.journal.remove()
    assert not folder.exists()
