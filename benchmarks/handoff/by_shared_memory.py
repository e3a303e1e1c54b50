"""A copy into POSIX shared memory and a copy out of it, both at work at once. `place` is the file."""

from pathlib import Path

import numpy as np
from role import PAGE_BYTES, Bytes, Chunks


class Way:
    def __init__(self, place: Path, byte_count: int, is_giver: bool) -> None:
        self._shared = np.memmap(place, np.uint8, "r+", shape=(byte_count,))
        self._own = np.zeros(byte_count, np.uint8)

    def prepare(self) -> Bytes:
        self._own[::PAGE_BYTES] = 1
        self._shared[::PAGE_BYTES] = 1
        return self._own

    def give(self, chunks: Chunks) -> None:
        for part in chunks:
            self._shared[part] = self._own[part]
            chunks.say()

    def take(self, chunks: Chunks) -> Bytes:
        for part in chunks:
            chunks.hear()
            self._own[part] = self._shared[part]
        return self._own
