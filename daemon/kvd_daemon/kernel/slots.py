"""Blocks to slots of a host arena and back, with a checksum that goes along.

An arena is a memory file without a size of its own: what was never written, or punched out, takes no memory.
"""

import os
from collections.abc import Callable
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvd_daemon.core.tiers import slot_bytes
from kvd_daemon.kernel.mapped_pool import MappedPool
from kvd_daemon.kernel.messages import Checksums, IntArray

Buffer = npt.NDArray[np.uint8]


def stow(
    pool: MappedPool, source: IntArray, slots: IntArray, arena: int, on_step: Callable[[], None]
) -> Checksums:
    """Checksums of what went from blocks into slots. Raises OSError where memory is short."""
    buffer, stride = pool.bounce, slot_bytes(pool.spec)
    checksums = np.zeros(slots.size, np.uint32)
    for index, (block, slot) in enumerate(zip(source.tolist(), slots.tolist(), strict=True)):
        pool.read_block(block, buffer)
        checksums[index] = crc32(buffer.data)
        write_all(arena, buffer, slot * stride)
        on_step()
    return checksums


def fetch(
    pool: MappedPool,
    slots: IntArray,
    destination: IntArray,
    checksums: Checksums,
    arena: int,
    on_step: Callable[[], None],
) -> IntArray:
    """From slots into blocks; answers indices of damaged slots, whose blocks stay as they are."""
    buffer, stride = pool.bounce, slot_bytes(pool.spec)
    damaged = []
    for index, (slot, block) in enumerate(zip(slots.tolist(), destination.tolist(), strict=True)):
        if read_all(arena, buffer, slot * stride) and crc32(buffer.data) == checksums[index]:
            pool.write_block(block, buffer)
        else:
            damaged.append(index)
        on_step()
    return np.array(damaged, np.int32)


def write_all(fd: int, content: Buffer, offset: int) -> None:
    """Raises OSError."""
    rest = content.data
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def read_all(fd: int, into: Buffer, offset: int) -> bool:
    """False if there are fewer bytes."""
    rest = into.data
    while rest:
        read = os.preadv(fd, [rest], offset)
        if not read:
            return False
        rest, offset = rest[read:], offset + read
    return True
