"""What session, calls and the public lease share of one lease: its state, its lock, whether it is gone."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvd.errors import (
    ClosedError,
    ConflictError,
    KvdError,
    LeaseRestingError,
    LeaseRevokedError,
    LeaseSuspendedError,
)
from kvd.policy import Policy
from kvd.v1 import kvd_pb2 as pb
from kvd_client._calls import LeaseCall
from kvd_client._fence import Fences
from kvd_client._session import Session
from kvd_client._state import SlotState


class LeasePool(Protocol):
    """What a lease needs of the pool it was made in."""

    session: Session
    session_id: str

    @property
    def fences(self) -> Fences: ...


class LeaseHandle:
    """`state` is replaced as a whole, by whoever holds `lock`."""

    def __init__(self, pool: "LeasePool", policy: Policy, answer: pb.LeaseState) -> None:
        session, session_id = pool.session, pool.session_id
        self.lease_id = answer.lease_id
        self.fences, self.fence_slot = pool.fences, answer.fence_slot
        self.policy = policy
        self.lock = threading.RLock()
        self.unanswered: LeaseCall | None = None
        self._aside: LeaseRestingError | LeaseSuspendedError | None = None
        self._rousers: dict[int, type[KvdError]] = {}
        self.wanted_floor = 0
        self.state = SlotState.granted(answer)
        self._session = session
        self._said = self.state.standing
        self._gone: KvdError | None = None
        self._orphan = weakref.finalize(self, session.orphan, self.lease_id, session_id)
        self._orphan.atexit = False

    def check(self) -> None:
        """Raises what makes this lease unusable."""
        self._session.check_usable()
        if self._gone is None:
            aside = self._aside
            if aside is not None and self._rousers.get(threading.get_ident()) is not type(aside):
                raise type(aside)(str(aside))
            return
        if isinstance(self._gone, LeaseRevokedError):
            self._orphan()  # who is told has stopped writing, so its blocks may go
        raise type(self._gone)(str(self._gone))

    def learn(self, state: SlotState) -> None:
        """The daemon's word."""
        self.state = state
        self._said = state.standing

    def progress(self) -> pb.LeaseProgress:
        """What the daemon is told. Raises ConflictError while passed over tokens are not committed."""
        skip = self.state.skip
        if skip is not None:
            raise ConflictError(f"the last extend() is not committed: commit({skip.tokens}) first")
        generation, length, position = self.state.standing
        return pb.LeaseProgress(
            lease_id=self.lease_id, generation=generation, length=length, position=position
        )

    def unsaid_progress(self) -> pb.LeaseProgress | None:
        """Progress the daemon has not heard of; nothing while a call is under way, which tells it anyway."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            standing = self.state.standing
            if standing == self._said or self._gone is not None or self.unanswered is not None:
                return None
            self._said = standing
            return self.progress()
        finally:
            self.lock.release()

    def lose(self, cause: KvdError) -> None:
        """The session is gone: there is nothing to release."""
        self._gone = cause
        self._orphan.detach()

    def fail(self, cause: KvdError) -> None:
        """The daemon says that the lease is gone; only releasing is left."""
        self._gone = cause

    def revoke(self, cause: str) -> None:
        self._gone = LeaseRevokedError(f"lease {self.lease_id} was taken away: {cause}; prefill again")

    def lie_down(self) -> None:
        """It is left alone from here on."""
        self._aside = LeaseRestingError(f"lease {self.lease_id} rests: wake() it first")
        self.learn(self.state)

    def leave(self, state: SlotState) -> None:
        """It has left the pool: there are no slots, and who still sees some hears why they are of no use."""
        self._aside = LeaseSuspendedError(f"lease {self.lease_id} is suspended: resume() it first")
        self.learn(state)

    def suspended(self) -> None:
        """The daemon says that it has left the pool, though nobody here has asked for that."""
        self.leave(self.state.without_blocks())

    def come_back(self, state: SlotState) -> None:
        """It rests no more, or is in the pool again."""
        self.learn(state)
        self._aside = None

    @property
    def is_resting(self) -> bool:
        return isinstance(self._aside, LeaseRestingError)

    @property
    def is_suspended(self) -> bool:
        return isinstance(self._aside, LeaseSuspendedError)

    @contextmanager
    def roused(self, put_aside: type[LeaseRestingError | LeaseSuspendedError]) -> Iterator[None]:
        """Usable inside for this thread, so that it can ask the daemon to bring the lease back."""
        self._rousers[threading.get_ident()] = put_aside
        try:
            yield
        finally:
            del self._rousers[threading.get_ident()]

    def give_away(self, cause: KvdError) -> None:
        """It is another session's, or nobody's yet: there is nothing to release here."""
        self._gone = cause
        self._orphan.detach()

    def end(self) -> None:
        """The worker is done with it: the session's next call releases it."""
        with self.lock:
            if self._gone is None:
                self._gone = ClosedError(f"lease {self.lease_id} was released; make a new one")
            self._orphan()
