"""Orders that were tried and not taken, on the same trace: what kvd's own are compared with.

Each is a key: the cached block with the smallest key goes first, if nothing cached follows it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from .requests import Request


@dataclass
class Block:
    """The block before it (-1: none), its place in its text, its uses, cached ones after it."""

    before: int
    depth: int
    uses: int
    following: int = 0
    key: tuple[float, int] = (0.0, 0)


@dataclass(frozen=True)
class Moment:
    """`clock` counts blocks read so far; `floor` is the largest key that was evicted."""

    clock: int
    floor: float
    capacity: int


Key = Callable[[Moment, Block], float]
CANDIDATES: dict[str, tuple[Key, bool]] = {
    "LRU": (lambda now, block: now.clock, False),
    "LRU less 100 a block of depth": (lambda now, block: now.clock - 100 * block.depth, False),
    "LFU": (lambda now, block: block.uses, False),
    "LFU that remembers": (lambda now, block: block.uses, True),
    "GreedyDual, uses": (lambda now, block: now.floor + block.uses, False),
    "GreedyDual, uses, that remembers": (lambda now, block: now.floor + block.uses, True),
    "GreedyDual, uses / sqrt(depth), that remembers": (
        lambda now, block: now.floor + block.uses / sqrt(block.depth + 1),
        True,
    ),
    "LRU plus a cacheful a use, that remembers": (
        lambda now, block: now.clock + now.capacity * min(block.uses, 8),
        True,
    ),
}


class Candidate:
    """A prefix cache that evicts by a key; it may remember the uses of as many evicted blocks as it holds."""

    def __init__(self, capacity: int, key: Key, remembers: bool) -> None:
        self._capacity, self._key, self._remembers = capacity, key, remembers
        self._cached: dict[int, Block] = {}
        self._due: list[tuple[tuple[float, int], int]] = []
        self._uses: OrderedDict[int, int] = OrderedDict()
        self._clock, self._steps, self._floor = 0, 0, 0.0

    def serve(self, request: Request) -> int:
        """Answers how many leading blocks were there."""
        blocks = request.blocks
        found = next((n for n, block in enumerate(blocks) if block not in self._cached), len(blocks))
        held = set(blocks[:found])
        while len(self._cached) + len(blocks) - found > self._capacity:
            self._evict(held)
        self._clock += len(blocks)
        for depth, block in enumerate(blocks):
            if depth >= found:
                before = blocks[depth - 1] if depth else -1
                self._cached[block] = Block(before, depth, self._uses.pop(block, 0))
                if depth:
                    self._cached[before].following += 1
            self._cached[block].uses += 1
        for block in reversed(blocks):
            self._enter(block)
        return found

    def _enter(self, block: int) -> None:
        self._steps += 1
        cached = self._cached[block]
        cached.key = (self._key(Moment(self._clock, self._floor, self._capacity), cached), self._steps)
        if not cached.following:
            heapq.heappush(self._due, (cached.key, block))

    def _evict(self, held: set[int]) -> None:
        while True:
            key, block = heapq.heappop(self._due)
            cached = self._cached.get(block)
            if cached is not None and cached.key == key and not cached.following and block not in held:
                break
        del self._cached[block]
        self._floor = max(self._floor, key[0])
        if self._remembers:
            self._uses[block] = cached.uses
            if len(self._uses) > self._capacity:
                self._uses.popitem(last=False)
        if cached.before >= 0:
            before = self._cached[cached.before]
            before.following -= 1
            if not before.following and cached.before not in held:
                heapq.heappush(self._due, (before.key, cached.before))


def found_blocks(requests: Sequence[Request], capacity: int, name: str) -> int:
    """Of all requests together."""
    cache = Candidate(capacity, *CANDIDATES[name])
    return sum(cache.serve(request) for request in requests)
