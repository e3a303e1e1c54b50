"""A kvd that was started without stdout or stderr (`kvd >&- 2>&-`)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from tests.running_kvd import PATIENCE_S, eventually


def test_no_file_gets_the_number_of_a_stream_that_was_closed(tmp_path: Path) -> None:
    kvd = [
        sys.executable,
        "-m",
        "kvd_daemon.cli",
        "--run-dir",
        str(tmp_path / "run"),
        "--host-memory",
        "64MiB",
    ]
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *kvd])
    try:
        eventually((tmp_path / "run/host0/grpc.sock").exists, "a daemon that serves")
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        streams = {os.readlink(f"/proc/{pid}/fd/{number}") for pid in family for number in range(3)}
        assert streams == {os.devnull}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
