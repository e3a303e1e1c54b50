"""Calls that make leases a session's: Lease and Adopt. One that broke off may have been carried out.

What a broken off Lease took is given back. A broken off Adopt is not: to repeat it may be to adopt, and
giving that back would be the end of another worker's sequence. Whoever asks for its key again goes on
with it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvd.errors import (
    DeadlineExceededError,
    DeviceUnavailableError,
    ExhaustedError,
    InvalidArgumentError,
    KvdError,
    NotFoundError,
)
from kvd.v1 import kvd_pb2 as pb
from kvd_client._session import Session, new_request_id
from kvd_client._waiting import waiting

MAX_BROKEN_ADOPTIONS = 1024  # keys; of a worker that never asks again only the newest are kept
REFUSALS = (ExhaustedError, NotFoundError, InvalidArgumentError)
"""A repeated call that is refused took nothing."""


class Takings:
    """Those of one pool. `check` raises if the pool is of no use any more."""

    def __init__(self, session: Session, session_id: str, check: Callable[[], None]) -> None:
        self._session = session
        self._session_id = session_id
        self._check = check
        self._unanswered: list[pb.LeaseRequest] = []
        self._adoptions: dict[str, pb.AdoptRequest] = {}

    def lease(self, request: pb.LeaseRequest, deadline: float, wait_s: float = 0.0) -> list[pb.LeaseState]:
        """The leases, for which the daemon lets it stand in line for `wait_s`."""
        method = self._session.lease_service.Lease
        try:
            answer: pb.LeaseResponse = self._make(method, request, deadline, wait_s)
        except (DeadlineExceededError, DeviceUnavailableError):
            self._unanswered.append(request)
            raise
        return list(answer.leases)

    def adopt(self, pool: str, pool_id: str, key: str, wait_s: float) -> pb.AdoptResponse:
        """The lease published under that key."""
        request = self._adoptions.pop(key, None)
        if request is None:
            request = pb.AdoptRequest(request_id=new_request_id(), pool=pool, pool_id=pool_id, key=key)
        method = self._session.share_service.Adopt
        deadline = self._session.deadline(self._session.timeout_s + wait_s)
        try:
            answer: pb.AdoptResponse = self._make(method, request, deadline, wait_s)
        except (DeadlineExceededError, DeviceUnavailableError):
            self._adoptions[key] = request
            if len(self._adoptions) > MAX_BROKEN_ADOPTIONS:
                self._adoptions.pop(next(iter(self._adoptions)))
            raise
        return answer

    def _make(
        self,
        method: Callable[..., Any],
        request: pb.LeaseRequest | pb.AdoptRequest,
        deadline: float,
        wait_s: float,
    ) -> Any:
        with waiting(request, wait_s):
            return self._session.call(method, request, self._check, deadline)

    def give_back(self, deadline: float) -> None:
        """Repeated with its request id, a call says what it took; or it is refused and took nothing."""
        while (request := self._unanswered_one()) is not None:
            with suppress(*REFUSALS):
                self._orphan(self.lease(request, deadline))

    def settle(self, deadline: float) -> None:
        """As `give_back`, in the session's thread and without another attempt."""
        while (request := self._unanswered_one()) is not None:
            try:
                answer = self._session.attempt(self._session.lease_service.Lease, request, deadline)
            except REFUSALS:
                continue
            except KvdError:
                self._unanswered.append(request)
                return
            self._orphan(list(answer.leases))

    def _unanswered_one(self) -> pb.LeaseRequest | None:
        """Taken out, so that of several threads one repeats it."""
        with suppress(IndexError):
            return self._unanswered.pop()
        return None

    def _orphan(self, leases: list[pb.LeaseState]) -> None:
        for lease in leases:
            self._session.orphan(lease.lease_id, self._session_id)
