"""A snapshot: a device's image and the replies of its sessions, as they were when a segment began."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from kvd_daemon.core.image import Image

from .codec import SCHEMA, CodecError, Decoder, encode, pieces
from .replies import Reply
from .segments import HEADER, CorruptError, Header

MAGIC = b"kvdsnap\n"
BODY_AT = HEADER.size + 4  # behind the header and its checksum
SIZES = struct.Struct("<QQI")  # bytes of the schema, bytes of the values, checksum of both


@dataclass(frozen=True)
class Moment:
    """What a snapshot is made of: taken at once, written when there is time."""

    image: Image
    replies: list[Reply]

    def plain(self) -> dict[str, Any]:
        replies = self.replies
        return {
            "device": self.image.plain(),
            "replies": {name: [getattr(reply, name) for reply in replies] for name in Reply._fields},
        }


@dataclass(frozen=True)
class Snapshot:
    """One that was read: `device` are the values of an image."""

    header: Header
    device: dict[str, Any]
    replies: list[Reply]


def write_snapshot(path: Path, header: Header, moment: Moment) -> None:
    """It is there as a whole or not at all. Raises OSError if there is no room."""
    schema = encode([tuple(entry) for entry in SCHEMA])
    new, checksum, size = path.with_suffix(".writing"), crc32(schema), 0
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(header.packed() + bytes(SIZES.size) + schema)
            for piece in pieces(moment.plain()):
                checksum, size = crc32(piece, checksum), size + memoryview(piece).nbytes
                file.write(piece)
            file.seek(BODY_AT)
            file.write(SIZES.pack(len(schema), size, checksum))
    except OSError:
        new.unlink(missing_ok=True)
        raise
    os.rename(new, path)


def read_snapshot(path: Path) -> Snapshot:
    """Raises CorruptError."""
    data = path.read_bytes()
    header = Header.read(data, MAGIC, path)
    if len(data) < BODY_AT + SIZES.size:
        raise CorruptError(f"{path.name} is shorter than its header")
    schema_bytes, body_bytes, expected = SIZES.unpack_from(data, BODY_AT)
    body_at = BODY_AT + SIZES.size + schema_bytes
    if body_at + body_bytes != len(data) or crc32(data[BODY_AT + SIZES.size :]) != expected:
        raise CorruptError(f"{path.name} is damaged")
    try:
        decoder = Decoder(Decoder([]).decode(data[BODY_AT + SIZES.size : body_at]))
        values = decoder.decode(data[body_at:])
        replies = [Reply(*row) for row in zip(*values["replies"].values(), strict=True)]
        return Snapshot(header, values["device"], replies)
    except (CodecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{path.name} cannot be read by this version: {error}") from error
