"""What a session's stream tells its worker. The stream's outbox holds these in order."""

from dataclasses import dataclass

from kvd.errors import KvdError


@dataclass(frozen=True)
class Renewed:
    """The renewal was counted."""


@dataclass(frozen=True)
class Revoked:
    """A lease was taken away."""

    lease_id: int
    cause: str


@dataclass(frozen=True)
class Compressible:
    """A lease that its worker leased as one to be pruned to `floor` tokens when blocks are short."""

    lease_id: int
    floor: int


@dataclass(frozen=True)
class Pressure:
    """Others wait for blocks of a pool; the session's `compressible` leases there would help."""

    pool: str
    wanted_blocks: int
    compressible: tuple[Compressible, ...] = ()


@dataclass(frozen=True)
class Offered:
    """A lease waits for this session to adopt it."""

    pool: str
    key: str
    lease_id: int


@dataclass(frozen=True)
class Draining:
    """The daemon stops soon."""


@dataclass(frozen=True)
class Ended:
    """The stream's last word: with an error, or without one."""

    error: KvdError | None = None


Event = Renewed | Revoked | Pressure | Offered | Draining | Ended
