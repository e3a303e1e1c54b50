"""A daemon that is killed at any moment leaves a journal that tells what it had done by then."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.core.snapshot import state_of

from kvd.spec import KVSpec
from kvd_daemon.journal import RecordingDevice
from kvd_daemon.journal.segments import HEADER_BYTES, SegmentReader

from .shelf import MEMORY_BYTES, SMALL, TINY, copied, opened, shelf, told
from .walking import Walk

STEPS = 150  # of a recorded run
KILLS = 5  # of real processes
POOL = KVSpec(1, 1, 4, 4, block_size=2)
WRITER = Path(__file__).with_name("killed_writer.py")


def everything(device: RecordingDevice) -> tuple[object, list[object]]:
    return state_of(device), device.replies.kept(device.sessions)


@pytest.mark.parametrize("settings", [SMALL, TINY], ids=["one segment", "many segments"])
def test_killed_after_any_record_the_journal_tells_what_was_done_by_then(settings) -> None:
    with shelf() as folder:
        device = opened(folder / "journal", settings).device
        for _ in Walk(device, 1).steps(STEPS):
            device.journal.settle()
            assert told(copied(folder / "journal", folder / "copy"), settings) == everything(device)
        device.journal.close()


def test_killed_between_the_bytes_of_a_record_and_the_word_that_it_is_there_it_never_was() -> None:
    with shelf() as folder:
        device = opened(folder / "journal").device
        for step in Walk(device, 2).steps(60):
            device.journal.settle()
            copy = copied(folder / "journal", folder / "copy")
            torn = max(copy.glob("*.segment"))
            end = last_record_end(torn)
            torn_bytes = random.Random(step).randbytes(200)
            data = bytearray(torn.read_bytes())
            data[end : end + len(torn_bytes)] = torn_bytes
            torn.write_bytes(data)
            assert told(copy) == everything(device)
        device.journal.close()


def last_record_end(segment: Path) -> int:
    reader = SegmentReader(segment)
    assert sum(1 for _ in reader.payloads()) > 0
    assert reader.end > HEADER_BYTES
    return reader.end


@pytest.mark.parametrize("unfinished", ["0000000009.new", "0000000009.writing", "0000000001.writing"])
def test_what_was_never_completed_is_passed_over(unfinished: str) -> None:
    with shelf() as folder:
        device = opened(folder / "journal").device
        for _ in Walk(device, 3).steps(20):
            pass
        device.journal.close()
        (folder / "journal" / unfinished).write_bytes(b"half a file")
        assert told(folder / "journal") == everything(device)


def test_killed_before_older_files_are_deleted_they_are_passed_over() -> None:
    with shelf() as folder:
        device = opened(folder / "journal", TINY).device
        walk = Walk(device, 4).steps(400)
        while not (folder / "journal" / "0000000001.snapshot").exists():
            older = copied(folder / "journal", folder / "older")
            next(walk)
            device.journal.settle()
        device.journal.settle()
        for file in older.iterdir():
            if not (folder / "journal" / file.name).exists():
                shutil.copy(file, folder / "journal")
        device.journal.close()
        assert told(folder / "journal", TINY) == everything(device)
        assert not (folder / "journal" / "0000000000.snapshot").exists()


def test_a_journal_goes_on_where_it_ended_however_often_it_is_opened() -> None:
    with shelf() as folder:
        device = opened(folder / "journal", TINY).device
        for round_ in range(30):
            device.journal.settle()
            opened_again = opened(copied(folder / "journal", folder / "copy"), TINY)
            assert everything(opened_again.device) == everything(device)
            opened_again.device.journal.close()
            device.journal.close()
            device = opened(folder / "journal", TINY).device
            device.create_pool("pool", POOL, 1, f"id {round_}")
            device.drop_pool("pool")
        device.journal.close()


def test_a_process_killed_at_random_leaves_what_it_said_was_done_and_at_most_one_step_more() -> None:
    chance = random.Random(5)
    with shelf() as folder:
        for kill in range(KILLS):
            journal = folder / f"{kill}"
            done = killed_after(journal, kill, chance.randint(1, 400))
            device = RecordingDevice(MEMORY_BYTES)
            walk = Walk(device, kill).steps(done + 2)
            for _ in range(done):
                next(walk)
            expected = [everything(device)]
            next(walk)
            expected.append(everything(device))
            assert told(journal, TINY) in expected


def killed_after(journal: Path, seed: int, steps: int) -> int:
    """Steps that a writer said it had done when it was killed, some `steps`."""
    command = [sys.executable, str(WRITER), str(journal), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        done = len(writer.stdout.read(steps))
        writer.kill()
        return done + len(writer.stdout.read())
