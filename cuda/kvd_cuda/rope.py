"""Rotating cached keys by a number of positions (streaming with cache positions)."""

import numpy as np

from kvd_cuda.dtypes import DoubleArray, FloatArray


def rotate(keys: FloatArray, delta: int, inv_freq: DoubleArray, style: str) -> DoubleArray:
    """`keys` [..., head_dim] rotated by `delta` positions, in float64; elements past the rotary ones stay.

    style "half" pairs i with i + len(inv_freq), "interleaved" 2 i with 2 i + 1. Source: RoFormer, eq. 34.
    """
    half = inv_freq.size
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if style == "half"
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    cos, sin = np.cos(delta * inv_freq), np.sin(delta * inv_freq)
    rotated = keys.astype(np.float64)
    x, y = rotated[..., first].copy(), rotated[..., second].copy()
    rotated[..., first] = x * cos - y * sin
    rotated[..., second] = x * sin + y * cos
    return rotated
