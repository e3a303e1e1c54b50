"""Leases that are forked, and leases given to other sessions."""

from typing import TYPE_CHECKING

from kvd.arguments import text, whole
from kvd.errors import ClosedError, InvalidArgumentError
from kvd.limits import MAX_ITEMS_PER_CALL, MAX_SHELF_KEY_CHARS
from kvd.v1 import kvd_pb2 as pb
from kvd_client._calls import LeaseCall, held, taken_up
from kvd_client._session import new_request_id

if TYPE_CHECKING:
    from kvd_client._lease import Lease


def shelf_name(name: str, value: object) -> str:
    """A key to publish under, or a session to transfer to. Raises InvalidArgumentError."""
    checked = text(name, value, MAX_SHELF_KEY_CHARS)
    if not checked:
        raise InvalidArgumentError(f"{name}=''; 1 to {MAX_SHELF_KEY_CHARS} characters are needed")
    return checked


def fork(lease: "Lease", count: int) -> "list[Lease]":
    """See Lease.fork. Forks of a call that breaks off are released with the one that repeats it."""
    lease.pool.check_writable()
    count, forks = whole("count", count, 1, MAX_ITEMS_PER_CALL), list["Lease"]()
    session, handle, pool = lease.pool.session, lease.handle, lease.pool

    def apply(answer: pb.ForkResponse) -> None:
        handle.learn(handle.state.after(answer.lease))
        forks.extend(pool.adopt_state(lease.policy, lease.lease_ahead, state) for state in answer.forks)

    deadline = session.deadline()
    with held(session, [handle], deadline):
        request = pb.ForkRequest(request_id=new_request_id(), progress=handle.progress(), count=count)
        LeaseCall([handle], session.share_service.Fork, request, apply).make(session, deadline)
    return forks


def give(lease: "Lease", key: str, to_session: str, ttl_s: float) -> None:
    """See Lease.publish and Lease.transfer."""
    where = f"transferred to session {to_session}" if to_session else f"published under {key!r}: adopt it"
    gone = ClosedError(f"lease {lease.lease_id} was {where}")
    session, handle = lease.pool.session, lease.handle
    deadline = session.deadline()

    def request() -> pb.PublishRequest:
        asked = pb.PublishRequest(
            request_id=new_request_id(), progress=handle.progress(), key=key, to_session=to_session
        )
        asked.ttl.FromNanoseconds(int(ttl_s * 1e9))
        return asked

    if taken_up(session, handle, request, deadline) is None:
        with held(session, [handle], deadline):
            method = session.share_service.Publish
            LeaseCall([handle], method, request(), lambda _: handle.give_away(gone)).make(session, deadline)
