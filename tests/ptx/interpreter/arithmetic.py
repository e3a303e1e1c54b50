"""Integer and floating point arithmetic, comparison and selection."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .operands import BITS, Number
from .program import Instruction
from .registry import operation
from .threads import Threads

Array = NDArray[Any]
EX2_MANTISSA_BITS = 22  # to which ex2.approx is right; the rest is cut, so that nobody relies on it


def elementwise(opcode: str, function: Callable[..., Array]) -> None:
    """Register results of `function` over the operands after the first, all in the instruction's type."""

    @operation(opcode)
    def run(threads: Threads, instruction: Instruction, active: Array) -> None:
        goal, *sources = instruction.operands
        values = [threads.read(source, instruction.type) for source in sources]
        threads.write(goal, function(*values).astype(values[0].dtype, copy=False), active)


elementwise("add", np.add)
elementwise("sub", np.subtract)
elementwise("max", np.fmax)
elementwise("min", np.fmin)
elementwise("and", np.bitwise_and)
elementwise("or", np.bitwise_or)
elementwise("xor", np.bitwise_xor)
elementwise("not", np.invert)
elementwise("neg", np.negative)
elementwise("abs", np.abs)
elementwise("rcp", np.reciprocal)
elementwise("sqrt", np.sqrt)


def fused(x: Array, y: Array, z: Array) -> Array:
    """x * y + z; for float32 exact in float64 but for the last bit of rare sums, then rounded once."""
    if x.dtype == np.float32:
        exact: Array = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
        return exact.astype(np.float32)
    wide = x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)
    return wide.astype(x.dtype)


elementwise("fma", fused)


def power_of_two(x: Array) -> Array:
    """2 ** x with as many correct bits as ex2.approx.ftz has; subnormal results are 0."""
    exact = np.exp2(x.astype(np.float64))
    mantissa, exponent = np.frexp(exact)
    cut = np.ldexp(np.trunc(np.ldexp(mantissa, EX2_MANTISSA_BITS)), exponent - EX2_MANTISSA_BITS)
    finite = np.where(np.isfinite(exact), cut, exact)
    return np.where(exact < np.finfo(np.float32).tiny, 0, finite).astype(np.float32)


elementwise("ex2", power_of_two)


@operation("mul")
def multiply(threads: Threads, instruction: Instruction, active: Array) -> None:
    """mul.lo, mul.hi, mul.wide and floating point."""
    goal, *sources = instruction.operands
    x, y = (threads.read(source, instruction.type) for source in sources)
    threads.write(goal, _product(instruction, x, y), active)


@operation("mad")
def multiply_add(threads: Threads, instruction: Instruction, active: Array) -> None:
    """mad.lo and mad.wide."""
    goal, *sources = instruction.operands
    x, y = (threads.read(source, instruction.type) for source in sources[:2])
    product = _product(instruction, x, y)
    kind = f"{instruction.type[0]}{8 * product.dtype.itemsize}"
    threads.write(goal, product + threads.read(sources[2], kind), active)


def _product(instruction: Instruction, x: Array, y: Array) -> Array:
    if "wide" in instruction.suffixes:
        double = f"{x.dtype.kind}{2 * x.dtype.itemsize}"
        wide: Array = x.astype(double) * y.astype(double)
        return wide
    if "hi" not in instruction.suffixes:
        low: Array = np.multiply(x, y, dtype=x.dtype)
        return low
    if x.dtype.itemsize == 8:
        exact = x.astype(object) * y.astype(object)
        return np.array([(v >> 64) for v in exact.reshape(-1)], dtype=x.dtype)
    double = f"{x.dtype.kind}{2 * x.dtype.itemsize}"
    high: Array = (x.astype(double) * y.astype(double) >> 8 * x.dtype.itemsize).astype(x.dtype)
    return high


@operation("bfi")
def insert_bits(threads: Threads, instruction: Instruction, active: Array) -> None:
    """bfi.b32, b64: the low bits of a at a place in b; place and number of bits are literals."""
    goal, a, b, place, count = instruction.operands
    if not (isinstance(place, Number) and isinstance(count, Number)):
        raise PtxError("only bfi with literal places is modelled")
    bits, base = (threads.read_all(source, instruction.type) for source in (a, b))
    kind = bits.dtype.type
    mask = kind(((1 << count.value) - 1) << place.value)
    threads.write(goal, (base & ~mask) | ((bits << kind(place.value)) & mask), active)


@operation("div")
def divide(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Towards zero for integers; a zero divisor is an error, as its result is undefined."""
    goal, *sources = instruction.operands
    x, y = (threads.read_all(source, instruction.type) for source in sources)
    if x.dtype.kind == "f":
        threads.write(goal, x / y, active)
        return
    divisor = _nonzero(y, active)
    quotient = np.abs(x) // np.abs(divisor)
    negative = (x < 0) != (divisor < 0)
    threads.write(goal, np.where(negative, -quotient, quotient).astype(x.dtype), active)


@operation("rem")
def remainder(threads: Threads, instruction: Instruction, active: Array) -> None:
    """With the sign of the dividend."""
    goal, *sources = instruction.operands
    x, y = (threads.read_all(source, instruction.type) for source in sources)
    threads.write(goal, np.fmod(x, _nonzero(y, active)).astype(x.dtype), active)


def _nonzero(divisor: Array, active: Array) -> Array:
    if (divisor[active] == 0).any():
        raise PtxError("division by zero")
    return np.where(divisor == 0, np.ones_like(divisor), divisor)


@operation("shl")
def shift_left(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Amounts past the width give 0."""
    goal, source, by = instruction.operands
    x, amount = threads.read(source, instruction.type), threads.read(by, "u32").astype(np.int64)
    width = 8 * x.dtype.itemsize
    shifted = x << np.minimum(amount, width - 1).astype(x.dtype)
    threads.write(goal, np.where(amount >= width, 0, shifted).astype(x.dtype), active)


@operation("shr")
def shift_right(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Signed types fill with the sign; amounts past the width leave nothing else."""
    goal, source, by = instruction.operands
    x, amount = threads.read(source, instruction.type), threads.read(by, "u32").astype(np.int64)
    width = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(amount, width - 1).astype(x.dtype)
    nothing = (amount >= width) & (x.dtype.kind == "u")
    threads.write(goal, np.where(nothing, 0, shifted).astype(x.dtype), active)


@operation("popc")
def count_ones(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Ones in a word; 32 bits whatever the source."""
    goal, source = instruction.operands
    threads.write(goal, np.bitwise_count(threads.read(source, instruction.type)).astype(np.uint32), active)


COMPARISONS: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@operation("setp")
def compare(threads: Threads, instruction: Instruction, active: Array) -> None:
    """Ordered comparisons are false with NaN, those ending in u are true."""
    goal, *sources = instruction.operands
    x, y = (threads.read(source, instruction.type) for source in sources)
    name = instruction.suffixes[0]
    unordered = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(1, np.bool_)
    if name in ("num", "nan"):
        threads.write(goal, unordered == (name == "nan"), active)
    elif name in COMPARISONS:
        threads.write(goal, COMPARISONS[name](x, y) & ~unordered, active)
    else:
        threads.write(goal, COMPARISONS[name.removesuffix("u")](x, y) | unordered, active)


@operation("selp")
def select(threads: Threads, instruction: Instruction, active: Array) -> None:
    """The first source where the predicate holds, else the second."""
    goal, yes, no, predicate = instruction.operands
    kind = BITS[int(instruction.type[1:])]
    values = [threads.read(source, instruction.type).view(kind) for source in (yes, no)]
    threads.write(goal, np.where(threads.read(predicate, "pred"), *values), active)
