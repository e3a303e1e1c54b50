"""One of the two processes of a hand-off: `python role.py WAY ROLE PIPE_FD PLACE BYTES`.

ROLE is "giver", which has a sequence, or "taker", which wants it. Says "ready", waits for a line, does its
part and says when it began (the giver) or ended (the taker), by the machine's monotonic clock, and a sum.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 8 << 20  # bytes between two words from giver to taker, so that both copy at the same time
PAGE_BYTES = 4096  # of memory, to touch each once
FILL_WORDS = 1 << 24  # numbers written at a time

Bytes = npt.NDArray[np.uint8]


class Way(Protocol):
    """How a sequence gets from one process to another. Made in both, from (place, byte_count, is_giver)."""

    def prepare(self) -> Bytes:
        """Room for the sequence, every page touched. The giver's is about to be filled."""

    def give(self, chunks: "Chunks") -> None:
        """Until the taker has nothing more to wait for."""

    def take(self, chunks: "Chunks") -> Bytes:
        """The sequence, where this process can read it."""


class Chunks:
    """Ranges of the sequence's bytes, and a pipe that says how many of them are on their way."""

    def __init__(self, fd: int, byte_count: int) -> None:
        self._fd = fd
        self._byte_count = byte_count

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self._byte_count, CHUNK_BYTES):
            yield slice(start, min(start + CHUNK_BYTES, self._byte_count))

    def say(self) -> None:
        """One more is there."""
        os.write(self._fd, b".")

    def hear(self) -> None:
        """Wait for the next one."""
        assert os.read(self._fd, 1) == b"."


def fill(content: Bytes) -> None:
    """Numbers that differ all along."""
    words = content.view(np.uint32)
    for start in range(0, words.size, FILL_WORDS):
        part = words[start : start + FILL_WORDS]
        part[:] = np.arange(start, start + part.size, dtype=np.uint32)
        part *= np.uint32(2654435761)  # odd, so that every number comes once


def checksum(content: Bytes) -> int:
    sum_ = 0
    for start in range(0, content.size, CHUNK_BYTES):
        sum_ = crc32(content[start : start + CHUNK_BYTES], sum_)
    return sum_


def main() -> None:
    way_name, role, fd, place, size = sys.argv[1:]
    chunks, is_giver = Chunks(int(fd), int(size)), role == "giver"
    module = importlib.import_module(way_name)
    way: Any = module.Way(Path(place), int(size), is_giver)
    content = way.prepare()
    if is_giver:
        fill(content)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    if is_giver:
        way.give(chunks)
        told = {"at": began, "checksum": checksum(content)}
    else:
        taken = way.take(chunks)
        told = {"at": time.monotonic(), "checksum": checksum(taken)}
    print(json.dumps(told), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
