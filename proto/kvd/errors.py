"""Every failure a user of kvd can cause or meet.

KvdError
|-- InvalidArgumentError         a value kvd cannot work with
|-- UnauthenticatedError
|   |-- TicketInvalidError       a ticket that is unknown, used or too old
|   |-- SessionNotFoundError     a session token nobody knows (any more)
|   `-- SessionExpiredError      the session was not renewed in time
|-- PermissionDeniedError        a role or an address that may not do this
|-- NotOwnerError                another session's lease
|-- NotFoundError
|   |-- PoolNotFoundError
|   |-- LeaseNotFoundError
|   |-- PrefixNotFoundError      not every asked prefix block is sealed here
|   |-- PinNotFoundError         a match or pin that has ended
|   |-- OfferNotFoundError       nothing that this session may adopt under that key
|   `-- ReceiverNotFoundError    no session of the tenant to transfer a lease to
|-- ConflictError
|   |-- PoolMismatchError        a pool of that name has another geometry
|   |-- PoolInUseError           a pool that still has leases
|   |-- StaleGenerationError     the caller knows an older state of the lease
|   |-- LeaseBusyError           a compression is under way
|   |-- LeaseRestingError        it rests; wake it first
|   |-- BlockNotHeldError        null block, foreign block, or named twice
|   |-- BlockInUseError          the block holds tokens
|   |-- ShelfKeyTakenError       another lease is published under that key
|   |-- LeaseSuspendedError      a suspended lease, which has no slots until it is resumed
|   `-- RequestReusedError       one request_id for two different requests
|-- LeaseGoneError
|   |-- LeaseRevokedError        taken away by an operator
|   |-- LeaseExpiredError        its session expired
|   `-- LeaseLostError           its bytes are gone, with the kernel worker that moved them or the daemon
|-- ExhaustedError
|   |-- PoolExhaustedError       too few free blocks
|   |-- QuotaExceededError       the tenant's quota of blocks
|   |-- DeviceFullError          too little memory for a new pool
|   |-- TierFullError            too little room for what shall be parked
|   `-- LimitExceededError       one of kvd's named limits
|-- CheckpointLostError          what a lease should go back to is damaged; the lease is as it was
|-- CompressionRefusedError      would free less than it takes
|-- UnavailableError
|   |-- DeviceUnavailableError   no daemon there, or starting or stopping
|   `-- KernelWorkerUnavailableError
|-- DeadlineExceededError        no answer in time
|-- GpuError                     in a worker: it cannot use the GPU whose memory it wants
|   |-- GpuDriverError           no CUDA driver, too old, or it does not start
|   |-- GpuNotVisibleError       hidden from this process (CUDA_VISIBLE_DEVICES, containers)
|   `-- GpuHandleError           the memory's owner is gone, or it cannot be shared in that way
|-- ReadOnlyError                writing through a pool that was mapped read_only=True
|-- ForkedClientError            a client used in a forked child
|-- ClosedError                  a client, pool or lease used after close
`-- InternalError                a bug in kvd

`reason` is google.rpc.ErrorInfo.reason (domain "kvd") and identifies the class on both sides
of the wire; `status` is the name of the gRPC status code.
"""

from collections.abc import Iterator
from typing import ClassVar

ERROR_DOMAIN = "kvd"


class KvdError(Exception):
    """Base of all. `metadata` holds the numbers of the text by name, as strings."""

    reason: ClassVar[str] = "UNKNOWN"
    status: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, retry_after_ns: int | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.retry_after_ns = retry_after_ns
        self.metadata = {name: str(value) for name, value in metadata.items()}


class InvalidArgumentError(KvdError):
    """A value kvd cannot work with. Nothing was changed."""

    reason, status = "INVALID_ARGUMENT", "INVALID_ARGUMENT"


class UnauthenticatedError(KvdError):
    """Nobody kvd knows."""

    reason, status = "UNAUTHENTICATED", "UNAUTHENTICATED"


class TicketInvalidError(UnauthenticatedError):
    """A ticket that is unknown, used or too old; ask the attach socket for a new one."""

    reason = "TICKET_INVALID"


class SessionNotFoundError(UnauthenticatedError):
    """A session token nobody knows; open a new session."""

    reason = "SESSION_NOT_FOUND"


class SessionExpiredError(UnauthenticatedError):
    """The session was not renewed in time; open a new session. Its leases are gone."""

    reason = "SESSION_EXPIRED"


class PermissionDeniedError(KvdError):
    """The caller's role may not do this; metadata `role` and `needed` say which one could."""

    reason, status = "PERMISSION_DENIED", "PERMISSION_DENIED"


class NotOwnerError(KvdError):
    """Another session's lease. Nothing was changed."""

    reason, status = "NOT_OWNER", "PERMISSION_DENIED"


class NotFoundError(KvdError):
    """Something that is not there."""

    reason, status = "NOT_FOUND", "NOT_FOUND"


class PoolNotFoundError(NotFoundError):
    """No pool of that name."""

    reason = "POOL_NOT_FOUND"


class LeaseNotFoundError(NotFoundError):
    """No lease of that id; it may have been released."""

    reason = "LEASE_NOT_FOUND"


class PrefixNotFoundError(NotFoundError):
    """Not every asked prefix block is sealed here. Nothing was taken."""

    reason = "PREFIX_NOT_FOUND"


class PinNotFoundError(NotFoundError):
    """A match or pin that has ended, or is not the caller's. Nothing was taken; match again."""

    reason = "PIN_NOT_FOUND"


class OfferNotFoundError(NotFoundError):
    """Nothing is published under that key that this session may adopt, or not any more."""

    reason = "OFFER_NOT_FOUND"


class ReceiverNotFoundError(NotFoundError):
    """No live session of that id in the caller's tenant. The lease stays where it is."""

    reason = "RECEIVER_NOT_FOUND"


class ConflictError(KvdError):
    """Something in the way of the request."""

    reason, status = "CONFLICT", "FAILED_PRECONDITION"


class PoolMismatchError(ConflictError):
    """A pool of that name has another geometry; metadata `fields` names the differing ones."""

    reason = "POOL_MISMATCH"


class PoolInUseError(ConflictError):
    """A pool that still has leases or hard pins."""

    reason = "POOL_IN_USE"


class StaleGenerationError(ConflictError):
    """The caller knows an older state of the lease; nothing was changed."""

    reason, status = "STALE_GENERATION", "ABORTED"


class LeaseBusyError(ConflictError):
    """A compression of this lease is under way; retry when it has answered."""

    reason, status = "LEASE_BUSY", "ABORTED"


class LeaseRestingError(ConflictError):
    """The lease rests: whatever it has may be pruned meanwhile. Wake it first."""

    reason = "LEASE_RESTING"


class BlockNotHeldError(ConflictError):
    """The null block, a foreign block, one that does not exist, or one named twice."""

    reason = "BLOCK_NOT_HELD"


class BlockInUseError(ConflictError):
    """The block holds tokens; compress or release the lease instead."""

    reason = "BLOCK_IN_USE"


class ShelfKeyTakenError(ConflictError):
    """Another lease of the tenant is published in that pool under that key."""

    reason, status = "SHELF_KEY_TAKEN", "ALREADY_EXISTS"


class LeaseSuspendedError(ConflictError):
    """The lease is suspended: what it holds is parked, and comes back with `resume`. Nothing was changed."""

    reason = "LEASE_SUSPENDED"


class RequestReusedError(ConflictError):
    """One request_id came with two different requests."""

    reason = "REQUEST_REUSED"


class LeaseGoneError(KvdError):
    """A lease that can only be released."""

    reason, status = "LEASE_GONE", "FAILED_PRECONDITION"


class LeaseRevokedError(LeaseGoneError):
    """Taken away by an operator."""

    reason = "LEASE_REVOKED"


class LeaseExpiredError(LeaseGoneError):
    """Its session was not renewed in time."""

    reason = "LEASE_EXPIRED"


class LeaseLostError(LeaseGoneError):
    """Its bytes are gone: a kernel worker died while it moved them, or the daemon did; prefill again."""

    reason, status = "LEASE_LOST", "DATA_LOSS"


class ExhaustedError(KvdError):
    """Too little of something. Nothing was taken."""

    reason, status = "EXHAUSTED", "RESOURCE_EXHAUSTED"


class PoolExhaustedError(ExhaustedError):
    """Too few free blocks. Nothing was taken."""

    reason = "POOL_EXHAUSTED"


class QuotaExceededError(ExhaustedError):
    """The tenant's quota of blocks, not the pool, is used up. Nothing was taken."""

    reason = "QUOTA_EXCEEDED"


class DeviceFullError(ExhaustedError):
    """Too little device memory for a new pool. Nothing was taken."""

    reason = "DEVICE_FULL"


class TierFullError(ExhaustedError):
    """Too little room in the host tier, or there is none. Nothing was changed."""

    reason = "TIER_FULL"


class LimitExceededError(ExhaustedError):
    """One of kvd's named limits. Nothing was changed."""

    reason = "LIMIT_EXCEEDED"


class CheckpointLostError(KvdError):
    """What the lease held before its compression is damaged or gone. The lease goes on as it is."""

    reason, status = "CHECKPOINT_LOST", "DATA_LOSS"


class CompressionRefusedError(KvdError):
    """The compression would free less than it takes. Nothing was changed."""

    reason, status = "COMPRESSION_REFUSED", "FAILED_PRECONDITION"


class UnavailableError(KvdError):
    """Not now."""

    reason, status = "UNAVAILABLE", "UNAVAILABLE"


class DeviceUnavailableError(UnavailableError):
    """No daemon there, or it is starting or stopping."""

    reason = "DEVICE_UNAVAILABLE"


class KernelWorkerUnavailableError(UnavailableError):
    """The kernel worker is starting or was lost; the lease is as it was. Retry."""

    reason = "KERNEL_WORKER_UNAVAILABLE"


class DeadlineExceededError(KvdError):
    """No answer in time. The call may have been carried out: repeat it with its request_id."""

    reason, status = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class GpuError(KvdError):
    """This process cannot use the GPU; the text has what the driver says."""

    reason, status = "GPU", "FAILED_PRECONDITION"


class GpuDriverError(GpuError):
    """No CUDA driver here, one that is too old, or one that does not start."""

    reason = "GPU_DRIVER"


class GpuNotVisibleError(GpuError):
    """The pool's GPU is hidden from this process; the text says by what."""

    reason = "GPU_NOT_VISIBLE"


class GpuHandleError(GpuError):
    """The memory's owner is gone, or this process cannot map it in that way; attach again."""

    reason = "GPU_HANDLE"


class ReadOnlyError(KvdError):
    """The pool was mapped with read_only=True, and this writes. Nothing was sent or changed."""

    reason, status = "READ_ONLY", "FAILED_PRECONDITION"


class ForkedClientError(KvdError):
    """A client made before fork() was used in the child; call kvd_client.connect() there."""

    reason, status = "FORKED_CLIENT", "FAILED_PRECONDITION"


class ClosedError(KvdError):
    """A client, pool or lease used after it was closed."""

    reason, status = "CLOSED", "FAILED_PRECONDITION"


class InternalError(KvdError):
    """A bug in kvd; the daemon's log has the details."""

    reason, status = "INTERNAL", "INTERNAL"


class KvdWarning(UserWarning):
    """Something that works, but perhaps not as it was meant."""


def _tree(root: type[KvdError]) -> Iterator[type[KvdError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


BY_REASON: dict[str, type[KvdError]] = {error.reason: error for error in _tree(KvdError)}
"""The class of every reason, for whoever reads an error off the wire."""
