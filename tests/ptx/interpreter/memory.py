"""Global and shared memory: bounds, alignment, bytes never written, bytes still on their way, races."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .races import AccessLog, Who

Array = NDArray[Any]
GLOBAL_BASE = 0x7F00_0000_0000  # far from any small number that is mistaken for an address
SHARED_BASE = 0x1000_0000  # of generic addresses of shared memory
RED_ZONE = 256  # bytes between allocations


class ByteStore:
    """Bytes with what is known of each. `at` are offsets of threads' accesses, `who` those threads."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.written = np.zeros(size, np.bool_)
        self.arriving = np.zeros(size, np.bool_)
        self.log = AccessLog(size)

    def extend(self, content: Array) -> None:
        """More bytes behind the others, written before the launch."""
        count = content.size
        self.bytes = np.concatenate([self.bytes, content])
        self.written = np.concatenate([self.written, np.ones(count, np.bool_)])
        self.arriving = np.concatenate([self.arriving, np.zeros(count, np.bool_)])
        self.log.extend(count)

    def read(self, at: Array, width: int, who: Who, *, logged: bool = True) -> Array:
        """uint8 [threads, width]."""
        index = at[:, None] + np.arange(width)
        self._refuse_arriving(index)
        if not self.written[index].all():
            raise PtxError(
                f"read of memory that nobody wrote, at offset {int(index[~self.written[index]][0])}"
            )
        if logged:
            self.log.read(index, who)
        return self.bytes[index]

    def write(self, at: Array, values: Array, who: Who) -> None:
        """values: uint8 [threads, width]."""
        index = at[:, None] + np.arange(values.shape[1])
        self._refuse_arriving(index)
        self.log.write(index, who)
        self.bytes[index] = values
        self.written[index] = True

    def add_u32(self, at: Array, values: Array, who: Who) -> None:
        """Atomic; several threads may add to one word."""
        index = at[:, None] + np.arange(4)
        self._refuse_arriving(index)
        if not self.written[index].all():
            raise PtxError("atomic on memory that nobody wrote")
        self.log.add(index, who)
        np.add.at(self.bytes[: self.bytes.size // 4 * 4].view(np.uint32), at // 4, values)

    def expect(self, at: Array, width: int, who: Who) -> None:
        """From now on these bytes are neither old nor new, until `arrive`."""
        index = at[:, None] + np.arange(width)
        self._refuse_arriving(index)
        self.log.write(index, who)
        self.arriving[index] = True

    def arrive(self, at: Array, values: Array, who: Who) -> None:
        """A copy is complete, and known to be so to the thread that started it."""
        self.arriving[at[:, None] + np.arange(values.shape[1])] = False
        self.write(at, values, who)

    def _refuse_arriving(self, index: Array) -> None:
        if self.arriving[index].any():
            raise PtxError("access to bytes whose cp.async was not waited for")


@dataclass(frozen=True)
class Allocation:
    """Bytes [start, start + size) of the arena."""

    start: int
    size: int


class GlobalMemory:
    """Device memory: an arena of allocations with red zones between them."""

    def __init__(self, size: int) -> None:
        self.store = ByteStore(size)
        self._allocations: list[Allocation] = []
        self._top = RED_ZONE

    def allocate(self, size: int) -> int:
        """Address of `size` bytes that must be written before they are read; aligned to 256."""
        start = -(-self._top // RED_ZONE) * RED_ZONE
        self._top = start + size + RED_ZONE
        if self._top > self.store.bytes.size:
            raise MemoryError(f"the interpreter's arena of {self.store.bytes.size} bytes is full")
        self._allocations.append(Allocation(start, size))
        return GLOBAL_BASE + start

    def put(self, array: Array) -> int:
        """Address of a copy of `array`."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.allocate(content.size)
        self.set(address, content)
        return address

    def set(self, address: int, content: Array) -> None:
        """Overwrite bytes from `address` on, as a host would between launches."""
        flat = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        where = slice(address - GLOBAL_BASE, address - GLOBAL_BASE + flat.size)
        self.store.bytes[where] = flat
        self.store.written[where] = True

    def get(self, address: int, like: Array) -> Array:
        """A copy of what lies at `address`, in the shape and dtype of `like`."""
        start = address - GLOBAL_BASE
        content: Array = self.store.bytes[start : start + like.nbytes].copy()
        return content.view(like.dtype).reshape(like.shape)

    def offsets(self, addresses: Array, width: int) -> Array:
        """Arena offsets of accesses of `width` bytes; PtxError if any leaves its allocation."""
        starts = np.array([a.start for a in self._allocations])
        ends = starts + np.array([a.size for a in self._allocations])
        at = addresses.astype(np.int64) - GLOBAL_BASE
        owner = np.searchsorted(starts, at, side="right") - 1
        outside = (owner < 0) | (at + width > ends[np.maximum(owner, 0)])
        if outside.any():
            raise PtxError(f"global access out of bounds at {int(addresses[outside][0]):#x}, {width} bytes")
        return at


def check_alignment(addresses: Array, width: int) -> None:
    """PtxError unless all are multiples of `width` bytes."""
    wrong = addresses % np.uint64(width) != 0
    if wrong.any():
        raise PtxError(f"misaligned access of {width} bytes at {int(addresses[wrong][0]):#x}")
