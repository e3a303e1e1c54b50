"""Every policy through a daemon: a GPU's kernels keep the positions and the bytes that the host's keep."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .compressing import CASES
from .workers import Site

Outcomes = dict[str, dict[str, Any]]


def outcomes(site: Site) -> Outcomes:
    command = [
        sys.executable,
        str(Path(__file__).with_name("compressing.py")),
        str(site.kvd.run_dir),
        site.device,
    ]
    ran = subprocess.run(command, env=site.gpus.full_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: Outcomes = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def both(sites: Callable[[str], Site]) -> tuple[Outcomes, Outcomes]:
    return outcomes(sites("cuda")), outcomes(sites("host"))


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_keeps_what_the_host_keeps(both: tuple[Outcomes, Outcomes], case: str) -> None:
    mine, right = both[0][case], both[1][case]
    assert mine["mass"] == pytest.approx(right["mass"], abs=1e-6)
    for what in ("positions", "bytes", "out_of_place"):
        assert mine[what] == right[what]
    assert mine["out_of_place"] == (not case.endswith(("in place", "block")))
