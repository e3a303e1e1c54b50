"""What all rules need: the device, the model, and a way to ask the one and check with the other."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from kvd import errors as e
from kvd.policy import H2O, Dense, SnapKV, Span, Streaming
from kvd_daemon.core import CompressPlan, Device, Progress

from .snapshot import state_of
from .world import World, WorldLease

MEMORY_BYTES = 24_000  # one pool of 40 blocks of 256 bytes, and most of another
TTL = 100
POLICIES = [
    Dense(),
    Streaming(sinks=3, window=9),
    SnapKV(window=2, kernel=3, keep=0.4),
    H2O(sinks=1, recent=3, keep=0.5),
    Span(sinks=1, window=2, kernel=3, keep=0.5),
    Span(sinks=1, window=2, kernel=3, keep=0.5, granularity="block"),
]
Refusal = type[e.KvdError] | None
"""The error that is due, if any."""


class Chance(random.Random):
    """Uniform, so that most calls make sense, and told by its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed_number = seed

    def __repr__(self) -> str:
        return f"Chance({self.seed_number})"


anything = st.integers(0, 2**32 - 1).map(Chance)


def any_lease(driver: "Driver") -> bool:
    return bool(driver.world.leases)


def any_session(driver: "Driver") -> bool:
    return bool(driver.world.sessions)


class Driver(RuleBasedStateMachine):
    """Each rule asks the model whether the device must refuse, and what it must do if not."""

    def __init__(self) -> None:
        super().__init__()
        self.device = self.new_device()
        self.world = World()
        self.plans: dict[int, CompressPlan] = {}
        self.observed: set[int] = set()
        self.voted: set[int] = set()
        self.lent: dict[int, int] = {}
        self.scrubs: list[tuple[list[int], list[tuple[int, int]], dict[int, WorldLease]]] = []
        self.opened = 0

    def new_device(self) -> Device:
        return Device(MEMORY_BYTES)

    def ask(self, error: Refusal, call: Callable[[], Any]) -> Any:
        """The call's answer; if `error` is due, that it came and nothing changed."""
        if error is None:
            return call()
        before = state_of(self.device)
        with pytest.raises(e.KvdError) as caught:
            call()
        assert type(caught.value) is error
        assert state_of(self.device) == before
        return None

    def a_session(self, chance: Chance) -> str:
        known = list(self.world.sessions)
        return "nobody" if not known or chance.random() < 0.03 else chance.choice(known)

    def a_pool(self, chance: Chance) -> str:
        return "b" if "b" in self.world.pools and chance.random() < 0.3 else "a"

    def a_lease(self, chance: Chance, **wanted: object) -> WorldLease:
        """Mostly one that is as wanted, sometimes any."""
        leases = list(self.world.leases.values())
        wanted |= {"fate": "active"}
        fit = [each for each in leases if all(getattr(each, name) == value for name, value in wanted.items())]
        if fit and chance.random() < 0.5:
            return max(fit, key=lambda each: len(each.slots))
        return chance.choice(fit if fit and chance.random() < 0.9 else leases)

    def owner(self, lease: WorldLease, chance: Chance) -> str:
        return lease.session if chance.random() < 0.95 else self.a_session(chance)

    def progress(self, lease: WorldLease) -> Progress:
        return Progress(lease.lease_id, lease.generation, len(lease.slots), lease.position)

    def refusal(self, session: str, lease: WorldLease, by_time: bool = True) -> Refusal:
        return self.world.session_error(session, by_time) or self.world.lease_error(session, lease.lease_id)
