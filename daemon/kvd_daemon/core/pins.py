"""A promise that blocks stay findable: a holder by name, as a lease is one, without a right to write."""

from dataclasses import dataclass

from .free_runs import IntArray


@dataclass(eq=False, slots=True)
class Pin:
    """Sealed blocks of one pool in sequence order, held for a tenant.

    A soft pin belongs to the session `session_id` and ends with it, at `expires_ns`, or when a lease takes
    it. A hard one has neither: it stays until `unpin`.
    """

    pin_id: int
    tenant: str
    pool: str
    session_id: str
    blocks: IntArray
    expires_ns: int | None

    @property
    def is_hard(self) -> bool:
        return self.expires_ns is None
