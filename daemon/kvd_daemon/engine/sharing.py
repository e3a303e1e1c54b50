"""Matches and pins: the core decides at once, and what nobody took in time ends with the tick.

What wakes cached blocks takes them from those who wait for blocks, so it stands behind them. A match does not
wait: one that is held back finds nothing, and its caller computes.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvd_daemon.access.gate import Gate
from kvd_daemon.core import Matched, Pin
from kvd_daemon.core.parked import Promotion
from kvd_daemon.journal import RecordingDevice

from .admission import Admission, Asker
from .sessions import OpenSession

NOTHING_FOUND = Matched(None, 0)


@dataclass
class LookedUp:
    """Of one pool since the daemon started: blocks that matches asked for, and those of them they found."""

    asked: int = 0
    found: int = 0


class Sharing:
    """A device's matches and pins."""

    def __init__(self, device: RecordingDevice, gate: Gate, admission: Admission) -> None:
        self._device = device
        self._gate = gate
        self._admission = admission
        self.looked_up: defaultdict[str, LookedUp] = defaultdict(LookedUp)

    def require(self, opened: OpenSession, pool: str) -> None:
        """Raises PermissionDeniedError unless its tenant may use that pool."""
        self._gate.pools.require(opened.session.tenant, pool)

    def match(self, opened: OpenSession, pool: str, hashes: Sequence[bytes], ttl_ns: int) -> Matched:
        """Raises what Device.match does, PermissionDeniedError. Where nothing is found, nothing happens."""
        self.require(opened, pool)
        matched = self._match(opened, pool, hashes, ttl_ns)
        self.looked_up[pool].asked += len(hashes)
        self.looked_up[pool].found += matched.found
        return matched

    def _match(self, opened: OpenSession, pool: str, hashes: Sequence[bytes], ttl_ns: int) -> Matched:
        found = self._device.leading(opened.session_id, pool, hashes)
        if not found:
            return NOTHING_FOUND
        asker = _asker(opened)
        asked = opened.session_id, pool, hashes[:found]
        if self._admission.is_held_back(asker, lambda: [self._device.need_of_match(*asked)]):
            return NOTHING_FOUND
        return self._admission.take(
            asker,
            lambda: [self._device.need_of_match(*asked)],
            lambda: self._device.match(*asked, ttl_ns, time.monotonic_ns()),
        )

    def begin_promotion(self, opened: OpenSession, pool: str, hashes: Sequence[bytes]) -> Promotion | None:
        """Raises what Device.begin_promotion does, also where others come first. Asks nobody for blocks."""
        asked = opened.session_id, pool, hashes
        self._admission.require_turn(_asker(opened), lambda: [self._device.need_of_promotion(*asked)])
        return self._device.begin_promotion(*asked)

    def pin(self, opened: OpenSession, pool: str, hashes: Sequence[bytes]) -> Pin:
        """Raises what Device.pin does, also where others come first, PermissionDeniedError."""
        self.require(opened, pool)
        asked = opened.session_id, pool, hashes
        return self._admission.take(
            _asker(opened),
            lambda: [self._device.need_of_match(*asked)],
            lambda: self._device.pin(*asked),
        )

    def unpin(self, opened: OpenSession, pin_id: int) -> None:
        """Raises what Device.unpin does."""
        self._device.unpin(opened.session_id, pin_id)

    def drop_pin(self, pin_id: int) -> Pin:
        """Raises what Device.drop_pin does."""
        return self._device.drop_pin(pin_id)

    def tick(self) -> None:
        """Now and then: what is due ends. Nothing due, so nothing is written down."""
        for gone in self.looked_up.keys() - self._device.pools.keys():
            del self.looked_up[gone]
        now_ns = time.monotonic_ns()
        if any(pin.expires_ns is not None and pin.expires_ns <= now_ns for pin in self._device.pins.values()):
            self._device.expire_pins(now_ns)


def _asker(opened: OpenSession) -> Asker:
    return Asker(opened.session_id, opened.session.tenant)
