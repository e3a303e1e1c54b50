"""The attach socket: tickets, and the descriptors of a pool's memory. One connection per question."""

import os
import socket
from dataclasses import dataclass

from kvd.errors import DeadlineExceededError, DeviceUnavailableError, InternalError
from kvd.v1 import attach_pb2 as pb
from kvd_client._errors import from_reason

MAX_PACKET_BYTES = 65_536  # far above any response; a packet that does not fit would be cut off
MAX_DESCRIPTORS = 3  # the pool's bytes, its sidecar, the device's fences


@dataclass(frozen=True)
class Descriptors:
    """A pool's memory, and the fences of its leases. Whoever holds this closes the descriptors."""

    pool_fd: int
    sidecar_fd: int
    fence_fd: int
    pool_bytes: int
    sidecar_bytes: int
    fence_bytes: int
    pool_id: str
    device_kind: str
    device_uuid: str

    def close(self) -> None:
        _close_all([self.pool_fd, self.sidecar_fd, self.fence_fd])


def ask_ticket(path: str, timeout_s: float) -> bytes:
    """A single-use ticket to open a session with. Raises UnavailableError, DeadlineExceededError."""
    answer, fds = _ask(path, pb.AttachRequest(ticket=pb.TicketRequest()), timeout_s)
    _close_all(fds)
    return answer.ticket.ticket


def ask_memory(path: str, session_token: bytes, pool: str, timeout_s: float) -> Descriptors:
    """The pool's memory. Raises PoolNotFoundError, UnauthenticatedError, or as `ask_ticket`."""
    request = pb.AttachRequest(map=pb.MapRequest(session_token=session_token, pool=pool))
    answer, fds = _ask(path, request, timeout_s)
    if len(fds) != MAX_DESCRIPTORS:
        _close_all(fds)
        raise InternalError(f"{len(fds)} descriptors came for pool {pool}, {MAX_DESCRIPTORS} were expected")
    memory = answer.map
    pool_fd, sidecar_fd, fence_fd = fds
    return Descriptors(
        pool_fd=pool_fd,
        sidecar_fd=sidecar_fd,
        fence_fd=fence_fd,
        pool_bytes=memory.pool_bytes,
        sidecar_bytes=memory.sidecar_bytes,
        fence_bytes=memory.fence_bytes,
        pool_id=memory.pool_id,
        device_kind=memory.device_kind,
        device_uuid=memory.device_uuid,
    )


def _ask(path: str, request: pb.AttachRequest, timeout_s: float) -> tuple[pb.AttachResponse, list[int]]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(max(timeout_s, 0.001))
            sock.connect(path)
            sock.sendall(request.SerializeToString())
            packet, fds, _flags, _address = socket.recv_fds(
                sock, MAX_PACKET_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
    except (TimeoutError, BlockingIOError):
        raise DeadlineExceededError(f"{path} did not answer within {timeout_s:.1f} s") from None
    except OSError as error:
        raise DeviceUnavailableError(
            f"no daemon answers on {path} ({error.strerror}); is kvd running?"
        ) from None
    if not packet:
        raise DeviceUnavailableError(f"the daemon closed {path} without an answer; it may be stopping")
    answer = pb.AttachResponse.FromString(packet)
    if answer.WhichOneof("response") == "error":
        _close_all(fds)
        refusal = answer.error
        raise from_reason(refusal.reason, refusal.message, dict(refusal.metadata))
    return answer, fds


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
