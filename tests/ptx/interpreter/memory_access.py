"""Loads, stores, asynchronous copies and atomics."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .memory import check_alignment
from .operands import Address, Name, Number, Operand, Vector, numpy_type
from .program import Instruction
from .registry import operation
from .threads import Threads

Array = NDArray[Any]
VECTORS = {"v2": 2, "v4": 4}


def _width(instruction: Instruction) -> tuple[int, int]:
    """(elements, bytes of one)."""
    count = next((VECTORS[s] for s in instruction.suffixes if s in VECTORS), 1)
    return count, numpy_type(instruction.type).itemsize


def _store_of(threads: Threads, instruction: Instruction, address: Operand, who: Array) -> tuple[Any, Array]:
    """The byte store an instruction names, and its active threads' (numbers) offsets there."""
    count, size = _width(instruction)
    addresses = threads.addresses(address)[who]
    check_alignment(addresses, count * size)
    if "global" in instruction.suffixes:
        return threads.memory.store, threads.memory.offsets(addresses, count * size)
    if "shared" in instruction.suffixes:
        return threads.shared, threads.shared_offsets(addresses, who, count * size)
    raise PtxError("only global and shared memory are modelled")


@operation("ld")
def load(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Scalars and vectors; kernel parameters."""
    goal, source = instruction.operands
    if "param" in instruction.suffixes:
        threads.write(goal, _parameter(threads, source, instruction.type), active)
        return
    who = np.flatnonzero(active)
    store, at = _store_of(threads, instruction, source, who)
    count, size = _width(instruction)
    content = store.read(at, count * size, threads.who(who)).view(numpy_type(instruction.type))
    for index, part in enumerate(_parts(goal)):
        values = np.zeros(threads.count, content.dtype)
        values[who] = content[:, index]
        threads.write(part, values, active)


def _parameter(threads: Threads, source: Operand, type_name: str) -> Array:
    assert isinstance(source, Address)
    assert isinstance(source.base, Name)
    index, declared = threads.launch.kernel.parameters[source.base.name]
    if source.offset or int(declared[1:]) != int(type_name[1:]):
        raise PtxError("a parameter must be read whole")
    value = threads.launch.arguments[index]
    if declared[0] == "f":
        return np.full(1, value, numpy_type(declared))
    return np.array([int(value) & ((1 << int(declared[1:])) - 1)], f"u{int(declared[1:]) // 8}").view(
        numpy_type(type_name)
    )


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


@operation("st")
def store(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Scalars and vectors."""
    goal, source = instruction.operands
    who = np.flatnonzero(active)
    target, at = _store_of(threads, instruction, goal, who)
    columns = [threads.read_all(part, instruction.type)[who] for part in _parts(source)]
    target.write(at, np.stack(columns, axis=1).view(np.uint8), threads.who(who))


@operation("cp")
def copy_async(threads: Threads, instruction: Instruction, active: Array) -> None:
    """cp.async of 16 bytes with a source size of 0 or 16, commit_group and wait_group."""
    if "commit_group" in instruction.suffixes:
        threads.copies.commit(active)
    elif "wait_group" in instruction.suffixes:
        (remaining,) = instruction.operands
        assert isinstance(remaining, Number)
        for copy in threads.copies.waited_for(active, remaining.value):
            threads.shared.arrive(copy.offsets, copy.values, threads.who(copy.threads))
    else:
        _start_copy(threads, instruction, np.flatnonzero(active))


def _start_copy(threads: Threads, instruction: Instruction, who: Array) -> None:
    goal, source, width, present = instruction.operands
    if width != Number(16):
        raise PtxError("only copies of 16 bytes are modelled")
    goals, sources = threads.addresses(goal)[who], threads.addresses(source)[who]
    check_alignment(goals, 16)
    check_alignment(sources, 16)
    sizes = threads.read_all(present, "u32")[who]
    if not np.isin(sizes, (0, 16)).all():
        raise PtxError("a copy reads 0 or 16 bytes")
    values = np.zeros((who.size, 16), np.uint8)
    reading = sizes == 16
    at = threads.memory.offsets(sources[reading], 16)
    values[reading] = threads.memory.store.read(at, 16, threads.who(who[reading]))
    offsets = threads.shared_offsets(goals, who, 16)
    threads.shared.expect(offsets, 16, threads.who(who))
    threads.copies.start(who, offsets, values)


@operation("atom")
def atomic(threads: Threads, instruction: Instruction, active: Array) -> None:
    """atom.shared.add on integers: their order does not show, as nobody may use what it returns."""
    goal, address, source = instruction.operands
    _add(threads, instruction, (address, source), active)
    threads.write(goal, np.full(threads.count, 0xDEADBEEF, np.uint32), active)


@operation("red")
def reduction(threads: Threads, instruction: Instruction, active: Array) -> None:
    """red.shared.add on integers."""
    address, source = instruction.operands
    _add(threads, instruction, (address, source), active)


def _add(
    threads: Threads, instruction: Instruction, operands: tuple[Operand, Operand], active: Array
) -> None:
    if not {"shared", "add", "u32"} <= set(instruction.suffixes):
        raise PtxError("only atom.shared.add.u32 is modelled")
    who = np.flatnonzero(active)
    target, at = _store_of(threads, instruction, operands[0], who)
    target.add_u32(at, threads.read_all(operands[1], "u32")[who], threads.who(who))
