"""Mooncake Store over TCP on this machine, its calls without copies of its own: put_from and get_into.

`place` is named by the port of its master. The store's memory is the giver's.
"""

from pathlib import Path

import numpy as np
from mooncake.store import MooncakeDistributedStore
from role import CHUNK_BYTES, PAGE_BYTES, Bytes, Chunks


class Way:
    def __init__(self, place: Path, byte_count: int, is_giver: bool) -> None:
        self._own = np.zeros(byte_count, np.uint8)
        self._store = MooncakeDistributedStore()
        segment = byte_count * 5 // 4 if is_giver else 0  # fuller than 95 % it evicts
        done = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment, CHUNK_BYTES, "tcp", "", f"127.0.0.1:{place.name}"
        )
        assert done == 0, f"setup: {done}"

    def prepare(self) -> Bytes:
        self._own[::PAGE_BYTES] = 1
        assert self._store.register_buffer(self._own.ctypes.data, self._own.size) == 0
        return self._own

    def give(self, chunks: Chunks) -> None:
        for part in chunks:
            address, size = self._own[part].ctypes.data, self._own[part].size
            done = self._store.put_from(f"sequence:{part.start}", address, size)
            assert done == 0, f"put_from: {done}"
            chunks.say()

    def take(self, chunks: Chunks) -> Bytes:
        for part in chunks:
            chunks.hear()
            address, size = self._own[part].ctypes.data, self._own[part].size
            assert self._store.get_into(f"sequence:{part.start}", address, size) == size
        return self._own
