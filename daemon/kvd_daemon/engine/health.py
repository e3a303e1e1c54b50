"""Whether the daemon serves, and if not, why. The health check and `GetStatus` both read it here."""

import logging
from collections.abc import Callable
from enum import StrEnum

LOG = logging.getLogger("kvd.health")


class HealthState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    FAILING = "failing"
    DRAINING = "draining"


class Health:
    """SERVING while the kernel worker answers and nothing was found wrong.

    A finding (an invariant that does not hold, an unexpected exception) stays: only a new daemon can be
    trusted again.
    """

    def __init__(self) -> None:
        self._kernel_serves = False
        self._kernel_served = False
        self._finding = ""
        self._draining = False
        self._listeners: list[Callable[[], None]] = []

    @property
    def state(self) -> HealthState:
        if self._draining:
            return HealthState.DRAINING
        if self._finding or (self._kernel_served and not self._kernel_serves):
            return HealthState.FAILING
        return HealthState.SERVING if self._kernel_serves else HealthState.STARTING

    @property
    def detail(self) -> str:
        """Why it is not serving, in words; empty if it is."""
        match self.state:
            case HealthState.DRAINING:
                return "no new leases: the daemon stops, or an operator drains it"
            case HealthState.STARTING:
                return "the kernel worker starts"
            case HealthState.FAILING:
                return self._finding or "the kernel worker was lost, another one starts"
            case _:
                return ""

    def listen(self, listener: Callable[[], None]) -> None:
        """Called after every change."""
        self._listeners.append(listener)

    def kernel(self, serves: bool) -> None:
        self._kernel_serves = serves
        self._kernel_served |= serves
        self._changed()

    def find(self, what: str) -> None:
        """Something is wrong with this process."""
        if not self._finding:
            self._finding = what
            LOG.error("health is red from now on: %s", what)
            self._changed()

    def drain(self) -> None:
        self._draining = True
        self._changed()

    def resume(self) -> None:
        self._draining = False
        self._changed()

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()
