"""ldmatrix and mma: the fragments of PTX ISA 8.8, 9.7.14.5."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .memory import check_alignment
from .operands import Operand, Vector
from .program import Instruction
from .registry import operation
from .threads import WARP, Threads

Array = NDArray[Any]
LANES = np.arange(WARP)
ROW, COLUMN = LANES // 4, LANES % 4 * 2
EVERY_LANE = 0xFFFFFFFF
WIDENED: dict[str, Callable[[Array], Array]] = {
    "bf16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),
    "f16": lambda bits: bits.view(np.float16).astype(np.float32),
}


def _whole_warps(threads: Threads, active: Array) -> Array:
    return threads.warps(np.full(threads.count, EVERY_LANE, np.uint32), active)


def _parts(operand: Operand) -> tuple[Operand, ...]:
    assert isinstance(operand, Vector)
    return operand.parts


@operation("ldmatrix")
def load_matrix(threads: Threads, instruction: Instruction, active: Array) -> None:
    """ldmatrix.sync.aligned.m8n8.x4.shared.b16: lane l gives the address of row l % 8 of matrix l / 8."""
    if instruction.suffixes != ("sync", "aligned", "m8n8", "x4", "shared", "b16"):
        raise PtxError("only ldmatrix.sync.aligned.m8n8.x4.shared.b16 is modelled")
    goal, address = instruction.operands
    warps = _whole_warps(threads, active)
    who = np.flatnonzero(active)
    addresses = threads.addresses(address)[who]
    check_alignment(addresses, 16)
    at = threads.shared_offsets(addresses, who, 16)
    rows = threads.shared.read(at, 16, threads.who(who)).view(np.uint32)
    by_matrix = rows.reshape(warps.size, 4, WARP)
    for index, part in enumerate(_parts(goal)):
        values = np.zeros(threads.count, np.uint32)
        values[who] = by_matrix[:, index].reshape(-1)
        threads.write(part, values, active)


@operation("mma")
def multiply(threads: Threads, instruction: Instruction, active: Array) -> None:
    """mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}: products summed in float64, rounded once."""
    if instruction.suffixes[2] != "m16n8k16" or instruction.type != "f32":
        raise PtxError("only mma.m16n8k16 with float32 sums is modelled")
    goal, left, right, added = instruction.operands
    _whole_warps(threads, active)
    widen = WIDENED[instruction.suffixes[-2]]
    a = np.empty((threads.count // WARP, 16, 16))
    for index, part in enumerate(_parts(left)):
        _scatter(a, (ROW + index % 2 * 8, COLUMN + index // 2 * 8), _halves(threads, part, widen))
    b = np.empty((threads.count // WARP, 8, 16))
    for index, part in enumerate(_parts(right)):
        _scatter(b, (ROW, COLUMN + index * 8), _halves(threads, part, widen))
    products = a @ b.transpose(0, 2, 1)
    for index, (part, addend) in enumerate(zip(_parts(goal), _parts(added), strict=True)):
        chosen = products[:, ROW + index // 2 * 8, COLUMN + index % 2].reshape(-1)
        total = (chosen + threads.read_all(addend, "f32")).astype(np.float32)
        threads.write(part, total, active)


def _halves(threads: Threads, part: Operand, widen: Callable[[Array], Array]) -> Array:
    """Both 16-bit elements of a register: [warps, 32, 2]."""
    packed = np.ascontiguousarray(threads.read_all(part, "b32"))
    return widen(packed.view(np.uint16)).reshape(-1, WARP, 2)


def _scatter(matrix: Array, where: tuple[Array, Array], halves: Array) -> None:
    rows, columns = where
    matrix[:, rows, columns] = halves[:, :, 0]
    matrix[:, rows, columns + 1] = halves[:, :, 1]
