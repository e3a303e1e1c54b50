"""The worker's side of kvd: lease blocks of a shared KV pool, write them as plain memory, compress, release.

    import kvd_client

    client = kvd_client.connect(name="my-worker")
    spec = kvd_client.KVSpec(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_size=16)
    pool = client.pool("llama3-8b", spec, blocks=2048)  # create or attach

    with pool.lease(tokens=len(prompt), policy=kvd_client.Dual(keep=0.15)) as lease:
        slots = torch.from_numpy(lease.extend(len(prompt)))
        for index, (k, v) in enumerate(model.prefill(prompt)):  # each [tokens, kv_heads, head_dim]
            k_pool, v_pool = pool.layer(index)  # [blocks, block_size, kv_heads, head_dim], no copy
            k_pool[slots // 16, slots % 16], v_pool[slots // 16, slots % 16] = k, v
        lease.commit(len(prompt))
        print(lease.compress(queries=model.last_queries))  # [layers, window, query_heads, head_dim]
        while not done:
            slot = lease.extend(1)  # asks the daemon only when a block is missing
            model.decode(pool, lease.block_table, lease.length, lease.position, slot)
            lease.commit(1)

`client` and `pool` may be used from many threads, a lease by one at a time. After fork() call `connect`
again. Every failure is one of the errors below, a KvdError; the tree is drawn in `kvd.errors`. A value of a
wrong type or out of range is an InvalidArgumentError that names it, at the call itself; nothing has changed.
"""

from kvd.errors import (
    BlockInUseError,
    BlockNotHeldError,
    CheckpointLostError,
    ClosedError,
    CompressionRefusedError,
    ConflictError,
    DeadlineExceededError,
    DeviceFullError,
    DeviceUnavailableError,
    ExhaustedError,
    ForkedClientError,
    GpuDriverError,
    GpuError,
    GpuHandleError,
    GpuNotVisibleError,
    InternalError,
    InvalidArgumentError,
    KernelWorkerUnavailableError,
    KvdError,
    KvdWarning,
    LeaseBusyError,
    LeaseExpiredError,
    LeaseGoneError,
    LeaseLostError,
    LeaseNotFoundError,
    LeaseRestingError,
    LeaseRevokedError,
    LeaseSuspendedError,
    LimitExceededError,
    NotFoundError,
    NotOwnerError,
    OfferNotFoundError,
    PinNotFoundError,
    PoolExhaustedError,
    PoolInUseError,
    PoolMismatchError,
    PoolNotFoundError,
    PrefixNotFoundError,
    QuotaExceededError,
    ReadOnlyError,
    ReceiverNotFoundError,
    RequestReusedError,
    SessionExpiredError,
    SessionNotFoundError,
    ShelfKeyTakenError,
    StaleGenerationError,
    TicketInvalidError,
    TierFullError,
    UnauthenticatedError,
    UnavailableError,
)
from kvd.policy import H2O, Dense, Dual, ExpectedAttention, Keep, KeyDiff, Policy, SnapKV, Span, Streaming
from kvd_client import prefix
from kvd_client._client import Client, connect
from kvd_client._events import Draining, Event, Events, LeaseRevoked, Offer, Offers, Pressure, SessionLost
from kvd_client._lease import Lease
from kvd_client._match import Match
from kvd_client._pool import LeaseWish, Pool
from kvd_client._reading import Readable
from kvd_client._report import CompressionReport, Rope
from kvd_client._spec import KVSpec
from kvd_client.future import future_queries

__all__ = [
    "H2O",
    "BlockInUseError",
    "BlockNotHeldError",
    "CheckpointLostError",
    "Client",
    "ClosedError",
    "CompressionRefusedError",
    "CompressionReport",
    "ConflictError",
    "DeadlineExceededError",
    "Dense",
    "DeviceFullError",
    "DeviceUnavailableError",
    "Draining",
    "Dual",
    "Event",
    "Events",
    "ExhaustedError",
    "ExpectedAttention",
    "ForkedClientError",
    "GpuDriverError",
    "GpuError",
    "GpuHandleError",
    "GpuNotVisibleError",
    "InternalError",
    "InvalidArgumentError",
    "KVSpec",
    "Keep",
    "KernelWorkerUnavailableError",
    "KeyDiff",
    "KvdError",
    "KvdWarning",
    "Lease",
    "LeaseBusyError",
    "LeaseExpiredError",
    "LeaseGoneError",
    "LeaseLostError",
    "LeaseNotFoundError",
    "LeaseRestingError",
    "LeaseRevoked",
    "LeaseRevokedError",
    "LeaseSuspendedError",
    "LeaseWish",
    "LimitExceededError",
    "Match",
    "NotFoundError",
    "NotOwnerError",
    "Offer",
    "OfferNotFoundError",
    "Offers",
    "PinNotFoundError",
    "Policy",
    "Pool",
    "PoolExhaustedError",
    "PoolInUseError",
    "PoolMismatchError",
    "PoolNotFoundError",
    "PrefixNotFoundError",
    "Pressure",
    "QuotaExceededError",
    "ReadOnlyError",
    "Readable",
    "ReceiverNotFoundError",
    "RequestReusedError",
    "Rope",
    "SessionExpiredError",
    "SessionLost",
    "SessionNotFoundError",
    "ShelfKeyTakenError",
    "SnapKV",
    "Span",
    "StaleGenerationError",
    "Streaming",
    "TicketInvalidError",
    "TierFullError",
    "UnauthenticatedError",
    "UnavailableError",
    "connect",
    "future_queries",
    "prefix",
]
