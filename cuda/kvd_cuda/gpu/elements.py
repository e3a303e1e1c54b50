"""Reading and writing an element of any KV dtype as float32: the bits of `kvd_cuda.dtypes`."""

from typing import Any

from numba.cuda import types

from kvd_cuda.gpu.intrinsics import (
    Value,
    bits_of,
    from_bits,
    from_float16,
    inlined,
    load_f32,
    load_u8,
    load_u16,
    store_f32,
    store_u16,
    to_float16,
)

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
_FP8_REBIAS = types.float32(2.0**120)  # e4m3's exponent bias is 7, float32's 127
_QUIET_NAN = types.uint32(0x7FC00000)


@inlined
def fp8_value(code: Value) -> Value:
    """float32 of an e4m3 code, exactly, subnormals and NaN included; needs no sm_89."""
    magnitude = types.uint32(code) & types.uint32(0x7F)
    value = from_bits(magnitude << types.uint32(20)) * _FP8_REBIAS
    bits = bits_of(value) if magnitude != types.uint32(0x7F) else _QUIET_NAN
    return from_bits(bits | ((types.uint32(code) & types.uint32(0x80)) << types.uint32(24)))


@inlined
def bfloat16_bits(value: Value) -> Value:
    """uint16 bits of `value` (float32) rounded to nearest even; NaN stays NaN."""
    bits = bits_of(value)
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    rounded = types.uint32(bits + types.uint32(0x7FFF) + odd) >> types.uint32(16)
    return types.uint16(rounded if value == value else types.uint32(0x7FC0))


@inlined
def _read_float32(address: Value) -> Value:
    return load_f32(address)


@inlined
def _read_float16(address: Value) -> Value:
    return from_float16(load_u16(address))


@inlined
def _read_bfloat16(address: Value) -> Value:
    return from_bits(types.uint32(load_u16(address)) << types.uint32(16))


@inlined
def _read_fp8(address: Value) -> Value:
    return fp8_value(load_u8(address))


@inlined
def _write_float32(address: Value, value: Value) -> None:
    store_f32(address, value)


@inlined
def _write_float16(address: Value, value: Value) -> None:
    store_u16(address, to_float16(value))


@inlined
def _write_bfloat16(address: Value, value: Value) -> None:
    store_u16(address, bfloat16_bits(value))


READERS: dict[str, Any] = {
    "float32": _read_float32,
    "float16": _read_float16,
    "bfloat16": _read_bfloat16,
    "float8_e4m3fn": _read_fp8,
}
"""(address) -> float32, for every KV dtype."""

WRITERS: dict[str, Any] = {"float32": _write_float32, "float16": _write_float16, "bfloat16": _write_bfloat16}
"""(address, float32): rounded to nearest even. No fp8: its keys are never rotated."""
