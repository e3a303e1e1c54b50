"""What went wrong on the wire, as one of kvd's errors. No transport error leaves this package."""

import grpc
from google.protobuf.message import DecodeError

from kvd.errors import (
    BY_REASON,
    ERROR_DOMAIN,
    DeadlineExceededError,
    DeviceUnavailableError,
    InternalError,
    InvalidArgumentError,
    KvdError,
    UnauthenticatedError,
)
from kvd.v1 import rich_status_pb2 as rich

DETAILS_KEY = "grpc-status-details-bin"
ERROR_INFO = "google.rpc.ErrorInfo"
RETRY_INFO = "google.rpc.RetryInfo"

_BY_CODE: dict[grpc.StatusCode, type[KvdError]] = {
    grpc.StatusCode.UNAVAILABLE: DeviceUnavailableError,
    grpc.StatusCode.CANCELLED: DeviceUnavailableError,  # the channel was closed under the call
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}
"""For failures gRPC made itself, which carry no details."""


def from_rpc_error(error: grpc.RpcError) -> KvdError:
    """The error of `kvd.errors` that the daemon raised, or the closest one if gRPC itself failed."""
    assert isinstance(error, grpc.Call)
    told = _told_by_daemon(error)
    if told is not None:
        return told
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError("the daemon did not answer in time; it may be stopped or overloaded")
    if code is grpc.StatusCode.UNAVAILABLE:
        return DeviceUnavailableError(f"no daemon answers ({error.details()}); is kvd running?")
    return _BY_CODE.get(code, InternalError)(f"{code.name}: {error.details()}")


def _told_by_daemon(error: grpc.Call) -> KvdError | None:
    """What the status details say; None if there are none of kvd's."""
    details = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    if not isinstance(details, bytes):
        return None
    try:
        status = rich.RichStatus.FromString(details)
        parts = {part.type_url.rpartition("/")[2]: part.value for part in status.details}
        info = rich.RichErrorInfo.FromString(parts.get(ERROR_INFO, b""))
        retry = rich.RichRetryInfo.FromString(parts[RETRY_INFO]) if RETRY_INFO in parts else None
    except DecodeError:
        return None
    if info.domain != ERROR_DOMAIN:
        return None
    return from_reason(
        info.reason,
        status.message or error.details() or "",
        dict(info.metadata),
        retry.retry_delay.ToNanoseconds() if retry else None,
    )


def from_reason(
    reason: str, message: str, metadata: dict[str, str], retry_after_ns: int | None = None
) -> KvdError:
    """The class of a reason; a newer daemon's unknown reason becomes a plain KvdError that names it."""
    error_class = BY_REASON.get(reason, KvdError)
    text = message if error_class is not KvdError else f"{reason}: {message}"
    error = error_class(text, retry_after_ns)
    error.metadata = metadata  # not as keywords: a name might be that of a parameter
    return error
