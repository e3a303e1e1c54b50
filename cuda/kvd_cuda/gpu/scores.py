"""What both scoring paths agree on: their task, their buffers, the online softmax.

A row is one query of one head: row r of a kv head is head r // window of its group, token r % window, the
newest last. Keys are looked at in segments of SEGMENT slots, a thread block each, whatever the grid: every
sum has one order, so results depend neither on the launch nor on the device. Exponents are to base 2.

| buffer     | shape                                      | content                                       |
|------------|--------------------------------------------|-----------------------------------------------|
| parts      | float32 [layers, kv_heads, segments, rows, 2] | (largest score, sum of exponentials over it) |
| bases      | float32 [layers, kv_heads, rows, 2]        | (m, w): attention = w * 2 ** (score - m)      |
| sums       | float32 [layers, kv_heads, end]            | attention summed over rows                    |
| peaks      | same                                       | its maximum over rows                         |
| row_sums   | float32 [layers, kv_heads, segments, rows] | each row's attention to a segment: 1 in all   |
"""

from typing import NamedTuple

from numba import cuda
from numba.cuda import types

from kvd_cuda.gpu.intrinsics import Value, exp2, inlined, quotient
from kvd_cuda.gpu.kernel import ADDRESSES, BYTES, FLOAT, INT, INT32S, fields_type

SEGMENT = 1024  # slots; parts take 8 / SEGMENT bytes a row and slot, and 8 kv heads x 8 segments fill a GPU
UNSEEN = types.float32(-1e30)  # score of a key that a row must not see; finite, so that no NaN arises


class ScoreTask(NamedTuple):
    """What a scoring launch looks at; its grid is (segments, kv heads, layers).

    queries      address of the first query of this launch, [layers, query_count, query_heads, D]
    key_bases    address of uint64 [layers]: block 0 of each layer's K
    table        address of int32 [blocks of the lease]
    end          slots that exist for these queries, the last of them the newest query's own
    window       queries a head in this launch
    query_count  queries a head lying in the buffer: the stride from layer to layer
    group        query heads a kv head
    kv_heads     of the pool: the stride from token to token
    first_head   kv head of the grid's first one; `queries` begins with its query heads
    head_dim     elements of a key
    block_size   tokens a block
    block_bytes  from one block of a layer's K to the next
    scale        log2(e) / sqrt(D)
    """

    queries: int
    key_bases: int
    table: int
    end: int
    window: int
    query_count: int
    group: int
    kv_heads: int
    first_head: int
    head_dim: int
    block_size: int
    block_bytes: int
    scale: float


SCORE_TASK = fields_type(ScoreTask, (BYTES, ADDRESSES, INT32S, *(INT,) * 9, FLOAT))


@inlined
def key_address(task: Value, slot: Value, item_bytes: Value) -> Value:
    """uint64 address of one key of the kv head and layer that are this block's y and z."""
    head_bytes = types.uint64(task.head_dim) * types.uint64(item_bytes)
    block = quotient(slot, task.block_size)
    inside = types.uint32(slot) - block * types.uint32(task.block_size)
    start = types.uint64(task.table[block]) * types.uint64(task.block_bytes)
    kv_head = types.uint64(task.first_head) + types.uint64(cuda.blockIdx.y)
    head = types.uint64(inside) * types.uint64(task.kv_heads) + kv_head
    return task.key_bases[cuda.blockIdx.z] + start + head * head_bytes


@inlined
def query_address(task: Value, row: Value, item_bytes: Value) -> Value:
    """uint64 address of a row's query, for the kv head and layer that are this block's y and z."""
    head = quotient(row, task.window)
    token = types.uint64(cuda.blockIdx.z) * types.uint64(task.query_count) + types.uint64(
        types.uint32(row) - head * types.uint32(task.window)
    )
    kv_head = token * types.uint64(task.kv_heads) + types.uint64(cuda.blockIdx.y)
    index = kv_head * types.uint64(task.group) + types.uint64(head)
    return task.queries + index * types.uint64(task.head_dim) * types.uint64(item_bytes)


@inlined
def visible_slots(task: Value, row: Value) -> Value:
    """Leading slots that a row may see; 0 for rows past the last."""
    token = types.int32(row) - types.int32(quotient(row, task.window)) * task.window
    return task.end - task.window + token + 1 if row < task.window * task.group else 0


@inlined
def column_index() -> Value:
    """This block's (layer, kv head) among all."""
    return types.int64(cuda.blockIdx.z) * types.int64(cuda.gridDim.y) + types.int64(cuda.blockIdx.y)


@inlined
def segment_index() -> Value:
    """This block's (layer, kv head, segment) among all."""
    return column_index() * types.int64(cuda.gridDim.x) + types.int64(cuda.blockIdx.x)


@inlined
def joined(state: Value, other: Value) -> Value:
    """(largest, sum) of two disjoint sets of scores. NaN scores make the sum NaN."""
    largest = max(state[0], other[0])
    reference = largest if largest > UNSEEN else types.float32(0.0)
    total = state[1] * exp2(state[0] - reference) + other[1] * exp2(other[0] - reference)
    return largest, total
