"""Every call that a daemon serves, by what it needs: written down a second time, on purpose.

A change of the daemon's own table, or a new call, must be made here too, where somebody looks at it.
"""

from collections.abc import Iterator

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from kvd.v1 import kvd_pb2

WORKING = frozenset(
    (
        "/kvd.v1.SessionService/Connect",
        "/kvd.v1.PoolService/CreatePool",
        "/kvd.v1.LeaseService/Lease",
        "/kvd.v1.LeaseService/Extend",
        "/kvd.v1.LeaseService/Compress",
        "/kvd.v1.LeaseService/Observe",
        "/kvd.v1.LeaseService/Seal",
        "/kvd.v1.LeaseService/ReleaseBlocks",
        "/kvd.v1.LeaseService/Release",
        "/kvd.v1.ShareService/Match",
        "/kvd.v1.ShareService/Pin",
        "/kvd.v1.ShareService/Unpin",
        "/kvd.v1.ShareService/Fork",
        "/kvd.v1.ShareService/Publish",
        "/kvd.v1.ShareService/Adopt",
        "/kvd.v1.ShareService/Rest",
        "/kvd.v1.ShareService/Wake",
        "/kvd.v1.ShareService/Suspend",
        "/kvd.v1.ShareService/Resume",
        "/kvd.v1.ShareService/Restore",
        "/kvd.v1.ShareService/DropCheckpoint",
    )
)
LOOKING = frozenset(
    (
        "/kvd.v1.AdminService/GetStatus",
        "/kvd.v1.AdminService/ListLeases",
        "/kvd.v1.AdminService/GetLease",
        "/kvd.v1.AdminService/ListSessions",
        "/kvd.v1.AdminService/ListTenants",
        "/kvd.v1.AdminService/ListPins",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    )
)
STEERING = frozenset(
    (
        "/kvd.v1.AdminService/RevokeLease",
        "/kvd.v1.AdminService/AdminCreatePool",
        "/kvd.v1.AdminService/DropPool",
        "/kvd.v1.AdminService/DropPin",
        "/kvd.v1.AdminService/Drain",
        "/kvd.v1.AdminService/Restart",
    )
)
ANYBODY = frozenset(
    (
        "/kvd.v1.PoolService/GetPool",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    )
)
LAST = ("/kvd.v1.AdminService/Drain", "/kvd.v1.AdminService/Restart")  # they change what others are answered
TIMEOUT_S = 60.0


def everything_served() -> set[str]:
    files = (kvd_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    return {call for file in files for call in _calls_of(file)}


def _calls_of(file: FileDescriptor) -> Iterator[str]:
    for service in file.services_by_name.values():
        yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


def in_order() -> list[str]:
    return [*sorted(everything_served() - set(LAST)), *LAST]


def reason_of(error: grpc.RpcError) -> str:
    """The reason in kvd's details, or gRPC's code where it refused by itself."""
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    if status is None:
        return error.code().name
    info = ErrorInfo()
    [packed] = [packed for packed in status.details if packed.Is(ErrorInfo.DESCRIPTOR)]
    packed.Unpack(info)
    return info.reason


def answer_to(channel: grpc.Channel, call: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> str:
    """ "served", or the reason why it was not. An empty message; on the wire all calls look alike."""
    stream = channel.stream_stream(call)(iter([b""]), metadata=metadata, timeout=TIMEOUT_S)
    try:
        next(stream, None)
    except grpc.RpcError as error:
        return reason_of(error)
    stream.cancel()
    return "served"


def is_refused(answer: str) -> bool:
    """Whether the daemon would not hear it: other failures are about what was asked."""
    return answer in ("PERMISSION_DENIED", "UNAUTHENTICATED")
