"""Reading a lease from a process that does not have it: a monitor, or one that carries bytes elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.errors import InvalidArgumentError, StaleGenerationError
from kvd_client._fence import Fences, fence_word
from kvd_client._state import Slots


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

        Raises StaleGenerationError, InvalidArgumentError of another pool's.
        """
        if self.pool_id != pool_id:
            raise InvalidArgumentError(
                f"lease {self.lease_id} is in pool {self.pool_id}, this is pool {pool_id}"
            )
        self._look(fences)
        yield self.slots
        self._look(fences)

    def _look(self, fences: Fences) -> None:
        if fences.words[self.fence_slot] != fence_word(self.lease_id, self.generation):
            raise StaleGenerationError(
                f"lease {self.lease_id} ended, or its slots moved; ask its owner for readable() anew"
            )
