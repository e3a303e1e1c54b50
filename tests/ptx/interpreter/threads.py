"""The state of the threads of some blocks that run together: registers, program counters, barriers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .async_copies import AsyncCopies
from .errors import PtxError
from .memory import ByteStore, GlobalMemory
from .operands import BITS, Address, Name, Number, Operand, number_as, numpy_type
from .program import Kernel, Program
from .races import Who

Array = NDArray[Any]
WARP = 32


@dataclass(frozen=True)
class Launch:
    """What a launch is given; grid (x, y, z), blocks of `threads` along x.

    first_epoch  barriers counted in launches before
    """

    program: Program
    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    arguments: tuple[int | float, ...]
    memory: GlobalMemory
    first_epoch: int


class Threads:
    """All threads of `blocks`, numbers of blocks in the launch's grid, x fastest."""

    def __init__(self, launch: Launch, blocks: Array) -> None:
        self.launch, self.memory = launch, launch.memory
        per_block = launch.threads
        self.count = per_block * blocks.size
        self.local_block = np.arange(self.count) // per_block
        self.block = blocks[self.local_block].astype(np.int32)
        self.in_block = np.arange(self.count) % per_block
        self.shared = ByteStore(launch.program.shared_bytes * blocks.size)
        self.copies = AsyncCopies(self.count)
        self.pc = np.zeros(self.count, np.int64)
        self.waiting = np.zeros(self.count, np.bool_)
        self.exited = np.zeros(self.count, np.bool_)
        self.epoch = np.full(blocks.size, launch.first_epoch, np.int32)
        types = launch.kernel.registers.items()
        self._registers = {name: np.zeros(self.count, _storage(kind)) for name, kind in types}
        self._special = self._special_registers()

    def _special_registers(self) -> dict[str, Array]:
        x, y, _ = self.launch.grid
        lane = self.in_block % WARP
        indices: dict[str, Array] = {
            "%tid.x": self.in_block,
            "%tid.y": 0 * lane,
            "%tid.z": 0 * lane,
            "%laneid": lane,
        }
        indices |= {
            "%ctaid.x": self.block % x,
            "%ctaid.y": self.block // x % y,
            "%ctaid.z": self.block // (x * y),
        }
        sizes = dict(zip("xyz", self.launch.grid, strict=True))
        indices |= {f"%nctaid.{axis}": np.full(self.count, size) for axis, size in sizes.items()}
        indices |= {"%ntid.x": np.full(self.count, self.launch.threads)}
        return {name: values.astype(np.uint32) for name, values in indices.items()}

    def who(self, active: Array) -> Who:
        """The active threads as the access logs know them; `active` are their numbers here."""
        thread = self.block[active] * self.launch.threads + self.in_block[active]
        epoch = self.epoch[self.local_block[active]]
        return Who(thread, self.block[active], epoch, self.launch.first_epoch)

    def read(self, operand: Operand, type_name: str) -> Array:
        """Values of an operand in all threads (or one element for all) as numpy of `type_name`."""
        kind = numpy_type(type_name)
        if isinstance(operand, Number):
            return number_as(operand, kind)
        assert isinstance(operand, Name), operand
        if operand.name in self._registers:
            return _seen_as(self._registers[operand.name], kind)
        if operand.name in self._special:
            return _seen_as(self._special[operand.name], kind)
        return np.full(1, self._symbol(operand.name), kind)

    def _symbol(self, name: str) -> int:
        if name not in self.launch.program.shared:
            raise PtxError(f"unknown operand {name}")
        return self.launch.program.shared[name]

    def read_all(self, operand: Operand, type_name: str) -> Array:
        """As `read`, one element for each thread."""
        values: Array = np.broadcast_to(self.read(operand, type_name), self.count)
        return values

    def write(self, operand: Operand, values: Array, active: Array) -> None:
        """Set a register in active threads (a mask); signed values are extended to its width."""
        assert isinstance(operand, Name), operand
        register = self._registers[operand.name]
        if register.dtype != np.bool_ and values.dtype.itemsize != register.dtype.itemsize:
            assert values.dtype.kind in "iu", "only integers change their width on the way to a register"
            values = values.astype(f"{values.dtype.kind}{register.dtype.itemsize}")
        np.copyto(register, values.view(register.dtype), where=active)

    def predicate(self, name: str) -> Array:
        """A predicate register."""
        return self._registers[name]

    def addresses(self, operand: Operand) -> Array:
        """uint64 [count] of [base + offset]."""
        assert isinstance(operand, Address), operand
        return self.read_all(operand.base, "u64") + np.uint64(operand.offset & (2**64 - 1))

    def shared_offsets(self, addresses: Array, active: Array, width: int) -> Array:
        """Offsets in `shared` of active threads' (numbers) addresses; PtxError out of their block's part."""
        size = self.launch.program.shared_bytes
        outside = (addresses >= size) | (addresses + np.uint64(width) > size)
        if outside.any():
            raise PtxError(f"shared access out of bounds at {int(addresses[outside][0])} of {size}")
        return addresses.astype(np.int64) + self.local_block[active] * size

    def warps(self, mask: Array, active: Array) -> Array:
        """Numbers of the warps that take part; PtxError unless exactly the lanes of `mask` are here."""
        if self.launch.threads % WARP:
            raise PtxError("warp-level instruction in a block that is no multiple of 32 threads")
        here = active.reshape(-1, WARP)
        ballot = (here.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
        if (here & (mask.reshape(-1, WARP) != ballot[:, None])).any():
            raise PtxError("warp-level instruction with part of the warp elsewhere")
        return np.flatnonzero(here.any(axis=1))


def _storage(type_name: str) -> "np.dtype[Any]":
    return np.dtype(np.bool_) if type_name == "pred" else BITS[8 * numpy_type(type_name).itemsize]


def _seen_as(stored: Array, kind: "np.dtype[Any]") -> Array:
    """A register's bits as `kind`: the low ones if it is narrower."""
    if kind == np.bool_ or stored.dtype == np.bool_:
        assert kind == stored.dtype
        return stored
    if kind.itemsize < stored.dtype.itemsize:
        narrowed: Array = stored.astype(BITS[8 * kind.itemsize]).view(kind)
        return narrowed
    if kind.itemsize > stored.dtype.itemsize:
        assert kind.kind in "iu", "only addresses are read from narrower registers"
        return stored.astype(kind)
    return stored.view(kind)
