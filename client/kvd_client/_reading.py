"""Reading a lease from a process that does not have it: a monitor, or one that carries bytes elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.arguments import whole
from kvd.errors import InvalidArgumentError, StaleGenerationError
from kvd_client._fence import Fences, fence_word
from kvd_client._state import Slots

MAX_LEASE_ID = (1 << 40) - 1  # ids count up from 1; a fence's word has 40 bits for one
MAX_GENERATION = (1 << 63) - 1  # they count up from 0


@dataclass(frozen=True)
class Readable:
    """Made by `Lease.readable`; read by `Pool.gather` in any process that maps the pool. Can be pickled.

    slots     pool slots of the visible tokens, int64
    position  the next token's true position
    """

    pool_id: str
    lease_id: int
    generation: int
    fence_slot: int
    position: int
    slots: Slots

    @contextmanager
    def looked_after(self, pool_id: str, fences: Fences) -> Iterator[Slots]:
        """The slots, and that they were that lease's all the time.

        Raises StaleGenerationError, InvalidArgumentError of another pool's or of what `readable` never told.
        """
        if self.pool_id != pool_id:
            raise InvalidArgumentError(
                f"lease {self.lease_id} is in pool {self.pool_id}, this is pool {pool_id}"
            )
        fence_slot = whole("fence_slot", self.fence_slot, 0, len(fences.words) - 1)
        lease_id = whole("lease_id", self.lease_id, 0, MAX_LEASE_ID)
        word = fence_word(lease_id, whole("generation", self.generation, 0, MAX_GENERATION))
        self._look(fences.words, fence_slot, word)
        yield self.slots
        self._look(fences.words, fence_slot, word)

    def _look(self, words: memoryview, fence_slot: int, word: int) -> None:
        if words[fence_slot] != word:
            raise StaleGenerationError(
                f"lease {self.lease_id} ended, or its slots moved; ask its owner for readable() anew"
            )
