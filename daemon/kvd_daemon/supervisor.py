"""Starts one daemon per device, restarts what dies, and ends with all of them.

Imports neither grpc nor numpy: it has nothing to do but wait. Children get SIGKILL from the kernel should
the supervisor die first (PR_SET_PDEATHSIG).
"""

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvd_daemon.channel import Channel, ChannelEndedError, Packet
from kvd_daemon.fd_store import names_file
from kvd_daemon.processes import OPERATOR_MISTAKE as OPERATOR_MISTAKE
from kvd_daemon.settings import Settings

READY_DEADLINE_S = 30.0  # seconds to serve; it takes one, on a loaded machine more
STOP_DEADLINE_S = 1.6  # seconds for daemons to end by themselves; all is over within 2
FIRST_BACKOFF_S = 0.1  # before a dead daemon is started again; doubled each time
MAX_BACKOFF_S = 10.0
STEADY_S = 60.0  # a daemon that lived this long starts over with the first backoff
LOG = logging.getLogger("kvd.supervisor")


@dataclass(eq=False)
class Daemon:
    """A running device daemon."""

    device: str
    process: "subprocess.Popen[bytes]"
    pidfd: int
    channel: Channel
    started: float
    ready: bool = False

    @classmethod
    def start(cls, settings: Settings, device: str) -> "Daemon":
        channel, theirs = Channel.pair()
        kept_fd = names_file({})
        fds = [theirs.fileno(), kept_fd]
        try:
            module = [sys.executable, "-m", "kvd_daemon.main"]
            arguments = [settings.to_json(), device, str(os.getpid()), *map(str, fds)]
            process = subprocess.Popen(module + arguments, pass_fds=fds, stdin=subprocess.DEVNULL)
        finally:
            theirs.close()
            os.close(kept_fd)
        return cls(device, process, os.pidfd_open(process.pid), channel, time.monotonic())

    def close(self) -> None:
        """Kill it if it still runs, and leave nothing."""
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        self.channel.close()


class Supervisor:
    """Runs until SIGTERM, SIGINT, or an operator's mistake."""

    def __init__(self, settings: Settings, announce: Callable[[], None]) -> None:
        """`announce` is called once, when all devices are ready."""
        self._settings = settings
        self._announce = announce
        self._selector = selectors.DefaultSelector()
        self._daemons: dict[str, Daemon] = {}
        self._due: dict[str, float] = {}  # device: when its next daemon starts
        self._backoffs_s: dict[str, float] = {}
        self._announced = False
        self._stopping = False

    def run(self) -> int:
        """The exit status."""
        signals_fd = _signals_as_bytes()
        self._selector.register(signals_fd, selectors.EVENT_READ)
        status = 0
        try:
            for index in range(self._settings.devices):
                self._start(f"host{index}")
            while status == 0 and not self._stopping:
                status = self._step(signals_fd)
            return status
        finally:
            self._stop_all()
            self._selector.close()

    def _step(self, signals_fd: int) -> int:
        """Wait for things to happen; the exit status if they end it, else 0."""
        for key, _ in self._selector.select(self._patience_s()):
            if key.fd == signals_fd:
                self._stopping = True
                continue
            daemon: Daemon = key.data
            if self._daemons.get(daemon.device) is not daemon:
                continue  # forgotten a moment ago
            if key.fd == daemon.pidfd:
                if (status := self._died(daemon)) != 0:
                    return status
            else:
                self._hear(daemon)
        self._announce_when_ready()
        self._do_what_is_due()
        return 0

    def _hear(self, daemon: Daemon) -> None:
        try:
            while (packet := daemon.channel.receive()) is not None:
                packet.close()
                daemon.ready |= packet.kind == "ready"
        except ChannelEndedError:
            self._selector.unregister(daemon.channel)

    def _patience_s(self) -> float | None:
        """Until the next thing is due that no descriptor tells."""
        now = time.monotonic()
        due = list(self._due.values())
        due += [daemon.started + READY_DEADLINE_S for daemon in self._daemons.values() if not daemon.ready]
        return max(0.0, min(due) - now) if due else None

    def _start(self, device: str) -> None:
        daemon = self._daemons[device] = Daemon.start(self._settings, device)
        self._selector.register(daemon.pidfd, selectors.EVENT_READ, daemon)
        self._selector.register(daemon.channel, selectors.EVENT_READ, daemon)

    def _forget(self, daemon: Daemon) -> None:
        self._selector.unregister(daemon.pidfd)
        if daemon.channel in self._selector.get_map():
            self._selector.unregister(daemon.channel)
        del self._daemons[daemon.device]
        daemon.close()

    def _died(self, daemon: Daemon) -> int:
        self._forget(daemon)
        status = daemon.process.returncode
        if not daemon.ready and not self._announced:
            LOG.error("the daemon of %s ended with status %d before it served", daemon.device, status)
            return OPERATOR_MISTAKE if status == OPERATOR_MISTAKE else 1
        backoff_s = self._backoff_s(daemon)
        LOG.error("the daemon of %s ended with status %d; restart in %g s", daemon.device, status, backoff_s)
        self._due[daemon.device] = time.monotonic() + backoff_s
        return 0

    def _backoff_s(self, dead: Daemon) -> float:
        """Longer each time, unless it had run for long."""
        steady = time.monotonic() - dead.started > STEADY_S
        backoff_s = FIRST_BACKOFF_S if steady else self._backoffs_s.get(dead.device, FIRST_BACKOFF_S)
        self._backoffs_s[dead.device] = min(2 * backoff_s, MAX_BACKOFF_S)
        return backoff_s

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for device in [device for device, when in self._due.items() if when <= now]:
            del self._due[device]
            self._start(device)
        for daemon in self._daemons.values():
            if not daemon.ready and now > daemon.started + READY_DEADLINE_S:
                LOG.error("the daemon of %s does not get ready; it is killed", daemon.device)
                daemon.process.kill()

    def _announce_when_ready(self) -> None:
        everyone = len(self._daemons) == self._settings.devices
        if not self._announced and everyone and all(daemon.ready for daemon in self._daemons.values()):
            self._announced = True
            self._announce()

    def _stop_all(self) -> None:
        deadline = time.monotonic() + STOP_DEADLINE_S
        for daemon in self._daemons.values():
            daemon.channel.send(Packet("stop", {"keep": False, "patience_s": 0.0}))
        for daemon in list(self._daemons.values()):
            try:
                daemon.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                LOG.warning("the daemon of %s does not stop; it is killed", daemon.device)
            self._forget(daemon)


def _signals_as_bytes() -> int:
    """A descriptor that becomes readable when SIGTERM or SIGINT arrives."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_fd)
    return read_fd
