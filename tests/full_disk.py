"""A full disk: /dev/full takes whatever is written with "No space left on device"."""

import os
import subprocess
import sys
from pathlib import Path

from tests.running_kvd import PATIENCE_S

FULL = Path("/dev/full")  # whatever is written there finds no space


def run(module: str, *arguments: object, full: str, unbuffered: str) -> "subprocess.CompletedProcess[str]":
    """The command, with its stdout or its stderr on a full disk."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = f"import sys; from {module} import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with FULL.open("w") as disk:
        return subprocess.run(
            command, text=True, timeout=PATIENCE_S, env=environment, **streams | {full: disk}, check=False
        )
