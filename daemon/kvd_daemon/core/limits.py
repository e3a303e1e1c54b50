"""The core's named limits. Each has a unit and a reason; a call beyond one raises LimitExceededError.

Those that the client checks too are in `kvd.limits`.
"""

from dataclasses import dataclass

from kvd.limits import (
    MAX_BLOCKS_PER_POOL,
    MAX_HASHES_PER_CALL,
    MAX_ITEMS_PER_CALL,
    MAX_LEASES_PER_SESSION,
    MAX_PIN_TTL_S,
    MAX_PINS_PER_SESSION,
    MAX_SESSIONS,
    MAX_SHELF_TTL_S,
)

from .eviction import DEFAULT_EVICTION

MAX_POOLS = 64  # pools; each is two file descriptors in every worker that maps it
MAX_TENANTS = 30_000  # tenants; an int16 per block remembers the last one
MAX_LEASES = (1 << 20) - 1  # leases of a device; a fence each, 8 MiB that every worker maps
MAX_PIN_TTL_NS = MAX_PIN_TTL_S * 10**9  # ns; see kvd.limits
MAX_SHELF_TTL_NS = MAX_SHELF_TTL_S * 10**9  # ns; see kvd.limits
MAX_POSITION = 1 << 62  # tokens; an endless stream never gets there


@dataclass(frozen=True)
class Limits:
    """The limits an operator may lower; and `eviction`, the order in which cached blocks go."""

    pools: int = MAX_POOLS
    blocks_per_pool: int = MAX_BLOCKS_PER_POOL
    sessions: int = MAX_SESSIONS
    leases: int = MAX_LEASES
    leases_per_session: int = MAX_LEASES_PER_SESSION
    items_per_call: int = MAX_ITEMS_PER_CALL
    hashes_per_call: int = MAX_HASHES_PER_CALL
    pins_per_session: int = MAX_PINS_PER_SESSION
    eviction: str = DEFAULT_EVICTION
