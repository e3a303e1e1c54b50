"""The ring of a streaming lease: which blocks are recycled so that more tokens fit.

The table is `sink_slots` then `ring_slots`, filled in table order. When they are full, the oldest ring
blocks move to the end of the table and are filled again. Sink slots keep position = slot for ever.
"""

from typing import NamedTuple

from kvd.policy import Streaming


class Recycling(NamedTuple):
    """`blocks` oldest ring blocks move to the end; then `length` slots are in use.

    Of the new tokens the first `skip_after` are stored, the `skipped` ones after them get no slot,
    the others are stored.
    """

    blocks: int
    length: int
    skip_after: int
    skipped: int


def recycle(policy: Streaming, block_size: int, length: int, tokens: int) -> Recycling:
    """What has to happen before `tokens` more are written into a ring with `length` slots in use."""
    sink_slots = policy.sink_blocks(block_size) * block_size
    ring_slots = policy.capacity_blocks(block_size) * block_size - sink_slots
    if length + tokens <= sink_slots + ring_slots:
        return Recycling(0, length, 0, 0)
    into_sinks = max(0, sink_slots - length)
    used = max(0, length - sink_slots)
    skipped = max(0, tokens - into_sinks - ring_slots)
    missing = used + tokens - into_sinks - skipped - ring_slots
    blocks = -(-missing // block_size)
    left = max(0, used - blocks * block_size)
    return Recycling(blocks, min(length, sink_slots) + left, into_sinks if skipped else 0, skipped)
