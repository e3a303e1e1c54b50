"""The disk worker and the file on disk of a running kvd."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
from tests.running_kvd import RunningKvd, command_of, eventually, running_kvd


def started(folder: Path, host_tier: str, disk_tier: str) -> Iterator[RunningKvd]:
    """A kvd with both tiers, which leaves nothing on disk."""
    (folder / "spill").mkdir()
    tiers = ("--host-tier", host_tier, "--spill-dir", str(folder / "spill"), "--spill-size", disk_tier)
    with running_kvd(folder, *tiers) as running:
        yield running
    assert list((folder / "spill").iterdir()) == [], "nothing is left on disk"


def disk_worker(kvd: RunningKvd) -> psutil.Process:
    found: list[psutil.Process] = []

    def look() -> bool:
        children = psutil.Process(kvd.daemon_pid()).children()
        found[:] = [child for child in children if "kvd_daemon.kernel.disk_worker" in command_of(child)]
        return bool(found)

    eventually(look, "a disk worker")
    return found[0]


def disk_file(kvd: RunningKvd) -> Path:
    return next(fd for fd in slot_files(kvd) if "/spill/kvd-" in os.readlink(fd))


def slot_files(kvd: RunningKvd) -> list[Path]:
    """Those that its daemon has open, of both tiers."""
    found = []
    for fd in Path(f"/proc/{kvd.daemon_pid()}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "kvd-tier." in os.readlink(fd) or "/spill/kvd-" in os.readlink(fd):
                found.append(fd)
    return found


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[psutil.Process]:
    """The daemon takes one that is stopped over a job for longer than two seconds to hang, and kills it."""
    process.suspend()
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def kill(process: psutil.Process) -> None:
    """Unless the daemon has, as of `stopped`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
