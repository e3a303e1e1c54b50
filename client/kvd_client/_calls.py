"""Calls about leases: locked, and never left half known.

A call that broke off (deadline, connection) may have been carried out. Its leases then keep it, and the
next call about any of them repeats it first, with the same request id, to learn what it did. Whoever asks
for the same again gets that answer: to do it again would be to do it twice.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

from kvd.errors import (
    DeadlineExceededError,
    DeviceUnavailableError,
    KvdError,
    LeaseGoneError,
    LeaseSuspendedError,
)
from kvd.v1 import kvd_pb2 as pb
from kvd_client._session import Session, SessionRequest


class Callee(Protocol):
    """A lease, as its calls see it."""

    lease_id: int
    lock: RLock
    unanswered: "LeaseCall | None"

    def check(self) -> None: ...
    def fail(self, cause: KvdError) -> None: ...
    def suspended(self) -> None: ...


@dataclass
class LeaseCall:
    """One request about `leases`; `apply` makes them what the answer says."""

    leases: Sequence[Callee]
    method: Callable[..., Any]
    request: SessionRequest
    apply: Callable[[Any], None]
    answer: Any = None
    """None until there is one."""

    def make(self, session: Session, deadline: float) -> Any:
        """The answer, already applied. The caller holds the leases' locks."""
        try:
            answer = session.call(self.method, self.request, self._check, deadline)
        except (DeadlineExceededError, DeviceUnavailableError):
            self._leave_unanswered(self)
            raise
        except KvdError as failure:
            self._leave_unanswered(None)
            if len(self.leases) == 1:
                self._learn_from(failure)
            raise
        self._leave_unanswered(None)
        self.answer = answer
        self.apply(answer)
        return answer

    def _learn_from(self, failure: KvdError) -> None:
        if isinstance(failure, LeaseGoneError):
            self.leases[0].fail(failure)
        if isinstance(failure, LeaseSuspendedError):
            self.leases[0].suspended()

    def _check(self) -> None:
        for lease in self.leases:
            lease.check()

    def _leave_unanswered(self, call: "LeaseCall | None") -> None:
        for lease in self.leases:
            lease.unanswered = call


@contextmanager
def held(session: Session, leases: Sequence[Callee], deadline: float) -> Iterator[None]:
    """These leases locked (in the order of their ids, so that nobody waits in a circle), usable, and with
    no call left unanswered. Raises what makes one unusable, or why the repeated call failed.

    Ends by the deadline of who asks, whatever time the repeated call had, or another thread's call has.
    """
    ordered = sorted(leases, key=lambda lease: lease.lease_id)
    while True:
        with ExitStack() as stack:
            for lease in ordered:
                lease.check()
                stack.enter_context(_locked(lease, deadline))
                lease.check()
            call = next((lease.unanswered for lease in ordered if lease.unanswered is not None), None)
            if call is None:
                yield
                return
        with ExitStack() as stack:
            for lease in sorted(call.leases, key=lambda lease: lease.lease_id):
                stack.enter_context(_locked(lease, deadline))
            if call.leases[0].unanswered is call:
                _repeat(call, session, deadline)


@contextmanager
def _locked(lease: Callee, deadline: float) -> Iterator[None]:
    if not lease.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise DeadlineExceededError(
            f"another thread's call about lease {lease.lease_id} took all the time; nothing was asked"
        )
    try:
        yield
    finally:
        lease.lock.release()


def taken_up(
    session: Session, lease: Callee, request_of: Callable[[], SessionRequest], deadline: float
) -> Any:
    """The answer to the call about this lease that broke off, if it asked for the same; it is repeated now.

    None if there is no such call, or the daemon refuses it: nothing was changed then.
    """
    with _locked(lease, deadline):
        call = lease.unanswered
        if call is None or len(call.leases) > 1 or _essence(call.request) != _essence(request_of()):
            return None
        _repeat(call, session, deadline)
        return call.answer


def _essence(request: Any) -> Any:
    """What is asked for, whoever asks and in which scratch blocks its queries lie."""
    essence = type(request)()
    essence.CopyFrom(request)
    for name in ("request_id", "session_token", "max_wait"):
        if name in essence.DESCRIPTOR.fields_by_name:
            essence.ClearField(name)
    if isinstance(essence, pb.CompressRequest | pb.ObserveRequest) and essence.HasField("queries"):
        essence.queries.Clear()
        essence.queries.SetInParent()
    return essence


def _repeat(call: LeaseCall, session: Session, deadline: float) -> None:
    """A refusal says that the call changed nothing, which is all there is to know."""
    try:
        call.make(session, deadline)
    except KvdError:
        if call.leases[0].unanswered is call:
            raise
