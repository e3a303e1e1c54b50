"""Bytes that say whose they are: every row of a token names its text, position, layer, head and plane.

So any slot that survives can be checked without having been remembered, whatever moved it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_client import KVSpec, Lease

SPEC = KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_size=8)
KEYS, VALUES = 0, 1

Rows = npt.NDArray[np.float32]
Positions = npt.NDArray[Any]


@dataclass(frozen=True)
class Text:
    """A number; a fork goes on with another one from a position on, and may be forked again."""

    number: int
    branches: tuple[tuple[int, int], ...] = ()

    def at(self, positions: Positions) -> Positions:
        numbers = np.full(positions.shape, self.number)
        for start, number in self.branches:
            numbers[positions >= start] = number
        return numbers

    def forked(self, position: int, number: int) -> "Text":
        return Text(self.number, (*self.branches, (position, number)))


def rows(text: Text, positions: Positions, layer: int, plane: int) -> Rows:
    """What belongs into one plane, [tokens, kv_heads, head_dim], for positions [kv_heads, tokens]."""
    numbers = text.at(positions).T
    result = np.empty((*positions.T.shape, SPEC.head_dim_k), np.float32)
    result[..., 0] = numbers
    result[..., 1] = positions.T
    result[..., 2] = layer
    result[..., 3] = np.arange(SPEC.kv_heads)
    result[..., 4] = plane
    result[..., 5:] = np.sin(numbers + 3.0 * positions.T + 7.0 * plane)[..., None]  # what scores are made of
    return result


def write(lease: Lease, slots: npt.NDArray[np.int64], text: Text, first_position: int) -> None:
    """The next tokens of `text` into the slots that `extend` answered."""
    positions = np.broadcast_to(
        np.arange(first_position, first_position + slots.size), (SPEC.kv_heads, slots.size)
    )
    for layer in range(SPEC.layers):
        lease.write(layer, slots, rows(text, positions, layer, KEYS), rows(text, positions, layer, VALUES))


def wrong_bytes(lease: Lease, text: Text) -> tuple[int, int]:
    """Bytes that are not what they should be, and bytes looked at. Raises the lease's fate."""
    wrong = seen = 0
    positions = lease.kept_positions()[:, :, lease.visible_slots()]
    for layer in range(SPEC.layers):
        for plane, found in enumerate(lease.gather(layer, "numpy")):
            expected = rows(text, positions[layer], layer, plane)
            wrong += 4 * int(np.count_nonzero(found != expected))
            seen += found.nbytes
    return wrong, seen


def hashes(text: int, blocks: int) -> list[bytes]:
    """Chained by construction: a text never repeats, so text and depth say all."""
    return [hashlib.sha256(f"{text}:{depth}".encode()).digest() for depth in range(blocks)]
