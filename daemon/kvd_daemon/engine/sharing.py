"""Matches and pins: the core decides at once, and what nobody took in time ends with the tick."""

import time
from collections.abc import Sequence

from kvd.errors import PoolExhaustedError, QuotaExceededError
from kvd_daemon.access.gate import Gate
from kvd_daemon.core import Matched, Pin
from kvd_daemon.journal import RecordingDevice

from .exhaustion import Exhaustion
from .sessions import OpenSession

NOTHING_FOUND = Matched(None, 0)


class Sharing:
    """A device's matches and pins."""

    def __init__(self, device: RecordingDevice, gate: Gate, exhaustion: Exhaustion) -> None:
        self._device = device
        self._gate = gate
        self._exhaustion = exhaustion

    def match(self, opened: OpenSession, pool: str, hashes: Sequence[bytes], ttl_ns: int) -> Matched:
        """Raises what Device.match does, PermissionDeniedError. Where nothing is found, nothing happens."""
        self._gate.pools.require(opened.session.tenant, pool)
        found = self._device.leading(opened.session_id, pool, hashes)
        if not found:
            return NOTHING_FOUND
        now_ns = time.monotonic_ns()
        try:
            return self._device.match(opened.session_id, pool, hashes[:found], ttl_ns, now_ns)
        except (PoolExhaustedError, QuotaExceededError) as error:
            raise self._exhaustion.explained(error, opened.session.tenant, now_ns) from error

    def pin(self, opened: OpenSession, pool: str, hashes: Sequence[bytes]) -> Pin:
        """Raises what Device.pin does, PermissionDeniedError."""
        self._gate.pools.require(opened.session.tenant, pool)
        return self._device.pin(opened.session_id, pool, hashes)

    def unpin(self, opened: OpenSession, pin_id: int) -> None:
        """Raises what Device.unpin does."""
        self._device.unpin(opened.session_id, pin_id)

    def drop_pin(self, pin_id: int) -> Pin:
        """Raises what Device.drop_pin does."""
        return self._device.drop_pin(pin_id)

    def tick(self) -> None:
        """Now and then: what is due ends. Nothing due, so nothing is written down."""
        now_ns = time.monotonic_ns()
        if any(pin.expires_ns is not None and pin.expires_ns <= now_ns for pin in self._device.pins.values()):
            self._device.expire_pins(now_ns)
