"""Values as bytes and back. Exact: what is read has the types that were written; nothing is executed.

A value is one byte that says its kind, then its content. Objects are those of `CLASSES` only, written field
by field; `SCHEMA` says which fields, so that a reader of a later version knows what an earlier one wrote.
"""

import dataclasses
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from fractions import Fraction
from operator import attrgetter
from typing import Any

import numpy as np

from kvd.errors import KvdError
from kvd.policy import H2O, Dense, Dual, ExpectedAttention, Keep, KeyDiff, SnapKV, Span, Streaming
from kvd.spec import KVSpec
from kvd_daemon.core import LeaseWish, Limits, Losses, Offer, Progress, QueryShape, SessionIdentity
from kvd_daemon.core.lease import (
    Compacting,
    Ending,
    LeaseState,
    Lending,
    Observing,
    Scrubbing,
    Shelved,
    Standing,
    Target,
)
from kvd_daemon.core.parked import Copy, CopyMove, Fetching, Move, Parked, Promotion, Spill, Stowing, Tier
from kvd_daemon.core.quotas import Quota
from kvd_daemon.core.session import SessionState

MIN_PACKED = 16  # items; shorter lists are not worth looking for one type in all of them
MAX_SPLIT = 64  # items of a list or dict that are pieces of their own
MAX_DEPTH = 32  # values inside values; bounds the reader's recursion
DTYPES = {np.dtype(name): name[0].encode() + str(np.dtype(name).itemsize).encode() for name in (
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")}  # fmt: skip
CLASSES: tuple[type[Any], ...] = (
    Progress, LeaseWish, QueryShape, SessionIdentity, KVSpec, Limits, Losses, Quota,
    Keep, Dense, Streaming, SnapKV, Dual, H2O, Span, KeyDiff, ExpectedAttention,
    Scrubbing, Standing, Target, Compacting, Observing, Lending, Offer, Shelved,
    Parked, Stowing, Fetching, Move, Copy, Spill, Promotion, CopyMove,
)  # fmt: skip
ENUMS: tuple[type[Enum], ...] = (LeaseState, Ending, SessionState, Tier)

INTEGER, TEXT, BYTES = b"isb"  # the commonest kinds
TEXTS = (TEXT, BYTES)

Fields = tuple[str, ...]
Schema = list[tuple[str, Fields]]


class CodecError(ValueError):
    """No value that this version of kvd can have written."""


def _fields(kind: type[Any]) -> Fields:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


SCHEMA: Schema = [(kind.__name__, _fields(kind)) for kind in CLASSES]
"""What this version writes."""


# -- writing ----------------------------------------------------------------------------------


_tagged = struct.Struct("<cI").pack
_integer = struct.Struct("<cq").pack
_real = struct.Struct("<cd").pack


EMPTY_LIST = _tagged(b"l", 0)


def encode(value: Any) -> bytes:
    """The bytes of a value. Anything that no reader would give back as it was is a bug, and a KeyError."""
    return _WRITERS[type(value)](value)


def pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Bytes of the same value in parts: nothing large is copied, nothing takes long at once."""
    kind = type(value)
    if kind is np.ndarray:
        yield _array_head(value)
        yield value.data
    elif kind is dict and len(value) <= MAX_SPLIT:
        yield b"d" + encode(list(value))
        yield from pieces_of_list(list(value.values()))
    elif kind is list and len(value) <= MAX_SPLIT:
        yield from pieces_of_list(value)
    else:
        yield encode(value)


def pieces_of_list(values: list[Any]) -> Iterator[bytes | memoryview]:
    yield _tagged(b"l", len(values))
    for value in values:
        yield from pieces(value)


def _int(value: int) -> bytes:
    try:
        return _integer(b"i", value)
    except struct.error:
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return _tagged(b"I", len(content)) + content


def _str(value: str) -> bytes:
    content = value.encode()
    return _tagged(b"s", len(content)) + content


def _bytes(value: bytes) -> bytes:
    return _tagged(b"b", len(value)) + value


def _list(value: list[Any]) -> bytes:
    if len(value) >= MIN_PACKED:
        kinds = set(map(type, value))
        if kinds == {int} and -(2**63) <= min(value) <= max(value) < 2**63:
            return _tagged(b"L", len(value)) + np.array(value, "<i8").tobytes()
        if kinds == {bytes} and value[0] and len(set(map(len, value))) == 1:
            return _tagged(b"B", len(value)) + _bytes(b"".join(value))
    return _tagged(b"l", len(value)) + _each(value)


def encode_tuple(value: tuple[Any, ...]) -> bytes:
    """Also one whose fields have names: it is read as a plain one."""
    return _tagged(b"t", len(value)) + _each(value)


def _each(values: Iterable[Any]) -> bytes:
    """One after the other. The commonest kinds without a call: it would cost more than the writing."""
    parts: list[bytes] = []
    for value in values:
        kind = type(value)
        if kind is str:
            content = value.encode()
            parts += _tagged(b"s", len(content)), content
        elif kind is bytes:
            parts += _tagged(b"b", len(value)), value
        elif kind is int and -(2**63) <= value < 2**63:
            parts.append(_integer(b"i", value))
        elif kind is bool:
            parts.append(b"T" if value else b"F")
        elif kind is list and not value:
            parts.append(EMPTY_LIST)
        else:
            parts.append(_WRITERS[kind](value))
    return b"".join(parts)


def _dict(value: dict[Any, Any]) -> bytes:
    return b"d" + _list(list(value)) + _list(list(value.values()))


def _array(value: "np.ndarray[Any, Any]") -> bytes:
    return _array_head(value) + value.tobytes()


def _array_head(value: "np.ndarray[Any, Any]") -> bytes:
    assert value.ndim == 1, "arrays of one axis"
    return _tagged(b"a", value.size) + DTYPES[value.dtype]


def _writer_of(code: int, names: Fields) -> Callable[[Any], bytes]:
    head = b"o" + bytes([code])
    if not names:
        return lambda value: head
    get = attrgetter(*names)
    if len(names) == 1:
        return lambda value: head + encode(get(value))
    return lambda value: head + _each(get(value))


def _enum_writer_of(code: int) -> Callable[[Any], bytes]:
    head = b"e" + bytes([code])
    return lambda value: head + _str(value.value)


_WRITERS: dict[type[Any], Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _int,
    float: lambda value: _real(b"f", value),
    str: _str,
    bytes: _bytes,
    list: _list,
    tuple: encode_tuple,
    dict: _dict,
    np.ndarray: _array,
    Fraction: lambda value: b"q" + _int(value.numerator) + _int(value.denominator),
}
for _code, _kind in enumerate(CLASSES):
    _WRITERS[_kind] = _writer_of(_code, _fields(_kind))
for _code, _enum in enumerate(ENUMS):
    _WRITERS[_enum] = _enum_writer_of(_code)


# -- reading ----------------------------------------------------------------------------------


class Decoder:
    """Reads what a writer with that schema wrote."""

    def __init__(self, schema: Sequence[tuple[str, Sequence[str]]] = SCHEMA) -> None:
        """Raises CodecError if it has classes or fields that this version does not know."""
        known = {kind.__name__: kind for kind in CLASSES}
        self._makers: list[Callable[[list[Any]], Any]] = []
        self._counts: list[int] = []
        for name, names in schema:
            if name not in known or not set(names) <= set(_fields(known[name])):
                raise CodecError(f"{name}({', '.join(names)}) is unknown to this version")
            self._makers.append(_maker(known[name], tuple(names)))
            self._counts.append(len(names))

    def decode(self, data: bytes) -> Any:
        """The one value of `data`. Raises CodecError."""
        values = self.decode_all(data)
        if len(values) != 1:
            raise CodecError(f"{len(values)} values instead of one")
        return values[0]

    def decode_all(self, data: bytes) -> list[Any]:
        """The values of `data`, one after the other. Raises CodecError."""
        values: list[Any] = []
        try:
            at = 0
            while at < len(data):
                at = self._append(values, data, at, 0)
        except (struct.error, IndexError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise CodecError(f"no value: {error}") from error
        except (KvdError, ArithmeticError) as error:
            raise CodecError(f"an impossible value: {error}") from error
        return values

    def _read(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        reader = _READERS.get(data[at])
        if reader is None or depth > MAX_DEPTH:
            raise CodecError(f"no value at byte {at}")
        return reader(self, data, at + 1, depth + 1)

    def _items(self, data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
        if count > len(data) - at:
            raise CodecError(f"{count} items in {len(data) - at} bytes")
        items: list[Any] = []
        for _ in range(count):
            at = self._append(items, data, at, depth)
        return items, at

    def _append(self, items: list[Any], data: bytes, at: int, depth: int) -> int:
        """One more value; the commonest kinds without another call."""
        kind = data[at]
        if kind == INTEGER:
            items.append(_i64(data, at + 1)[0])
            return at + 9
        if kind in TEXTS:
            end: int = at + 5 + _u32(data, at + 1)[0]
            if end > len(data):
                raise CodecError(f"{end - len(data)} bytes are missing")
            content = data[at + 5 : end]
            items.append(content.decode() if kind == TEXT else content)
            return end
        value, end = self._read(data, at, depth)
        items.append(value)
        return end

    def _list(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        return self._items(data, at + 4, _u32(data, at)[0], depth)

    def _tuple(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        items, at = self._list(data, at, depth)
        return tuple(items), at

    def _dict(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        keys, at = self._read(data, at, depth)
        values, at = self._read(data, at, depth)
        return dict(zip(keys, values, strict=True)), at

    def _object(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        code = data[at]
        values, at = self._items(data, at + 1, self._counts[code], depth)
        return self._makers[code](values), at

    def _fraction(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        numerator, at = self._read(data, at, depth)
        denominator, at = self._read(data, at, depth)
        return Fraction(numerator, denominator), at

    def _packed_bytes(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        count = _u32(data, at)[0]
        joined, at = self._read(data, at + 4, depth)
        if not isinstance(joined, bytes) or count == 0 or len(joined) % count or count > len(data):
            raise CodecError("byte strings of one length do not fill their room")
        size = len(joined) // count
        return [joined[size * i : size * (i + 1)] for i in range(count)], at


def _maker(kind: type[Any], names: Fields) -> Callable[[list[Any]], Any]:
    if names == _fields(kind):
        return lambda values: kind(*values)
    return lambda values: kind(**dict(zip(names, values, strict=True)))


_u32 = struct.Struct("<I").unpack_from
_i64 = struct.Struct("<q").unpack_from
_f64 = struct.Struct("<d").unpack_from


def _content(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 4 + _u32(data, at)[0]
    if end > len(data):
        raise CodecError(f"{end - len(data)} bytes are missing")
    return data[at + 4 : end], end


def _read_str(decoder: Decoder, data: bytes, at: int, depth: int) -> tuple[str, int]:
    content, at = _content(data, at)
    return content.decode(), at


def _read_large(decoder: Decoder, data: bytes, at: int, depth: int) -> tuple[int, int]:
    content, at = _content(data, at)
    return int.from_bytes(content, "little", signed=True), at


def _read_enum(decoder: Decoder, data: bytes, at: int, depth: int) -> tuple[Enum, int]:
    value, end = decoder._read(data, at + 1, depth)
    return ENUMS[data[at]](value), end


def _read_array(decoder: Decoder, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    count, kind = _u32(data, at)[0], data[at + 4 : at + 6]
    if kind not in _DTYPE_OF:
        raise CodecError(f"no array of {kind!r}")
    return _packed(data, at + 6, count, _DTYPE_OF[kind])


def _packed(data: bytes, at: int, count: int, dtype: "np.dtype[Any]") -> tuple[Any, int]:
    if count * dtype.itemsize > len(data) - at:
        raise CodecError(f"{count} numbers in {len(data) - at} bytes")
    array = np.frombuffer(data, dtype, count, at).copy()
    return array, at + count * dtype.itemsize


def _read_packed_ints(decoder: Decoder, data: bytes, at: int, depth: int) -> tuple[list[int], int]:
    array, end = _packed(data, at + 4, _u32(data, at)[0], np.dtype("<i8"))
    return array.tolist(), end


_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_READERS: dict[int, Callable[[Decoder, bytes, int, int], tuple[Any, int]]] = {
    ord("N"): lambda decoder, data, at, depth: (None, at),
    ord("T"): lambda decoder, data, at, depth: (True, at),
    ord("F"): lambda decoder, data, at, depth: (False, at),
    ord("i"): lambda decoder, data, at, depth: (_i64(data, at)[0], at + 8),
    ord("I"): _read_large,
    ord("f"): lambda decoder, data, at, depth: (_f64(data, at)[0], at + 8),
    ord("s"): _read_str,
    ord("b"): lambda decoder, data, at, depth: _content(data, at),
    ord("l"): Decoder._list,
    ord("L"): _read_packed_ints,
    ord("B"): Decoder._packed_bytes,
    ord("t"): Decoder._tuple,
    ord("d"): Decoder._dict,
    ord("a"): _read_array,
    ord("e"): _read_enum,
    ord("o"): Decoder._object,
    ord("q"): Decoder._fraction,
}
