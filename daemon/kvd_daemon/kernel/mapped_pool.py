"""A pool as the kernel worker sees it: its mapped bytes as strided planes."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.spec import KVSpec, Plane
from kvd_cuda.backend import Backend
from kvd_cuda.dtypes import storage_of
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries
from kvd_daemon.core.tiers import content_bytes
from kvd_daemon.kernel.budgets import SCRUB_STEP_BYTES
from kvd_daemon.kernel.messages import IntArray, LeaseAt, QueriesAt

MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
LSE_BYTES = 4  # float32


class MappedPool:
    """Owns the mappings of one pool; they go with the last view of them."""

    backend: Backend | None = None
    """Whoever works on it; None: any that works on host memory."""

    def __init__(self, spec: KVSpec, blocks_total: int, pool_fd: int, sidecar_fd: int) -> None:
        self.spec = spec
        self.blocks_total = blocks_total
        self._bytes = self._mapped(pool_fd, spec.pool_bytes(blocks_total))
        self._sidecar = mmap.mmap(sidecar_fd, spec.sidecar_bytes(blocks_total))
        os.close(pool_fd)
        os.close(sidecar_fd)
        shape = (blocks_total, spec.layers, spec.kv_heads, spec.block_size)
        scores_at = self._sidecar.size() // 2
        self.positions: IntArray = np.ndarray(shape, np.int32, self._sidecar)
        self.scores: npt.NDArray[np.float32] = np.ndarray(shape, np.float32, self._sidecar, scores_at)
        self._flat: npt.NDArray[np.uint8] = np.frombuffer(self._bytes, np.uint8)
        planes = [spec.planes(layer, blocks_total) for layer in range(spec.layers)]
        self.bounce: npt.NDArray[np.uint8] = np.frombuffer(self._bounced(content_bytes(spec)), np.uint8)
        """One slot's content, on its way: the jobs of a kernel worker come one after the other."""
        self._k = [self._plane(k) for k, _ in planes]
        self._v = [self._plane(v) for _, v in planes]

    def _mapped(self, pool_fd: int, byte_count: int) -> Any:
        """A buffer."""
        return mmap.mmap(pool_fd, byte_count)

    def _bounced(self, byte_count: int) -> Any:
        """A buffer."""
        return mmap.mmap(-1, byte_count)

    def _plane(self, plane: Plane) -> npt.NDArray[Any]:
        """[blocks, block_size, kv_heads, head_dim] in the dtype's storage."""
        spec, size = self.spec, self.spec.element_bytes
        shape = (self.blocks_total, spec.block_size, spec.kv_heads, plane.head_dim)
        inner = (spec.kv_heads * plane.head_dim * size, plane.head_dim * size, size)
        strides = (plane.block_stride_bytes, *inner)
        return np.ndarray(shape, storage_of(spec.dtype), self._bytes, plane.offset_bytes, strides)

    def lease(self, at: LeaseAt) -> KVPlanes:
        """The lease's planes; raises kvd_cuda's KernelInputError if its numbers do not fit."""
        return KVPlanes(
            k=self._k,
            v=self._v,
            dtype=self.spec.dtype,
            block_table=at.source,
            length=at.length,
            position=at.position,
            positions=self.positions,
            scores=self.scores,
            compressed_length=at.compressed_length,
            observed_length=at.observed_length,
        )

    def queries(self, at: QueriesAt) -> WindowQueries | None:
        """The tensor in the scratch blocks (and the log-sum-exps behind it); None if there is none."""
        if at.query_count == 0:
            return None
        shape = (self.spec.layers, at.query_count, at.query_heads, self.spec.head_dim_k)
        dtype = storage_of(at.query_dtype)
        values_bytes = int(np.prod(shape)) * dtype.itemsize
        lse_bytes = int(np.prod(shape[:3])) * LSE_BYTES if at.has_row_lse else 0
        raw = self._first_bytes(at.scratch, values_bytes + lse_bytes)
        values = raw[:values_bytes].view(dtype).reshape(shape)
        lse = raw[values_bytes:].view(np.float32).reshape(shape[:3]) if at.has_row_lse else None
        return WindowQueries(values, at.query_dtype, lse)

    def _first_bytes(self, block_ids: IntArray, byte_count: int) -> npt.NDArray[np.uint8]:
        """The first `byte_count` bytes of the blocks, a copy."""
        needed = block_ids[: -(-byte_count // self.spec.block_bytes)]
        if self.spec.layout == "block_outermost":
            rows = self._flat.reshape(self.blocks_total, self.spec.block_bytes)
            return rows[needed].reshape(-1)[:byte_count]
        parts = [
            self._flat[at : at + size] for block in needed.tolist() for at, size in self._segments(block)
        ]
        return np.concatenate(parts)[:byte_count]

    def _segments(self, block_id: int) -> list[tuple[int, int]]:
        return self.spec.block_segments(block_id, self.blocks_total)

    def read_block(self, block_id: int, into: npt.NDArray[np.uint8]) -> None:
        """Its bytes, then its positions and scores: all that a slot of a tier holds."""
        at = self._read_bytes(block_id, into)
        for plane in (self.positions, self.scores):
            entries = plane[block_id].reshape(-1).view(np.uint8)
            into[at : at + entries.size] = entries
            at += entries.size

    def write_block(self, block_id: int, content: npt.NDArray[np.uint8]) -> None:
        """What `read_block` has read, into this block."""
        at = self._write_bytes(block_id, content)
        for plane in (self.positions, self.scores):
            entries = plane[block_id].reshape(-1).view(np.uint8)
            entries[:] = content[at : at + entries.size]
            at += entries.size

    def _read_bytes(self, block_id: int, into: npt.NDArray[np.uint8]) -> int:
        """Answers how many."""
        done = 0
        for at, byte_count in self._segments(block_id):
            into[done : done + byte_count] = self._flat[at : at + byte_count]
            done += byte_count
        return done

    def _write_bytes(self, block_id: int, content: npt.NDArray[np.uint8]) -> int:
        done = 0
        for at, byte_count in self._segments(block_id):
            self._flat[at : at + byte_count] = content[done : done + byte_count]
            done += byte_count
        return done

    def scrub(self, runs: IntArray, on_step: Callable[[], None]) -> None:
        """Zero the blocks of the runs and their sidecar entries; `on_step` after every SCRUB_STEP_BYTES."""
        for start, count in runs.tolist():
            for at, byte_count in self._run_segments(start, count):
                for step_at in range(at, at + byte_count, SCRUB_STEP_BYTES):
                    self._zero(step_at, min(SCRUB_STEP_BYTES, at + byte_count - step_at))
                    on_step()
            self.positions[start : start + count] = 0
            self.scores[start : start + count] = 0

    def _zero(self, offset: int, byte_count: int) -> None:
        self._flat[offset : offset + byte_count] = 0

    def copy(self, copies: IntArray, on_step: Callable[[], None]) -> None:
        """Each block's bytes and sidecar entries into another block; `on_step` after every block."""
        for source, target in copies.tolist():
            pairs = zip(self._segments(source), self._segments(target), strict=True)
            for (source_at, byte_count), (target_at, _) in pairs:
                self._move(source_at, target_at, byte_count)
            self.positions[target] = self.positions[source]
            self.scores[target] = self.scores[source]
            on_step()

    def _move(self, source: int, target: int, byte_count: int) -> None:
        self._flat[target : target + byte_count] = self._flat[source : source + byte_count]

    def _run_segments(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Neighbouring blocks are neighbours in every plane too."""
        for at, byte_count in self._segments(start):
            yield at, byte_count * count

    def populate(self, offset: int, byte_count: int) -> None:
        """Pages for these bytes, contents kept. Raises OSError where memory is short."""
        address = self._flat.ctypes.data + offset
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(byte_count), MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "madvise(MADV_POPULATE_WRITE)")
