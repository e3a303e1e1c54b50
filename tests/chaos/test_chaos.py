"""A short run of what `make chaos` does for minutes."""

import json
from pathlib import Path

import pytest

from .report import Outcome
from .run import run

SECONDS = 60.0
SEED = 20261129


@pytest.mark.timeout(280)
def test_nothing_is_lost_leaked_or_owned_twice_whatever_dies(tmp_path: Path) -> None:
    outcome = Outcome(SEED, SECONDS)
    run(tmp_path, outcome, workers=3, crash_loops=5)
    assert outcome.unexcused == [], "\n".join(outcome.lines())
    assert outcome.wrong_bytes == 0
    assert outcome.checked_bytes > 0
    assert outcome.audits > 0
    assert outcome.most_on_disk_bytes > 0
    assert outcome.faults["crash_loop"] == 5
    assert json.loads(json.dumps(outcome.as_dict()))["seed"] == SEED
