"""Limits of the wire, checked by both sides: by the client before it asks, by the daemon whoever asks."""

MAX_BLOCKS_PER_POOL = 1 << 24  # blocks; 16 M blocks of 16 tokens are 268 M tokens, ids fit int32 with room
MAX_TOKENS_PER_LEASE = (1 << 31) - 1  # tokens; slots and explicit positions are int32 in the sidecar
MAX_ITEMS_PER_CALL = 1024  # leases in one call; keeps one call under a few milliseconds
MAX_HASHES_PER_CALL = 65_536  # prefix hashes in one item; 1 M tokens in blocks of 16
HASH_BYTES = 32  # bytes; SHA-256
MAX_POOL_NAME_CHARS = 128  # characters; the name appears in paths of tools and in metrics
MAX_CLIENT_NAME_CHARS = 256  # characters; it is shown in lists

MAX_SESSIONS = 4096  # sessions of a device; each is an open stream and a pidfd
MAX_LEASES_PER_SESSION = 65_536  # leases; far above any engine's batch, bounds a runaway worker

MAX_PINS_PER_SESSION = 1024  # matches that were not taken by a lease yet; a call may lease as many
MAX_PIN_TTL_S = 60  # seconds a match keeps its blocks; above a long prefill's wait for its turn
MAX_SHELVED_LEASES = 65_536  # leases of a device that wait to be adopted; each tick walks them
MAX_SHELF_TTL_S = (
    3600  # seconds a published lease waits to be adopted; whoever waits longer has been forgotten
)
MAX_SHELF_KEY_CHARS = 256  # characters; it is shown in lists

NULL_BLOCKS = 1  # block 0 of every pool is never leased
MAX_SCRATCH_RESERVE = 16  # blocks; query tensors of one compression fit, a pool of any size can spare them
RESERVE_DIVISOR = 32  # a small pool keeps at most 1/32 of its blocks back


def scratch_reserve(leasable_blocks: int) -> int:
    """Blocks of a pool that only scratch leases may take, so that a full pool can still be compressed."""
    return min(MAX_SCRATCH_RESERVE, leasable_blocks // RESERVE_DIVISOR)
