"""How KV dtypes are stored in numpy, and exact conversion to float32 and back.

| name            | numpy storage | bytes |
|-----------------|---------------|-------|
| float32         | float32       | 4     |
| float16         | float16       | 2     |
| bfloat16        | uint16 bits   | 2     |
| float8_e4m3fn   | uint8 bits    | 1     |
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd_cuda.errors import KernelInputError

Array = NDArray[Any]
FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

FP8_MAX = 448.0  # largest finite e4m3fn; larger values saturate, as inference engines store them

STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
}


def storage_of(dtype: str) -> "np.dtype[Any]":
    """The numpy dtype that holds `dtype`, or KernelInputError naming the known ones."""
    if dtype not in STORAGE:
        raise KernelInputError(f"dtype {dtype!r} is unknown; use one of {', '.join(STORAGE)}")
    return STORAGE[dtype]


def _fp8_table() -> FloatArray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    magnitude[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


FP8_TABLE = _fp8_table()
"""float32 value of each of the 256 e4m3fn codes."""


def to_float32(stored: Array, dtype: str) -> FloatArray:
    """The exact float32 values of `stored`; same shape, a new array unless it is float32 already."""
    assert stored.dtype == storage_of(dtype), f"{stored.dtype} does not store {dtype}"
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e4m3fn":
        return FP8_TABLE[stored]
    return stored.astype(np.float32, copy=False)


def from_float32(values: FloatArray, dtype: str) -> Array:
    """`values` rounded to nearest even in `dtype`'s storage; fp8 saturates at 448, NaN stays NaN."""
    if dtype == "bfloat16":
        return _to_bfloat16(values)
    if dtype == "float8_e4m3fn":
        return _to_fp8(values)
    return values.astype(storage_of(dtype))


def _to_bfloat16(values: FloatArray) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _to_fp8(values: FloatArray) -> Array:
    magnitude = np.minimum(np.abs(values), FP8_MAX).astype(np.float64)
    table = FP8_TABLE[:0x7F].astype(np.float64)
    upper = np.minimum(np.searchsorted(table, magnitude), 0x7E)
    lower = np.maximum(upper - 1, 0)
    to_upper, to_lower = table[upper] - magnitude, magnitude - table[lower]
    nearest = np.where((to_upper < to_lower) | ((to_upper == to_lower) & (upper % 2 == 0)), upper, lower)
    codes = np.where(np.isnan(values), 0x7F, nearest)
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
