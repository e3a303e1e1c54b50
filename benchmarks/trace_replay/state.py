"""What the daemon's own state takes for a cached block, counted as Python and numpy allocate it."""

import tracemalloc
from random import Random

from kvd.limits import HASH_BYTES, MAX_SCRATCH_RESERVE
from kvd.spec import KVSpec
from kvd_daemon.core import Device, LeaseWish, Limits, Progress, SessionIdentity

SPEC = KVSpec(layers=1, kv_heads=1, head_dim_k=8, head_dim_v=8)
PROMPT_BLOCKS = 20  # of a lease; about the mean of the trace


def bytes_a_block(blocks: int, order: str) -> float:
    """Of a core whose pool of so many blocks is full of cached ones, names of 32 bytes included."""
    random, tokens = Random(blocks), PROMPT_BLOCKS * SPEC.block_size
    tracemalloc.start()
    device = Device(1 << 60, Limits(eviction=order))
    device.create_pool("pool", SPEC, blocks + MAX_SCRATCH_RESERVE, "id")
    device.open_session(SessionIdentity("session", "tenant", 1, 1), 10**18, 0)
    for _ in range(blocks // PROMPT_BLOCKS):
        lease = device.lease("session", "pool", [LeaseWish(tokens)], 0).leases[0]
        names = [random.randbytes(HASH_BYTES) for _ in range(PROMPT_BLOCKS)]
        device.seal("session", Progress(lease.lease_id, lease.generation, tokens, tokens), names)
        device.release("session", [lease.lease_id])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken / device.pools["pool"].counts.cached
