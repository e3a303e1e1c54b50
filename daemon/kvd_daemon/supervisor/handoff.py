"""The supervisor executes new code in its place: same process, same children, same descriptors.

What the new code must know lies in a memory file that it inherits. First it is asked whether it can start and
read that (`kvd --check-config`): code that cannot never takes over.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvd.errors import InvalidArgumentError
from kvd_daemon.channel import Channel
from kvd_daemon.settings import Settings

from .child import Child
from .daemon import Daemon
from .signals import Signals

FORMAT = 1  # of the file; a version that does not know it refuses, and the old one stays
VARIABLE = "KVD_HANDOFF"
CHECK_PATIENCE_S = 30.0  # seconds for the new code to start; it takes less than one
MAX_FILE_BYTES = 64 << 20  # bytes; names of all descriptors of all devices are far below
LOG = logging.getLogger("kvd.handoff")


@dataclass(frozen=True)
class Handoff:
    """What one supervisor leaves to the next. Descriptors are open in both."""

    pid: int
    settings: Settings
    daemons: tuple[Daemon, ...]
    kept: Mapping[str, Mapping[str, int]]
    claims: Mapping[str, int]

    def fds(self) -> Iterator[int]:
        """All that the new code inherits."""
        for daemon in self.daemons:
            yield daemon.child.pidfd
            yield daemon.channel.fileno()
        for fds in self.kept.values():
            yield from fds.values()
        yield from self.claims.values()

    def file(self) -> int:
        """A memory file that says all of it."""
        content = {
            "format": FORMAT,
            "pid": self.pid,
            "settings": self.settings.to_json(),
            "daemons": [_daemon_to_dict(daemon) for daemon in self.daemons],
            "kept": self.kept,
            "claims": self.claims,
        }
        fd = os.memfd_create("kvd-handoff", os.MFD_CLOEXEC)
        os.write(fd, json.dumps(content).encode())
        return fd


def _daemon_to_dict(daemon: Daemon) -> dict[str, object]:
    return {
        "device": daemon.device,
        "pid": daemon.child.pid,
        "pidfd": daemon.child.pidfd,
        "channel": daemon.channel.fileno(),
        "started_s": daemon.started_s,
        "ready": daemon.ready,
    }


def _content(fd: int) -> dict[str, Any]:
    """Raises InvalidArgumentError on a file that this version does not understand."""
    content: dict[str, Any] = json.loads(os.pread(fd, MAX_FILE_BYTES, 0))
    if content["format"] != FORMAT:
        raise InvalidArgumentError(
            f"the running kvd hands over in format {content['format']}, this version reads {FORMAT}; "
            "stop it and start this one"
        )
    return content


def check(fd: int) -> Settings:
    """Those of the kvd that this version could replace. Raises InvalidArgumentError if it could not."""
    return Settings.from_json(_content(fd)["settings"])


def taken(fd: int) -> Handoff:
    """In the new code: everything it inherits. Closes `fd`."""
    content = _content(fd)
    os.close(fd)
    assert content["pid"] == os.getpid(), "handed over by this very process"
    daemons = tuple(_daemon_of(entry) for entry in content["daemons"])
    settings, kept = Settings.from_json(content["settings"]), content["kept"]
    return Handoff(content["pid"], settings, daemons, kept, content.get("claims", {}))


def _daemon_of(entry: Mapping[str, Any]) -> Daemon:
    child, channel = Child(entry["pid"], entry["pidfd"]), Channel.of(entry["channel"])
    started_s, ready = entry["started_s"], entry["ready"]
    return Daemon(entry["device"], child, channel, started_s, ready, heard_s=time.monotonic())


def _command() -> list[str]:
    """How this process was started; what is installed under these names now is the new code."""
    return [sys.executable, *sys.orig_argv[1:]]


def upgrade(handoff: Handoff, signals: Signals) -> None:
    """Become the new code; returns only if that is not possible, with everything as it was."""
    LOG.info("asking the new code whether it can take over")
    if problem := _refusal(handoff):
        LOG.error("the new code cannot take over, nothing is changed: %s", problem)
        return
    try:
        _execute(handoff, signals)
    except OSError as error:
        LOG.error("the new code cannot be executed, nothing is changed: %s", error.strerror)


def _refusal(handoff: Handoff) -> str:
    """Why the new code cannot take over; empty if it can."""
    fd = handoff.file()
    try:
        tried = subprocess.run(
            [*_command(), "--check-config"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_PATIENCE_S,
            env=os.environ | {VARIABLE: str(fd)},
            pass_fds=[fd],
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        os.close(fd)
    return "" if tried.returncode == 0 else f"exit status {tried.returncode}: {tried.stderr.strip()[-1000:]}"


def _execute(handoff: Handoff, signals: Signals) -> NoReturn:
    """Become the new code. Raises OSError if that fails, with everything as it was."""
    file_fd = handoff.file()
    inherited = (file_fd, *handoff.fds())
    signals.hold_back()
    try:
        for fd in inherited:
            os.set_inheritable(fd, True)
        command = _command()
        os.execve(command[0], command, os.environ | {VARIABLE: str(file_fd)})
    finally:  # only reached if it failed
        for fd in inherited:
            os.set_inheritable(fd, False)
        os.close(file_fd)
        signals.let_through()
