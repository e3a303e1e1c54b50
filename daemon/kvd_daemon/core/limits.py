"""The core's named limits. Each has a unit and a reason; a call beyond one raises LimitExceededError."""

from dataclasses import dataclass

MAX_POOLS = 64  # pools; each is two file descriptors in every worker that maps it
MAX_BLOCKS_PER_POOL = 1 << 24  # blocks; 16 M blocks of 16 tokens are 268 M tokens, ids fit int32 with room
MAX_SESSIONS = 4096  # sessions; each is an open stream and a pidfd
MAX_LEASES_PER_SESSION = 65_536  # leases; far above any engine's batch, bounds a runaway worker
MAX_TENANTS = 30_000  # tenants; an int16 per block remembers the last one
MAX_ITEMS_PER_CALL = 1024  # leases in one call; keeps one call under a few milliseconds
MAX_HASHES_PER_CALL = 65_536  # prefix hashes in one item; 1 M tokens in blocks of 16
MAX_TOKENS_PER_LEASE = (1 << 31) - 1  # tokens; slots and explicit positions are int32 in the sidecar
MAX_POSITION = 1 << 62  # tokens; an endless stream never gets there
MAX_SCRATCH_RESERVE = 16  # blocks; query tensors of one compression fit, a pool of any size can spare them
RESERVE_DIVISOR = 32  # a small pool keeps at most 1/32 of its blocks back
HASH_BYTES = 32  # bytes; SHA-256
MAX_NAME_CHARS = 128  # characters of a pool's name; it appears in paths of tools and in metrics


@dataclass(frozen=True)
class Limits:
    """The limits an operator may lower."""

    pools: int = MAX_POOLS
    blocks_per_pool: int = MAX_BLOCKS_PER_POOL
    sessions: int = MAX_SESSIONS
    leases_per_session: int = MAX_LEASES_PER_SESSION
    items_per_call: int = MAX_ITEMS_PER_CALL
    hashes_per_call: int = MAX_HASHES_PER_CALL
