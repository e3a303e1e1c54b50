"""What the daemon tells a worker unasked."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Generic, TypeVar

from kvd.errors import ClosedError, KvdError
from kvd_client._checked import seconds

MAX_WAITING_EVENTS = 1024  # events; of a worker that never looks only the newest are kept


@dataclass(frozen=True)
class LeaseRevoked:
    """An operator took a lease away. It raises LeaseRevokedError when used; stop writing to it."""

    lease_id: int
    cause: str


@dataclass(frozen=True)
class Pressure:
    """Others wait for blocks: compress or release something.

    `compressible` are the ids of this client's leases in that pool that have more tokens than their `floor`
    (see `Pool.lease`); `Lease.compress_wanted` says so too.
    """

    pool: str
    wanted_blocks: int
    compressible: tuple[int, ...] = ()


@dataclass(frozen=True)
class Draining:
    """The daemon stops soon and grants no new leases."""


@dataclass(frozen=True)
class SessionLost:
    """The daemon restarted or forgot the session: its leases are gone. A new session opens by itself."""

    session_id: str
    cause: str


@dataclass(frozen=True)
class Offer:
    """Another session transferred a lease to this one: `client.pool(offer.pool).adopt(offer.key)`."""

    pool: str
    key: str
    lease_id: int


Event = LeaseRevoked | Pressure | Draining | SessionLost


Told = TypeVar("Told")


class Queue(Generic[Told]):
    """Oldest first. Safe to read from any thread. `check` raises where nothing can come any more."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._broken: KvdError | None = None
        self._waiting: deque[Told] = deque(maxlen=MAX_WAITING_EVENTS)
        self._arrived = Condition()

    def get(self, timeout: float) -> Told | None:
        """The next event, or None if none came within `timeout` seconds.

        Raises ClosedError after `Client.close()`, ForkedClientError in a forked child.
        """
        patience_s = seconds("timeout", timeout, least_s=0.0)
        self._check()  # before the lock, which nobody gives back in a forked child
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting or self._broken, patience_s)
            if self._waiting:
                return self._waiting.popleft()
            broken, self._broken = self._broken, None
        self._check()
        if broken is not None:
            raise broken
        return None

    def drain(self) -> list[Told]:
        """Those that are there already, without waiting: cheap enough for every decode step. Errors as `get`
        has them."""
        self._check()
        with self._arrived:
            events = list(self._waiting)
            self._waiting.clear()
            return events

    def put(self, event: Told) -> None:
        """Called by the session. Drops the oldest one when full."""
        with self._arrived:
            self._waiting.append(event)
            self._arrived.notify()


class Events(Queue[Event]):
    """A queue of events."""


class Offers(Queue[Offer]):
    """A queue of leases that wait for this session. Each is told once, however often the daemon tells it.

    When the session is lost, what was offered to it is out of reach: `get` raises ClosedError, once, and goes
    on with the new session, whose `Client.session_id` others need.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__(check)
        self._told: deque[Offer] = deque(maxlen=MAX_WAITING_EVENTS)

    def put(self, event: Offer) -> None:
        """Called by the session's thread alone."""
        if event not in self._told:
            self._told.append(event)
            super().put(event)

    def lose(self, cause: str) -> None:
        """Called by the session when it is gone."""
        with self._arrived:
            self._waiting.clear()
            self._broken = ClosedError(
                f"the session that leases were offered to is gone ({cause}); tell others the new "
                "client.session_id"
            )
            self._arrived.notify_all()
