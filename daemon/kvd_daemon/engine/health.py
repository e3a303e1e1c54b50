"""Whether the daemon serves, and if not, why. The health check and `GetStatus` both read it here."""

import logging
import time
from collections.abc import Callable
from enum import StrEnum

LATE_S = (
    5.0  # seconds without a lease round trip after which the daemon does not serve; one is made each second
)
LONG_STALL_S = 1.0  # seconds; an event loop that was stuck for so long is worth a word
LOG = logging.getLogger("kvd.health")


class HealthState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    FAILING = "failing"
    DRAINING = "draining"


class Health:
    """SERVING while a lease and the kernel worker were there for who asked in the last seconds.

    A finding (an invariant that does not hold, an unexpected exception) stays: only a new daemon can be
    trusted again. `clock` tells seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kernel_trouble: str | None = ""
        self._leases_since_s: float | None = None
        self._leased = False
        self._lease_trouble = "no answer"
        self._troubles: dict[str, str] = {}
        self._lacks: dict[str, str] = {}
        self._stall_s = 0.0
        self._finding = ""
        self._draining = False
        self._listeners: list[Callable[[], None]] = []
        self._told = (self.state, self.detail)

    @property
    def state(self) -> HealthState:
        if self._draining:
            return HealthState.DRAINING
        if self._finding or self._kernel_trouble or self._troubles or self._lease_is_late:
            return HealthState.FAILING
        starts = self._kernel_trouble is not None or not self._leased
        return HealthState.STARTING if starts else HealthState.SERVING

    @property
    def detail(self) -> str:
        """Why it is not serving, in words; if it is, what is strange all the same, or nothing."""
        match self.state:
            case HealthState.DRAINING:
                return "no new leases: the daemon stops, or an operator drains it"
            case HealthState.STARTING:
                return (
                    "the kernel worker starts"
                    if self._kernel_trouble is not None
                    else "no lease was tried yet"
                )
            case HealthState.FAILING:
                late = f"no lease round trip for {LATE_S:g} s: {self._lease_trouble}"
                return self._finding or self._kernel_trouble or "; ".join(self._troubles.values()) or late
            case _:
                stalled = f"the event loop was stuck for {self._stall_s:.1f} s within the last minute"
                return "; ".join(self._lacks.values()) or (stalled if self._stall_s > LONG_STALL_S else "")

    @property
    def lease_age_s(self) -> float | None:
        """Seconds since the last lease round trip; None before the first."""
        return self._clock() - self._leases_since_s if self._leased and self._leases_since_s else None

    @property
    def _lease_is_late(self) -> bool:
        """Nobody is late before anybody asked."""
        return self._leases_since_s is not None and self._clock() - self._leases_since_s > LATE_S

    def listen(self, listener: Callable[[], None]) -> None:
        """Called after every change."""
        self._listeners.append(listener)

    def kernel(self, trouble: str | None) -> None:
        """See KernelClient.trouble."""
        self._kernel_trouble = trouble
        self.look()

    def lease_tried(self, trouble: str | None) -> None:
        """A lease round trip succeeded, or failed for that reason."""
        if trouble is None:
            self._leased, self._leases_since_s = True, self._clock()
        else:
            self._lease_trouble = trouble
            self._leases_since_s = self._leases_since_s or self._clock()
        self.look()

    def stalled(self, longest_s: float) -> None:
        """The longest stall of the event loop within the last minute."""
        self._stall_s = longest_s
        self.look()

    def found_of(self, what: str, trouble: str) -> None:
        """What is wrong with that part, by the last look at it; or nothing."""
        if trouble and trouble != self._troubles.get(what):
            LOG.error("%s", trouble)
        self._troubles.pop(what, None)
        if trouble:
            self._troubles[what] = trouble
        self.look()

    def lacks(self, what: str, of: str = "") -> None:
        """What operators miss and workers do not: it is told, and makes nothing red."""
        if what and what != self._lacks.get(of):
            LOG.error("%s", what)
        self._lacks.pop(of, None)
        if what:
            self._lacks[of] = what
        self.look()

    def find(self, what: str) -> None:
        """Something is wrong with this process."""
        if not self._finding:
            self._finding = what
            LOG.error("health is red from now on: %s", what)
            self.look()

    def drain(self) -> None:
        self._draining = True
        self.look()

    def resume(self) -> None:
        self._draining = False
        self.look()

    def look(self) -> None:
        """Tell who listens what has changed, by an event or by time."""
        now = (self.state, self.detail)
        if now != self._told:
            self._told = now
            for listener in self._listeners:
                listener()
