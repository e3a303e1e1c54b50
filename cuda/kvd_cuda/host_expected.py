"""Expected Attention on CPU memory (Devoto et al. 2025, arXiv 2510.00636, section 3).

If a query head's queries are normally distributed, E exp(q.k / sqrt(D)) = exp(m + v / 2), where m and v are
mean and variance of the scaled scores q.k / sqrt(D). Those of the queries given are taken: the same as with
their mean and covariance, which no one has to form. Sinks are left out of the softmax: a head that looks for
something looks at a sink as long as it has not found it, and would have no say.
"""

from collections.abc import Iterator

import numpy as np

from kvd_cuda.backend import NAN_SCORES, NAN_VALUES
from kvd_cuda.dtypes import Array, DoubleArray, to_float32
from kvd_cuda.errors import KernelInputError
from kvd_cuda.planes import KVPlanes
from kvd_cuda.queries import WindowQueries

ATTENTION_FLOOR = (
    0.01  # added to what is expected, so that a long value counts where little is; published: 0.01-0.02
)
TILE = 2048  # slots at a time, and
ROWS = 256  # queries at a time, always: sums come out the same whatever workspace there is; 4 MiB of scores


def expected_attention(
    planes: KVPlanes, queries: WindowQueries, column: tuple[int, int], sinks: int
) -> DoubleArray:
    """float64 [length - sinks], sums to 1: mean over the group's heads. Raises KernelInputError on NaN."""
    layer, kv_head = column
    rows = queries.folded(layer, kv_head, planes.kv_heads).astype(np.float64) / np.sqrt(planes.head_dim_k)
    heads = rows.reshape(-1, queries.count, planes.head_dim_k)
    logs = np.empty((len(heads), planes.length))
    for start, keys in _tiles(planes, planes.k[layer], kv_head):
        for head, asked in enumerate(heads):
            logs[head, start : start + len(keys)] = _log_expectation(asked, keys)
    if not np.isfinite(logs).all():
        raise KernelInputError(NAN_SCORES)
    logs = logs[:, sinks:]
    attention = np.exp(logs - logs.max(axis=1, keepdims=True))
    attention /= attention.sum(axis=1, keepdims=True)
    mean: DoubleArray = attention.mean(axis=0)
    return mean


def value_lengths(planes: KVPlanes, layer: int, kv_head: int) -> DoubleArray:
    """float64 [length]. Raises KernelInputError on NaN."""
    lengths = np.empty(planes.length)
    for start, values in _tiles(planes, planes.v[layer], kv_head):
        with np.errstate(invalid="ignore"):
            lengths[start : start + len(values)] = np.linalg.norm(values, axis=1)
    if not np.isfinite(lengths).all():
        raise KernelInputError(NAN_VALUES)
    return lengths


def _log_expectation(asked: DoubleArray, keys: DoubleArray) -> DoubleArray:
    """m + v / 2 of every key, over all of `asked`."""
    total, squares = np.zeros(len(keys)), np.zeros(len(keys))
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are told by the sums
        for start in range(0, len(asked), ROWS):
            scores = asked[start : start + ROWS] @ keys.T
            total += scores.sum(axis=0)
            squares += np.einsum("qk,qk->k", scores, scores)
        mean = total / len(asked)
        spread: DoubleArray = mean + np.maximum(squares / len(asked) - mean * mean, 0) / 2
    return spread


def _tiles(planes: KVPlanes, plane: Array, kv_head: int) -> Iterator[tuple[int, DoubleArray]]:
    """First slot and float64 [slots, head_dim] of one head, a tile at a time."""
    for start in range(0, planes.length, TILE):
        slots = np.arange(start, min(start + TILE, planes.length))
        blocks, offsets = planes.block_table[slots // planes.block_size], slots % planes.block_size
        yield start, to_float32(plane[blocks, offsets, kv_head], planes.dtype).astype(np.float64)
