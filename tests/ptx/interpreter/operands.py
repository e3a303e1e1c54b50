"""Operands of an instruction, and how values of PTX types lie in numpy."""

import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS: "dict[int, np.dtype[Any]]" = {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
"""How a register of so many bits is stored, whatever its type."""

_PREFIX = {"b": "u", "u": "u", "s": "i", "f": "f"}
ADDRESS = re.compile(r"\[\s*([^+\]\s]+)\s*(?:\+\s*(-?\d+))?\s*\]")


def numpy_type(name: str) -> "np.dtype[Any]":
    """numpy's dtype for a PTX type such as s32, b16 or f64; predicates are bool."""
    if name == "pred":
        return np.dtype(np.bool_)
    return np.dtype(f"{_PREFIX[name[0]]}{int(name[1:]) // 8}")


@dataclass(frozen=True)
class Name:
    """A register, a special register or a symbol."""

    name: str


@dataclass(frozen=True)
class Number:
    """A literal: an integer, or the bits of a float."""

    value: int
    is_float_bits: bool = False


@dataclass(frozen=True)
class Address:
    """[base + offset]."""

    base: "Name | Number"
    offset: int


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}."""

    parts: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Pair:
    """value|predicate, two results."""

    value: Name
    predicate: Name


Operand = Name | Number | Address | Vector | Pair


def split_operands(text: str) -> list[str]:
    """Split at commas outside braces and brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += character in "{["
        depth -= character in "}]"
        if character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def parse_operand(text: str) -> Operand:
    """One operand as written."""
    if text.startswith("{"):
        return Vector(tuple(parse_operand(part) for part in split_operands(text[1:-1])))
    if match := ADDRESS.fullmatch(text):
        base = parse_operand(match[1])
        assert isinstance(base, Name | Number)
        return Address(base, int(match[2] or 0))
    if "|" in text:
        value, predicate = text.split("|")
        return Pair(Name(value), Name(predicate))
    if re.match(r"0[fFdD][0-9a-fA-F]{8}", text):
        return Number(int(text[2:], 16), is_float_bits=True)
    if re.match(r"-?\d", text):
        return Number(int(text, 0))
    return Name(text)


def number_as(number: Number, kind: "np.dtype[Any]") -> "NDArray[Any]":
    """One-element array of `number` in the type of the operand it stands for."""
    size = kind.itemsize
    bits = number.value & ((1 << 8 * size) - 1)
    element: NDArray[Any] = np.frombuffer(struct.pack("<Q", bits)[:size], kind)
    return element
