"""A segment: a file of records that a process which is killed at any moment leaves in order.

64 bytes of header, then records, each a length, a checksum and a payload, padded to 8 bytes. A record's
checksum goes on from the one before it, so none can be missing, doubled or from elsewhere. The last word of
the header says where the records end. It is stored after them, in one piece, with its complement; what lies
behind is no record. Room is reserved when the file is made: an append never meets a full disk.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from zlib import crc32

from .codec import SCHEMA, encode

MAGIC = b"kvdjrnl\n"
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sIIIIQ16sI")  # Header's fields; a checksum follows
HEADER_BYTES = 64  # with checksum and end word
END_AT = 7  # which 8-byte word says where the records end
RECORD = struct.Struct("<II")  # bytes of the payload, checksum
ALIGNMENT = 8  # bytes; words that must be stored in one piece
SEALED = 1 << 31  # flag of the end word: another segment follows
SCHEMA_SUM = crc32(encode([tuple(entry) for entry in SCHEMA]))


class CorruptError(Exception):
    """Bytes that no kvd has written, or that have changed since. Nothing can be concluded from them."""


@dataclass(frozen=True)
class Header:
    """Of a segment or a snapshot: who wrote it, where it belongs, and the checksum it goes on from."""

    magic: bytes
    format_version: int
    core_version: int
    schema_sum: int
    reserved: int
    number: int
    boot_id: bytes
    chain: int

    def packed(self) -> bytes:
        fields = HEADER.pack(*astuple(self))
        return fields + crc32(fields).to_bytes(4, "little")

    @classmethod
    def read(cls, data: "bytes | mmap.mmap", magic: bytes, where: Path) -> "Header":
        """Raises CorruptError."""
        fields = data[: HEADER.size]
        if len(fields) < HEADER.size:
            raise CorruptError(f"{where.name} is shorter than its header")
        if crc32(fields) != int.from_bytes(data[HEADER.size : HEADER.size + 4], "little"):
            raise CorruptError(f"the header of {where.name} is damaged")
        header = cls(*HEADER.unpack(fields))
        if header.magic != magic or header.format_version != FORMAT_VERSION:
            raise CorruptError(f"{where.name} has another format")
        return header


class Segment:
    """An open one: `append` goes on behind its last record."""

    def __init__(
        self, file: "tuple[Path, os.stat_result]", header: Header, view: mmap.mmap, end: int, chain: int
    ) -> None:
        self.path, self._file = file
        self.header = header
        self.end = end
        self.chain = chain
        self._view = view
        self._words = memoryview(view).cast("Q")

    @classmethod
    def create(cls, path: Path, header: Header, size_bytes: int) -> "Segment":
        """Of at least that size. Raises OSError if there is no room; then nothing was taken."""
        new, size_bytes = path.with_suffix(".new"), size_bytes + -size_bytes % ALIGNMENT
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            view, file = _mapped(fd, size_bytes), os.fstat(fd)
        except OSError:
            new.unlink()
            raise
        finally:
            os.close(fd)
        view[: HEADER.size + 4] = header.packed()
        segment = cls((path, file), header, view, HEADER_BYTES, header.chain)
        segment._store_end(0)
        os.rename(new, path)
        return segment

    @classmethod
    def resume(cls, path: Path, header: Header, end: int, chain: int) -> "Segment":
        """Go on with one that was read to its end."""
        with open(path, "r+b") as file:
            found = os.fstat(file.fileno())
            return cls((path, found), header, _mapped(file.fileno(), found.st_size), end, chain)

    def is_at(self, path: Path) -> bool:
        """Whether this very file can be found there."""
        try:
            return os.path.samestat(self._file, os.stat(path))
        except OSError:
            return False

    @property
    def size_bytes(self) -> int:
        return len(self._view)

    def append(self, payload: bytes) -> bool:
        """Whether there was room for it. When this returns the record outlives the process."""
        size, at = len(payload), self.end
        end = at + RECORD.size + size
        end += -end % ALIGNMENT
        if end > len(self._view):
            return False
        chain = crc32(payload, self.chain)
        padding = bytes(-size % ALIGNMENT)  # over what a longer record left that was never finished
        self._view[at:end] = RECORD.pack(size, chain) + payload + padding
        self.end, self.chain = end, chain
        self._store_end(0)
        return True

    def seal(self) -> None:
        """Another segment follows."""
        self._store_end(SEALED)

    def _store_end(self, flag: int) -> None:
        told = self.end // ALIGNMENT | flag
        self._words[END_AT] = told | (told ^ 0xFFFFFFFF) << 32  # one 8-byte store: it is there or it is not

    def close(self) -> None:
        self._words.release()
        self._view.close()


def _mapped(fd: int, size_bytes: int) -> mmap.mmap:
    """All of it at once: a page fault costs more than an append."""
    return mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def record_bytes(payload_bytes: int) -> int:
    """Room that a record of that payload takes."""
    return RECORD.size + payload_bytes + ALIGNMENT


class SegmentReader:
    """What a segment that was left behind holds. After the last record `end` and `chain` say how to go on."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptError."""
        self.path = path
        data = path.read_bytes()
        self.header = Header.read(data, MAGIC, path)
        if len(data) < HEADER_BYTES:
            raise CorruptError(f"{path.name} is shorter than its header")
        word = struct.unpack_from("<Q", data, END_AT * 8)[0]
        told, complement = word & 0xFFFFFFFF, word >> 32
        self._limit = (told & ~SEALED) * ALIGNMENT
        self.is_sealed = bool(told & SEALED)
        if told ^ complement != 0xFFFFFFFF or not HEADER_BYTES <= self._limit <= len(data):
            raise CorruptError(f"where the records of {path.name} end is damaged")
        self._data = data
        self.end, self.chain = HEADER_BYTES, self.header.chain

    def payloads(self) -> Iterator[bytes]:
        """Raises CorruptError at the first record that is damaged."""
        while self.end < self._limit:
            at = self.end + RECORD.size
            if at > self._limit:
                raise CorruptError(f"half a record at byte {self.end} of {self.path.name}")
            size, chain = RECORD.unpack_from(self._data, self.end)
            end = at + size + -size % ALIGNMENT
            if end > self._limit or any(self._data[at + size : end]):
                raise CorruptError(f"the record at byte {self.end} of {self.path.name} has no such length")
            payload = self._data[at : at + size]
            if crc32(payload, self.chain) != chain:
                raise CorruptError(f"the record at byte {self.end} of {self.path.name} is damaged")
            self.end, self.chain = end, chain
            yield payload
