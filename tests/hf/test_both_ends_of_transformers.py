"""All that is tested here holds for the oldest and for the newest release that kvd says it works with."""

import os
import subprocess
from pathlib import Path

from .other_release import OTHER, python_with_other_release

HERE = Path(__file__)


def test_everything_here_holds_under_the_other_release_too():
    python = python_with_other_release()
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(HERE.parent),
    ]
    command += ["--ignore", str(HERE), "--rootdir", str(HERE.parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, f"transformers {OTHER}:\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def _environment() -> dict[str, str]:
    """This process's, less what a parallel pytest told it about itself."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
