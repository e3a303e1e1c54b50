"""A run of a device that is the same every time: for those who look at its journal meanwhile, or kill it."""

from collections.abc import Iterator

from tests.core.driver import Chance
from tests.core.test_any_order_of_events import CALM, AnyOrderOfEvents

from kvd_daemon.core import Device
from kvd_daemon.journal import RecordingDevice, Reply


class Walk(AnyOrderOfEvents):
    """On a device that is given."""

    def __init__(self, device: RecordingDevice, seed: int) -> None:
        self._given = device
        super().__init__()
        self._chance = Chance(seed)

    def new_device(self) -> Device:
        return self._given

    def successor(self) -> Device:
        return self.device

    def compare(self) -> None:
        """Others do."""

    def steps(self, count: int) -> Iterator[int]:
        """One call each, in a record with its reply."""
        self.begin()
        chance = self._chance
        for step in range(count):
            ready = [each for each in self.rules if all(holds(self) for holds in each.preconditions)]
            weights = [CALM.get(each.function.__name__, 1) for each in ready]
            chosen = chance.choices(ready, weights)[0]
            with self._given.batch():
                chosen.function(self, chance=Chance(chance.getrandbits(32)))
                session = next(iter(self._given.sessions), "")
                self._given.replied(Reply(session, f"request {step}", bytes([step % 256]), "Lease", b"done"))
            yield step
