"""Bytes that changed: the same state, or a journal moved aside and an empty device. Never another state."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.snapshot import state_of

from kvd_daemon.core import Limits
from kvd_daemon.journal import JournalSettings, RecordingDevice
from kvd_daemon.journal.recovery import MAX_ASIDE
from kvd_daemon.journal.segments import CorruptError, Segment, SegmentReader
from kvd_daemon.journal.snapshots import read_snapshot

from .shelf import MEMORY_BYTES, copied, opened, shelf
from .walking import Walk

SMALLEST = JournalSettings(segment_bytes=1_800, reserve_bytes=256)
EMPTY = state_of(RecordingDevice(MEMORY_BYTES, Limits()))
State = object


def written(folder: Path, steps: int = 5) -> State:
    """A journal of a few records in `folder`; answers the state it tells of."""
    device = opened(folder, SMALLEST).device
    for _ in Walk(device, 7).steps(steps):
        device.journal.settle()
    device.journal.close()
    return state_of(device), device.replies.kept(device.sessions)


def check(journal: Path, expected: State) -> bool:
    """Opens it; answers whether it was moved aside."""
    found = opened(journal, SMALLEST)
    device = found.device
    device.check()
    device.journal.close()
    if found.found.state == "recovered":
        assert (state_of(device), device.replies.kept(device.sessions)) == expected
        return False
    assert found.found.state == "quarantined"
    assert state_of(device) == EMPTY
    assert "moved to" in found.found.detail
    aside = list(journal.parent.glob(f"{journal.name}.quarantined-*"))
    assert 0 < len(aside) <= MAX_ASIDE
    return True


def test_any_byte_may_flip() -> None:
    chance = random.Random(8)
    with shelf() as folder:
        expected = written(folder / "journal")
        asides = 0
        for file in sorted((folder / "journal").iterdir()):
            for at in range(file.stat().st_size):
                copy = copied(folder / "journal", folder / "copy")
                flip(copy / file.name, at, 1 << chance.randrange(8))
                asides += check(copy, expected)
        assert asides > 500


def flip(file: Path, at: int, bits: int) -> None:
    with file.open("r+b") as opened_file:
        opened_file.seek(at)
        byte = opened_file.read(1)[0]
        opened_file.seek(at)
        opened_file.write(bytes([byte ^ bits]))


def zeroed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes(64) + data[at + 64 :]


def truncated(data: bytes, at: int) -> bytes:
    return data[:at]


def doubled(data: bytes, at: int) -> bytes:
    return data[:at] + data[at - 64 : at] + data[at + 64 :]


def moved(data: bytes, at: int) -> bytes:
    return data[: at - 8] + data[at:] + bytes(8)


@pytest.mark.parametrize("damage", [zeroed, truncated, doubled, moved])
def test_pages_may_be_lost_doubled_or_moved(damage: Callable[[bytes, int], bytes]) -> None:
    with shelf() as folder:
        expected = written(folder / "journal")
        for file in sorted((folder / "journal").iterdir()):
            data = file.read_bytes()
            for at in range(64, len(data), 32):
                copy = copied(folder / "journal", folder / "copy")
                (copy / file.name).write_bytes(damage(data, at))
                check(copy, expected)


def test_any_file_may_be_missing() -> None:
    with shelf() as folder:
        journal = folder / "journal"
        device = opened(journal, SMALLEST).device
        for number in range(1, 4):  # no snapshot can be written there: all segments count
            (journal / f"{number:010d}.writing").mkdir()
        for _ in Walk(device, 9).steps(200):
            device.journal.settle()
            if (journal / "0000000003.segment").exists():
                break
        device.journal.close()
        for number in range(1, 4):
            (journal / f"{number:010d}.writing").rmdir()
        files = sorted(file.name for file in journal.iterdir())
        assert len(files) == 5
        for name in files:
            copy = copied(journal, folder / "copy")
            (copy / name).unlink()
            assert check(copy, None)
        expected = state_of(device), device.replies.kept(device.sessions)
        assert not check(copied(journal, folder / "copy"), expected)


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"kvdjrnl\n" * 600])
@pytest.mark.parametrize("suffix", ["segment", "snapshot"])
def test_files_of_nonsense_are_moved_aside(suffix: str, content: bytes) -> None:
    with shelf() as folder:
        written(folder / "journal")
        max((folder / "journal").glob(f"*.{suffix}")).write_bytes(content)
        assert check(folder / "journal", None)


def test_of_journals_moved_aside_only_the_newest_are_kept() -> None:
    with shelf() as folder:
        for _ in range(MAX_ASIDE + 2):
            written(folder / "journal", steps=2)
            (folder / "journal" / "0000000000.snapshot").write_bytes(b"nonsense")
            assert check(folder / "journal", None)
        assert len(list(folder.iterdir())) == 1 + MAX_ASIDE


BOUNDED = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@BOUNDED
@given(st.binary(max_size=300))
def test_the_readers_of_segments_and_snapshots_answer_any_bytes_by_one_error(
    tmp_path: Path, data: bytes
) -> None:
    file = tmp_path / "0000000000.any"
    file.write_bytes(data)
    for read in (SegmentReader, read_snapshot):
        with pytest.raises(CorruptError):
            read(file)


@BOUNDED
@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 255)), min_size=1, max_size=20), st.booleans()
)
def test_any_bytes_may_change_at_once(
    tmp_path: Path, changes: list[tuple[int, int]], in_segment: bool
) -> None:
    original = tmp_path / "journal"
    if not original.exists():
        EXPECTED[original] = written(original)
    copy = copied(original, tmp_path / "copy")
    file = next(copy.glob("*.segment" if in_segment else "*.snapshot"))
    data = bytearray(file.read_bytes())
    for at, value in changes:
        data[at % len(data)] = value
    file.write_bytes(data)
    check(copy, EXPECTED[original])


EXPECTED: dict[Path, State] = {}


@BOUNDED
@given(st.data())
def test_records_of_nonsense_with_right_checksums_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    """As no disk makes them, but perhaps another program."""
    original = tmp_path / "journal"
    if not original.exists():
        EXPECTED[original] = written(original, steps=40)
    copy = copied(original, tmp_path / "copy")
    reader = SegmentReader(max(copy.glob("*.segment")))
    payloads = list(reader.payloads())
    nonsense = bytearray(data.draw(st.one_of(st.sampled_from(payloads), st.binary(min_size=1, max_size=100))))
    for at in data.draw(st.lists(st.integers(0, len(nonsense) - 1), max_size=3)):
        nonsense[at] = data.draw(st.integers(0, 255))
    segment = Segment.resume(reader.path, reader.header, reader.end, reader.chain)
    assert segment.append(bytes(nonsense))
    segment.close()
    found = opened(copy, SMALLEST)
    found.device.check()
    found.device.journal.close()
    assert found.found.state in ("recovered", "quarantined")
