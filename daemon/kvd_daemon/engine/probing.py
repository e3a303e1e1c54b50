"""The daemon asks itself for what a worker asks: health is what it gets, not what it believes.

Once a second a lease is asked for over the daemon's own socket, by a real call that a secret of this process
marks as the probe's. It takes the way of any other: the socket and a new connection, gRPC, the event loop,
the service, the core's decision in every pool. Only the grant is left away (see core.rehearsing), so the
probe appears in no list, counts in no limit, and the journal does not grow by a record a second. A pool that
is full refuses workers and not the probe: it is not sick.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable

from kvd.errors import KvdError
from kvd_daemon.core import Device

from .health import Health
from .stalls import Stalls

INTERVAL_S = 1.0  # seconds from one probe to the next
DEADLINE_S = 4.0  # seconds for one; it takes milliseconds
TOKEN_BYTES = 32  # 256 bits


class Probing:
    """Keeps `health` up to date."""

    def __init__(self, device: Device, health: Health) -> None:
        self._device = device
        self._health = health
        self._stalls = Stalls()
        self._token = secrets.token_bytes(TOKEN_BYTES)

    def owns(self, session_token: bytes) -> bool:
        """Whether a call is the probe's."""
        return hmac.compare_digest(session_token, self._token)

    def rehearse(self) -> None:
        """The probe's call has arrived. Raises what keeps every lease from being granted."""
        self._device.rehearse(time.monotonic_ns())

    async def ask(self, lease: Callable[[bytes], Awaitable[None]]) -> None:
        """Until cancelled. `lease(session_token)` makes the round trip; a KvdError says why it failed."""
        while True:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await lease(self._token)
            except KvdError as error:
                self._health.lease_tried(str(error))
            except TimeoutError:
                self._health.lease_tried(f"no answer within {DEADLINE_S:g} s")
            else:
                self._health.lease_tried(None)
            await asyncio.sleep(INTERVAL_S)

    async def watch(self) -> None:
        """Until cancelled: see what gets late, and how the event loop does."""
        while True:
            await self._stalls.tick()
            self._health.stalled(self._stalls.longest_s)
