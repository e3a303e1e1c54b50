"""Leases that change hands or are forked; who waits for a published one is answered as it comes."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from kvd.errors import LimitExceededError, OfferNotFoundError
from kvd_daemon.access.gate import Gate
from kvd_daemon.core import Forked, Lease, Offer, Progress
from kvd_daemon.journal import RecordingDevice

from .events import Offered
from .sessions import OpenSession, Sessions

KEY_BYTES = 16  # of a transferred lease's key, which nobody has to guess: it is adopted by one session alone
MAX_WAITING_ADOPTERS = 1024  # calls; each publication asks those of its key

Answer = TypeVar("Answer")
Place = tuple[str, str, str]
"""Tenant, pool and key."""


class Handing:
    """A device's shelf. Everything happens in the event loop's thread."""

    def __init__(self, device: RecordingDevice, gate: Gate, sessions: Sessions) -> None:
        self._device = device
        self._gate = gate
        self._sessions = sessions
        self._waiting: dict[asyncio.Future[None], Place] = {}

    def fork(self, opened: OpenSession, progress: Progress, count: int) -> Forked:
        """Raises what Device.fork does."""
        leases = len(opened.session.leases) + count
        self._gate.limits.require("leases_per_call", count, "forks in one call")
        self._gate.limits.require("leases_per_session", leases, "leases in one session")
        return self._device.fork(opened.session_id, progress, count, time.monotonic_ns())

    def publish(self, opened: OpenSession, progress: Progress, offer: Offer) -> Lease:
        """Raises what Device.publish does. A receiver is told; for it alone the key may be left to us."""
        if offer.to_session and not offer.key:
            offer = Offer(secrets.token_hex(KEY_BYTES), offer.ttl_ns, offer.to_session)
        shelved = self._device.shelf.count(opened.session.tenant) + 1
        self._gate.limits.require(
            "shelved_leases_per_tenant", shelved, "leases of one tenant that wait to be adopted"
        )
        lease = self._device.publish(opened.session_id, progress, offer, time.monotonic_ns())
        place = lease.tenant, lease.pool, offer.key
        for waiter in [waiter for waiter, other in self._waiting.items() if other == place]:
            if not waiter.done():
                waiter.set_result(None)
        if offer.to_session:
            self._sessions.tell(offer.to_session, Offered(lease.pool, offer.key, lease.lease_id))
        return lease

    def adopt(self, opened: OpenSession, pool: str, key: str) -> Lease:
        """Raises what Device.adopt does, PermissionDeniedError."""
        self._gate.pools.require(opened.session.tenant, pool)
        leases = len(opened.session.leases) + 1
        self._gate.limits.require("leases_per_session", leases, "leases in one session")
        return self._device.adopt(opened.session_id, pool, key, time.monotonic_ns())

    async def adopted(self, place: Place, wait_ns: int, attempt: Callable[[], Answer]) -> Answer:
        """What `attempt` answers, now or when a lease is published there within `wait_ns`.

        Raises what it raises. It ends with its caller: an adoption that only waits has not begun.
        """
        until_ns = time.monotonic_ns() + wait_ns
        while True:
            try:
                return attempt()
            except OfferNotFoundError:
                left_ns = until_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise
            await self._published(place, left_ns / 1e9)

    async def _published(self, place: Place, patience_s: float) -> None:
        """Until something is published there, or nobody has patience any more."""
        if len(self._waiting) >= MAX_WAITING_ADOPTERS:
            raise LimitExceededError(f"{MAX_WAITING_ADOPTERS} calls wait to adopt already; retry later")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = place
        try:
            await asyncio.wait([waiter], timeout=patience_s)
        finally:
            del self._waiting[waiter]

    def offers_to(self, session_id: str) -> list[Offered]:
        """Leases that wait for that session: whoever resumes its stream may not have heard of them."""
        return [
            Offered(pool, key, lease.lease_id)
            for (_, pool, key), lease in self._device.shelf.items()
            if lease.shelved is not None and lease.shelved.to_session == session_id
        ]

    def tick(self) -> None:
        """Now and then: what nobody adopted in time comes back. Nothing due, so nothing is written down."""
        now_ns = time.monotonic_ns()
        shelved = [lease.shelved for lease in self._device.shelf.values()]
        if any(each is not None and each.expires_ns <= now_ns for each in shelved):
            self._device.expire_shelf(now_ns)
