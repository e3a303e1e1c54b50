"""Small things of the model: who holds what, by which name."""

from dataclasses import dataclass

from kvd_daemon.core import Tier

Slot = tuple[Tier, str, int]
"""Tier, pool and number."""

CopyName = tuple[str, str, int, int]
"""Pool, tenant, text and depth."""


@dataclass
class WorldSession:
    tenant: str
    ttl: int
    expires: int
    state: str = "active"


@dataclass
class WorldShelved:
    """Under which key a lease waits, for whom alone, until when."""

    key: str
    to_session: str
    expires: int


@dataclass
class WorldPin:
    """A soft one has a session and ends at `expires`."""

    tenant: str
    pool: str
    blocks: list[int]
    session: str = ""
    expires: int | None = None


@dataclass
class WorldCopyMove:
    """Copies, by name, that are copied from slots to slots of another tier."""

    pool: str
    names: list[CopyName]
    source: list[Slot]
    target: list[Slot]
    sums: list[int]


@dataclass
class WorldPromotion:
    """Blocks that are filled from slots, for names of one tenant."""

    pool: str
    tenant: str
    text: int
    depths: list[int]
    blocks: list[int]
    slots: list[Slot]
    sums: list[int]
