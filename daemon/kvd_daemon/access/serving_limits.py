"""[limits] of kvd.toml: how much one caller may ask for. An operator may lower what is fixed in the code."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from kvd.errors import InvalidArgumentError, LimitExceededError
from kvd.limits import (
    MAX_BLOCKS_PER_POOL,
    MAX_ITEMS_PER_CALL,
    MAX_LEASES_PER_SESSION,
    MAX_SESSIONS,
    MAX_SHELVED_LEASES,
)
from kvd_daemon.unknown_keys import refuse_unknown

MIN_MESSAGE_BYTES = 64 << 10  # bytes; the usual calls of a worker fit
MAX_MESSAGE_BYTES = 4 << 20  # bytes; 65,536 prefix hashes are 2.3 MB, 1,024 leases far less
MAX_STREAMS = 1024  # calls at a time on one connection; a worker needs a handful
MAX_CONNECTIONS = 8192  # on the Unix socket, twice as many as sessions; each is a descriptor of the daemon
CONNECTIONS_PER_USER = 6144  # of them: one user does not keep the others out
SHELVED_LEASES_PER_TENANT = MAX_SHELVED_LEASES // 16  # one tenant does not keep the others from publishing
FIXED_AT_START = ("message_bytes", "streams", "connections")
"""gRPC takes these once; a new value counts from the daemon's next start on."""

_RANGES = {
    "message_bytes": (MIN_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
    "streams": (2, MAX_STREAMS),
    "connections": (64, MAX_CONNECTIONS),
    "connections_per_user": (4, MAX_CONNECTIONS),
    "sessions": (1, MAX_SESSIONS),
    "sessions_per_tenant": (1, MAX_SESSIONS),
    "leases_per_session": (1, MAX_LEASES_PER_SESSION),
    "shelved_leases_per_tenant": (1, MAX_SHELVED_LEASES),
    "leases_per_call": (1, MAX_ITEMS_PER_CALL),
    "blocks_per_call": (1, MAX_BLOCKS_PER_POOL),
}


@dataclass(frozen=True)
class ServingLimits:
    """Raises InvalidArgumentError on a value outside its range."""

    message_bytes: int = MAX_MESSAGE_BYTES
    streams: int = MAX_STREAMS
    connections: int = MAX_CONNECTIONS
    connections_per_user: int = CONNECTIONS_PER_USER
    sessions: int = MAX_SESSIONS
    sessions_per_tenant: int = MAX_SESSIONS
    leases_per_session: int = MAX_LEASES_PER_SESSION
    shelved_leases_per_tenant: int = SHELVED_LEASES_PER_TENANT
    leases_per_call: int = MAX_ITEMS_PER_CALL
    blocks_per_call: int = MAX_BLOCKS_PER_POOL

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidArgumentError(
                    f"limits.{name} is {value!r}; an integer from {low} to {high} is needed"
                )

    def require(self, name: str, count: int, what: str) -> None:
        """Raises LimitExceededError if `count` is above the limit of that name."""
        if count > getattr(self, name):
            raise self.exceeded(name, count, what)

    def exceeded(self, name: str, count: int, what: str) -> LimitExceededError:
        limit: int = getattr(self, name)
        return LimitExceededError(f"{count} {what}, {limit} allowed (limits.{name})", limit=limit)

    def to_table(self) -> dict[str, int]:
        """As it stands in kvd.toml."""
        return asdict(self)


def serving_limits_of(table: object) -> ServingLimits:
    """The [limits] table of a kvd.toml. Raises InvalidArgumentError."""
    if not isinstance(table, Mapping):
        raise InvalidArgumentError(f"limits is {table!r}; a table [limits] is needed")
    refuse_unknown(table, tuple(field.name for field in fields(ServingLimits)), "key in [limits]")
    return ServingLimits(**table)
