"""A journal tells, at any moment of any order of events, what the device is that wrote it."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant
from tests.core.driver import Chance
from tests.core.snapshot import state_of
from tests.core.test_any_order_of_events import CALM, AnyOrderOfEvents

from kvd_daemon.core import Device
from kvd_daemon.journal import RecordingDevice

from .shelf import SMALL, TINY, copied, opened, told

EXAMPLES = 40  # sequences of events
STEPS = 25  # events in each
WALKS = 4  # long sequences
WALK_STEPS = 300  # events in each
LOOK_EVERY = 7  # events between two readings of the journal


class RecordedEvents(AnyOrderOfEvents):
    """Daemons that die leave nothing but their journals."""

    settings = SMALL

    def new_device(self) -> Device:
        self.folder = Path(tempfile.mkdtemp(prefix="kvd-journal-"))
        self.steps = 0
        return opened(self.folder / "journal", self.settings).device

    def successor(self) -> Device:
        before = state_of(self.device)
        self.recording.journal.close()
        found = opened(self.folder / "journal", self.settings)
        assert found.found.state == "recovered", found.found.detail
        assert state_of(found.device) == before
        return found.device

    @property
    def recording(self) -> RecordingDevice:
        assert isinstance(self.device, RecordingDevice)
        return self.device

    @invariant()
    def compare(self) -> None:
        self.steps += 1
        if self.steps % LOOK_EVERY == 0:
            self.the_books_add_up()
            self.the_device_is_as_the_model_says()
            self.the_journal_tells_the_same()

    def the_journal_tells_the_same(self) -> None:
        self.recording.journal.settle()
        copy = copied(self.folder / "journal", self.folder / "copy")
        assert told(copy, self.settings)[0] == state_of(self.device)

    def teardown(self) -> None:
        self.recording.journal.remove()
        shutil.rmtree(self.folder)


TestRecordedEvents = RecordedEvents.TestCase
TestRecordedEvents.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class OftenInSegments(RecordedEvents):
    settings = TINY


@pytest.mark.parametrize("seed", range(WALKS))
def test_a_long_walk_through_many_segments_and_snapshots_is_told(seed: int) -> None:
    chance, walker = Chance(seed), OftenInSegments()
    walker.begin()
    for _ in range(WALK_STEPS):
        ready = [each for each in walker.rules if all(holds(walker) for holds in each.preconditions)]
        weights = [CALM.get(each.function.__name__, 1) for each in ready]
        chosen = chance.choices(ready, weights)[0]
        chosen.function(walker, chance=Chance(chance.getrandbits(32)))
        walker.compare()
    assert len(list((walker.folder / "journal").iterdir())) < 6
    walker.teardown()
