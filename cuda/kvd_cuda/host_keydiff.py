"""KeyDiff on CPU memory: which keys differ most from all others (Park et al. 2025, arXiv 2504.15364).

With k^ the keys of one kv head at unit length, their anchor is the mean of all k^, and a token's score is
minus the cosine between its key and the anchor: keys that point where most do say little each. Keys alone
decide, so nobody has to ask anything. The score of a key of no length is 0.
"""

from collections.abc import Iterator

import numpy as np

from kvd_cuda.backend import NAN_KEYS
from kvd_cuda.dtypes import Array, DoubleArray, FloatArray, to_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.planes import KVPlanes

TILE = 4096  # slots at a time, always: the sums come out the same whatever workspace there is


def distinctness(planes: KVPlanes, layer: int, kv_head: int) -> FloatArray:
    """float32 [length], larger for keys that differ more. Raises KernelInputError on NaN or infinite keys."""
    total = np.zeros(planes.head_dim_k)
    for _, unit in _unit_keys(planes, layer, kv_head):
        total += unit.sum(axis=0)
    if not np.isfinite(total).all():
        raise KernelInputError(NAN_KEYS)
    length = np.linalg.norm(total)
    anchor = total / length if length else total
    scores = np.empty(planes.length, np.float32)
    for start, unit in _unit_keys(planes, layer, kv_head):
        scores[start : start + len(unit)] = -(unit @ anchor)
    return scores


def _unit_keys(planes: KVPlanes, layer: int, kv_head: int) -> Iterator[tuple[int, DoubleArray]]:
    """First slot and keys at unit length, float64 [slots, head_dim], a tile at a time."""
    for start in range(0, planes.length, TILE):
        slots = np.arange(start, min(start + TILE, planes.length))
        blocks, offsets = planes.block_table[slots // planes.block_size], slots % planes.block_size
        stored: Array = planes.k[layer][blocks, offsets, kv_head]
        keys = to_float32(stored, planes.dtype).astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite keys: told by their sum
            lengths = np.linalg.norm(keys, axis=1, keepdims=True)
            yield start, keys / np.where(lengths == 0, 1.0, lengths)
