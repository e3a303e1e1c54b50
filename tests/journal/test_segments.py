"""A segment after a process that died in the middle of a record."""

import random
from pathlib import Path

import pytest

from kvd_daemon.journal.segments import FORMAT_VERSION, MAGIC, Header, Segment, SegmentReader

SIZE_BYTES = 1 << 16


@pytest.mark.parametrize("size", range(1, 17))
def test_a_record_that_was_never_finished_does_not_show_in_the_next_one(tmp_path: Path, size: int) -> None:
    path = tmp_path / "0.segment"
    header = Header(MAGIC, FORMAT_VERSION, 1, 2, 0, 0, bytes(16), 0)
    first = Segment.create(path, header, SIZE_BYTES)
    assert first.append(b"whole")
    first.close()
    data = bytearray(path.read_bytes())
    data[first.end : first.end + 100] = random.Random(size).randbytes(100)
    path.write_bytes(data)
    assert payloads(path) == [b"whole"]

    reader = SegmentReader(path)
    assert list(reader.payloads()) == [b"whole"]
    second = Segment.resume(path, header, reader.end, reader.chain)
    assert second.append(b"x" * size)
    second.close()
    assert payloads(path) == [b"whole", b"x" * size]


def payloads(path: Path) -> list[bytes]:
    return list(SegmentReader(path).payloads())
