"""The one table from errors to gRPC: a code by name, google.rpc.ErrorInfo, and what helps to retry."""

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from kvd.errors import ERROR_DOMAIN, ExhaustedError, KvdError

DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 2000  # characters; all metadata of a call must fit gRPC's 8 KiB
MAX_METADATA_CHARS = 200  # characters of one value in ErrorInfo, for the same reason


def code_of(error: KvdError) -> grpc.StatusCode:
    return grpc.StatusCode[error.status]


def message_of(error: KvdError) -> str:
    return str(error)[:MAX_MESSAGE_CHARS]


def details_of(error: KvdError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with the google.rpc.Status of `error`."""
    details = [_packed(detail) for detail in _details(error)]
    code: int = code_of(error).value[0]
    status = Status(code=code, message=message_of(error), details=details)
    return ((DETAILS_KEY, status.SerializeToString()),)


def _details(error: KvdError) -> list[Message]:
    metadata = {name: value[:MAX_METADATA_CHARS] for name, value in error.metadata.items()}
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata)]
    if error.retry_after_ns is not None:
        seconds, nanos = divmod(error.retry_after_ns, 10**9)
        details.append(RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos)))
    if isinstance(error, ExhaustedError):
        violation = QuotaFailure.Violation(subject=_subject(error), description=message_of(error))
        details.append(QuotaFailure(violations=[violation]))
    return details


def _subject(error: ExhaustedError) -> str:
    """What there is too little of."""
    for kind in ("tenant", "pool"):
        if kind in error.metadata:
            return f"{kind}:{error.metadata[kind]}"
    return "device"


def _packed(detail: Message) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed
