"""Queries of the past as they would be asked on average of what comes: what Expected Attention takes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.arguments import whole
from kvd.errors import InvalidArgumentError
from kvd.limits import MAX_TOKENS_PER_LEASE
from kvd.policy import MAX_WINDOW

AHEAD_TOKENS = 512  # positions to come that are averaged over; as in the published method


def future_queries(
    queries: Any, positions: Any, inv_freq: Any, position: int, ahead: int = AHEAD_TOKENS
) -> "npt.NDArray[np.float32]":
    """The same queries under the mean rotation of the next `ahead` positions from `position` on.

    queries    post-RoPE, torch or numpy [layers, n, query_heads, head_dim], of any tokens
    positions  their n positions
    inv_freq   [rotary_dim / 2], the model's own; element i pairs with i + rotary_dim / 2
    position   of the next token, e.g. `lease.position`

    Pass the answer as `queries` to Lease.compress(ExpectedAttention(...)). Each is turned back from its own
    position, then turned by the mean of all rotations to come, so that mean and covariance are those of the
    paper (Devoto et al. 2025, arXiv 2510.00636, section 3). Raises InvalidArgumentError.
    """
    rows = np.array(queries.float().numpy() if hasattr(queries, "numpy") else queries, np.float32)
    frequencies = np.array(inv_freq.numpy() if hasattr(inv_freq, "numpy") else inv_freq, np.float64)
    asked_at = np.array(positions, np.int64)
    if rows.ndim != 4 or asked_at.shape != rows.shape[1:2] or not rows.size:
        raise InvalidArgumentError(
            f"queries {rows.shape} at {asked_at.shape}; [layers, n, query_heads, head_dim] at [n] needed"
        )
    half = frequencies.size
    if frequencies.ndim != 1 or not 0 < 2 * half <= rows.shape[3]:
        raise InvalidArgumentError(
            f"inv_freq {frequencies.shape}; one for every two of {rows.shape[3]} elements, or fewer, needed"
        )
    start = whole("position", position, 0, MAX_TOKENS_PER_LEASE)
    coming = start + np.arange(whole("ahead", ahead, 1, MAX_WINDOW))
    mean = np.exp(1j * coming[:, None] * frequencies).mean(axis=0)
    turn = mean * np.exp(-1j * asked_at[:, None, None] * frequencies)
    turned = (rows[..., :half] + 1j * rows[..., half : 2 * half]) * turn
    rows[..., :half], rows[..., half : 2 * half] = turned.real, turned.imag
    return rows
