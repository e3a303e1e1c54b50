"""Moves, packing, address spaces and conversions between types."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .memory import SHARED_BASE
from .operands import BITS, Vector, numpy_type
from .program import Instruction
from .registry import operation
from .threads import Threads

Array = NDArray[Any]
ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@operation("mov")
def move(threads: Threads, instruction: Instruction, active: Array) -> None:
    """A value, or the parts of a vector into one register and back; low parts first."""
    goal, source = instruction.operands
    if isinstance(source, Vector):
        threads.write(goal, _packed(threads, source, instruction.type), active)
    elif isinstance(goal, Vector):
        whole = threads.read_all(source, instruction.type)
        part_type = BITS[8 * whole.dtype.itemsize // len(goal.parts)]
        parts = np.ascontiguousarray(whole).view(part_type).reshape(threads.count, -1)
        for index, part in enumerate(goal.parts):
            threads.write(part, parts[:, index].copy(), active)
    else:
        threads.write(goal, threads.read(source, instruction.type), active)


def _packed(threads: Threads, source: Vector, type_name: str) -> Array:
    width = int(type_name[1:]) // len(source.parts)
    parts = [threads.read_all(part, f"b{width}") for part in source.parts]
    packed: Array = np.stack(parts, axis=1).view(numpy_type(type_name)).reshape(-1)
    return packed


@operation("cvta")
def convert_address(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Generic addresses of global memory are its own; those of shared memory lie at SHARED_BASE."""
    goal, source = instruction.operands
    base = np.uint64(SHARED_BASE if "shared" in instruction.suffixes else 0)
    address = threads.read(source, "u64")
    threads.write(goal, address - base if "to" in instruction.suffixes else address + base, active)


@operation("cvt")
def convert(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Between integers, between floats, and from one to the other."""
    goal, source = instruction.operands
    to, come_from = (numpy_type(name) for name in instruction.suffixes[-2:])
    values = threads.read(source, instruction.suffixes[-1])
    if come_from.kind == "f" and to.kind in "iu":
        rounding = next((s for s in instruction.suffixes if s in ROUNDINGS), None)
        if rounding is None:
            raise PtxError("conversion to an integer without rounding")
        limits = np.iinfo(to)
        values = np.clip(ROUNDINGS[rounding](values.astype(np.float64)), limits.min, limits.max)
    threads.write(goal, values.astype(to), active)
