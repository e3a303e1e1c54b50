"""publish and adopt: the bytes stay where they are. `place` is kvd's run directory."""

import mmap
from pathlib import Path

import numpy as np
from role import PAGE_BYTES, Bytes, Chunks

import kvd_client

SPEC = kvd_client.KVSpec(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
WAIT_S = 60.0
SPARE_BLOCKS = 16  # that a pool keeps for queries


class Way:
    def __init__(self, place: Path, byte_count: int, is_giver: bool) -> None:
        self._client = kvd_client.connect(place, timeout=WAIT_S)
        self._blocks = byte_count // SPEC.block_bytes
        self._pool = self._client.pool("handoff", SPEC, self._blocks + SPARE_BLOCKS)
        self._is_giver = is_giver

    def prepare(self) -> Bytes:
        if not self._is_giver:
            return self._whole()[::PAGE_BYTES].copy()  # an engine maps its pool once, when it starts
        tokens = self._blocks * SPEC.block_size
        self._lease = self._pool.lease(tokens=tokens)
        self._lease.extend(tokens)
        return self._content(self._lease)

    def _content(self, lease: kvd_client.Lease) -> Bytes:
        """The bytes of its blocks: an empty pool's first lease has one after the other."""
        table = lease.block_table
        assert (np.diff(table) == 1).all()
        start = int(table[0]) * SPEC.block_bytes
        return self._whole()[start : start + table.size * SPEC.block_bytes]

    def _whole(self) -> Bytes:
        """The pool's mapping."""
        mapping = self._pool.layer(0, "numpy")[0]
        while not isinstance(mapping, mmap.mmap):
            mapping = mapping.base if isinstance(mapping, np.ndarray) else mapping.obj
        return np.frombuffer(mapping, np.uint8)

    def give(self, chunks: Chunks) -> None:
        self._lease.commit(self._blocks * SPEC.block_size)
        self._lease.publish("sequence")

    def take(self, chunks: Chunks) -> Bytes:
        self._lease = self._pool.adopt("sequence", wait=WAIT_S)
        return self._content(self._lease)
