"""Tiles of keys on their way from the pool to `ldmatrix`, two at a time, by cp.async.

16-bit keys land where the tensor cores read them. fp8 keys land raw and are widened to bfloat16, exactly, in
a pass of their own. An fp8 mma would not do: it wants fp8 on both sides, and queries rounded to 3 mantissa
bits move the cut; it needs sm_89, bfloat16's runs on sm_80; and memory traffic is that of fp8 here too. Rows
are padded by 16 bytes, so that 8 of them lie in different banks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.elements import ITEM_BYTES, fp8_value
from kvd_cuda.gpu.intrinsics import (
    Value,
    bits_of,
    commit_copies,
    copy_async,
    inlined,
    load_shared_u32,
    store_shared_pair,
)
from kvd_cuda.gpu.scores import key_address

CHUNK = 16  # bytes of one copy
PADDING = 16  # bytes after each row
WIDE_HEAD_DIM = 128  # elements; above, tiles are halved to stay within 48 KiB of shared memory


@dataclass(frozen=True)
class KeyTiles:
    """Sizes of the tiles of one specialisation.

    dtype, head_dim  of the keys
    threads          of the block
    """

    dtype: str
    head_dim: int
    threads: int

    @property
    def keys(self) -> int:
        """Keys a tile."""
        return 64 if self.head_dim <= WIDE_HEAD_DIM else 32

    @property
    def fp8(self) -> bool:
        """Whether keys must be widened."""
        return self.dtype == "float8_e4m3fn"

    @property
    def wide_dtype(self) -> str:
        """The dtype that is multiplied."""
        return "bfloat16" if self.fp8 else self.dtype

    @property
    def raw_row_bytes(self) -> int:
        """From one key to the next as copied."""
        return self.head_dim * ITEM_BYTES[self.dtype] + PADDING

    @property
    def row_bytes(self) -> int:
        """From one key to the next as multiplied."""
        return 2 * self.head_dim + PADDING

    @property
    def shared_bytes(self) -> int:
        """Two tiles as copied and, for fp8, one as multiplied."""
        return self.keys * (2 * self.raw_row_bytes + (self.row_bytes if self.fp8 else 0))


@cache
def tile_copier(tiles: KeyTiles) -> Callable[[Value, Value, Value], None]:
    """(task, tile, shared): start copying the keys of slots [tile, tile + keys); past the end come zeros."""
    item_bytes, keys, threads = ITEM_BYTES[tiles.dtype], tiles.keys, tiles.threads
    chunks, row_bytes = tiles.head_dim * item_bytes // CHUNK, tiles.raw_row_bytes

    @inlined
    def copy_tile(task: Value, tile: Value, shared: Value) -> None:
        for index in range(types.uint32(cuda.threadIdx.x), keys * chunks, threads):
            key = types.uint32(index) // types.uint32(chunks)
            chunk = types.uint32(index) % types.uint32(chunks)
            exists = tile + key < task.end
            slot = tile + key if exists else task.end - 1
            address = key_address(task, slot, item_bytes) + types.uint64(chunk * CHUNK)
            copy_async(shared + key * row_bytes + chunk * CHUNK, address, CHUNK if exists else 0)
        commit_copies()

    return copy_tile


@cache
def tile_widener(tiles: KeyTiles) -> Callable[[Value, Value], None]:
    """(raw, wide): fp8 keys at one shared address to bfloat16 at another; barriers are the caller's."""
    keys, threads, words = tiles.keys, tiles.threads, tiles.head_dim // 4
    raw_bytes, wide_bytes = tiles.raw_row_bytes, tiles.row_bytes

    @inlined
    def widen_tile(raw: Value, wide: Value) -> None:
        for index in range(types.uint32(cuda.threadIdx.x), keys * words, threads):
            key = types.uint32(index) // types.uint32(words)
            word = types.uint32(index) % types.uint32(words)
            codes = load_shared_u32(raw + key * raw_bytes + word * 4)
            store_shared_pair(wide + key * wide_bytes + word * 8, two(codes), two(codes >> 16))

    return widen_tile


@inlined
def two(codes: Value) -> Value:
    """The low two e4m3 codes as two bfloat16 in one uint32. Exact: the low half of their float32 is zero."""
    low = bits_of(fp8_value(types.uint32(codes)))
    high = bits_of(fp8_value(types.uint32(codes) >> types.uint32(8)))
    return types.uint32((low >> types.uint32(16)) | (high & types.uint32(0xFFFF0000)))
