"""A lease's slots, without any daemon: what each answer of the wire makes of them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.convert import runs_from_proto
from kvd.errors import InvalidArgumentError
from kvd.policy import Policy, Streaming
from kvd.spec import KVSpec
from kvd.v1 import kvd_pb2 as pb

NULL_SLOT = 0  # in the null block: what is written there is never read

Slots = npt.NDArray[np.int64]
BlockIds = npt.NDArray[np.int32]


class Skip(NamedTuple):
    """Of the `tokens` to come, `skipped` ones after the first `stored_before` are not stored at all."""

    tokens: int
    stored_before: int
    skipped: int


@dataclass(frozen=True)
class SlotState:
    """What the worker knows of its lease; replaced as a whole, so that other threads see no mixture."""

    table: BlockIds
    generation: int
    length: int
    position: int
    compressed_length: int
    sealed_blocks: int
    skip: Skip | None = None

    @property
    def standing(self) -> tuple[int, int, int]:
        """Generation, length and position: what the daemon is told."""
        return self.generation, self.length, self.position

    @classmethod
    def granted(cls, answer: pb.LeaseState) -> "SlotState":
        empty = cls(np.zeros(0, np.int32), 0, 0, 0, 0, 0)
        return empty.after(answer)

    def after(self, answer: pb.LeaseState, skip: Skip | None = None) -> "SlotState":
        """The state that an answer tells: some table entries stay, others follow them."""
        assert answer.kept_blocks <= self.table.size, "the daemon kept more blocks than the worker knows"
        table = np.concatenate((self.table[: answer.kept_blocks], runs_from_proto(answer.appended)))
        table.flags.writeable = False
        return SlotState(
            table,
            answer.generation,
            answer.length,
            answer.position,
            answer.compressed_length,
            answer.sealed_blocks,
            skip,
        )

    def without_blocks(self) -> "SlotState":
        """Of a lease that has left the pool."""
        return replace(self, table=np.zeros(0, np.int32), sealed_blocks=0, skip=None)

    def shares_tail(self, block_size: int) -> bool:
        """Whether the block that the next token belongs into is shared since a fork."""
        return self.sealed_blocks * block_size > self.length

    def committed(self, tokens: int, block_size: int) -> "SlotState":
        """`tokens` more are written. Raises InvalidArgumentError if there is no room for them."""
        if self.skip is not None and tokens != self.skip.tokens:
            raise InvalidArgumentError(
                f"commit({tokens}) after extend({self.skip.tokens}), of which {self.skip.skipped} are passed "
                f"over; commit({self.skip.tokens}) is needed"
            )
        stored = tokens - (self.skip.skipped if self.skip else 0)
        capacity = self.table.size * block_size
        if tokens > 0 and self.shares_tail(block_size):
            raise InvalidArgumentError(
                f"commit({tokens}) at length {self.length}, in a block that is shared since a fork; call "
                f"extend({tokens}) first"
            )
        if tokens < 0 or self.length + stored > capacity:
            raise InvalidArgumentError(
                f"commit({tokens}) at length {self.length} of {capacity} slots; call extend({tokens}) first"
            )
        return SlotState(
            self.table,
            self.generation,
            self.length + stored,
            self.position + stored,
            self.compressed_length,
            self.sealed_blocks,
        )

    def pool_slots(self, slots: Slots, block_size: int) -> Slots:
        """block_id * block_size + offset of lease slots."""
        return self.table[slots // block_size].astype(np.int64) * block_size + slots % block_size

    def slots_of_next(self, tokens: int, block_size: int) -> Slots:
        """Where the next tokens go, pool slots; those that are passed over go to the null block."""
        skipped = self.skip.skipped if self.skip else 0
        stored = np.arange(self.length, self.length + tokens - skipped, dtype=np.int64)
        slots = self.pool_slots(stored, block_size)
        if self.skip is None:
            return slots
        nowhere = np.full(skipped, NULL_SLOT, np.int64)
        return np.concatenate((slots[: self.skip.stored_before], nowhere, slots[self.skip.stored_before :]))


def visible_slots(state: SlotState, policy: Policy) -> Slots:
    """Lease slots that attention may read: all, or sinks and window of a streaming lease."""
    every = np.arange(state.length, dtype=np.int64)
    if not isinstance(policy, Streaming):
        return every
    window_start = max(policy.sinks, state.length - policy.window)
    return np.concatenate((every[: policy.sinks], every[window_start:]))


def positions(
    state: SlotState, policy: Policy, spec: KVSpec, plane: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """True positions [layers, kv_heads, length]; `plane` is the pool's positions plane."""
    slots = np.arange(state.length, dtype=np.int64)
    known = slots + (state.position - state.length)
    if isinstance(policy, Streaming):  # sink blocks are never recycled: there the slot is the position
        known = np.where(slots < policy.sink_blocks(spec.block_size) * spec.block_size, slots, known)
    result = np.empty((spec.layers, spec.kv_heads, state.length), np.int32)
    result[:] = known
    explicit = min(state.compressed_length, state.length)
    if explicit:
        blocks = plane[state.table[: spec.blocks_for(explicit)]]
        by_head = np.moveaxis(blocks, 0, 2).reshape(spec.layers, spec.kv_heads, -1)
        result[..., :explicit] = by_head[..., :explicit]
    return result
