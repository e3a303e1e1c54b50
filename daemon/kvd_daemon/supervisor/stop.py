"""The end: every daemon is told, gets its time, and nothing of it stays behind."""

import logging
import selectors
import shutil
import signal
import time
from collections.abc import Iterable

from kvd.errors import InvalidArgumentError
from kvd_daemon.channel import ChannelEndedError, Packet
from kvd_daemon.run_dir import JOURNAL_FOLDER, DeviceDir

from .child import wait_for_orphans
from .daemon import Daemon
from .signals import Signals
from .systemd import Systemd
from .watch import Watch

STOP_DEADLINE_S = 1.6  # seconds for daemons to end by themselves; all is over within 2
KEEP_DEADLINE_S = 5.0  # the same where they leave everything for later: a job in work may end
SPARE_S = 2.0  # seconds that systemd is asked for beyond all patience
LOG = logging.getLogger("kvd.supervisor")


def stop_all(watches: Iterable[Watch], signals: Signals, systemd: Systemd, patience_s: float) -> None:
    """Leases get `patience_s` seconds to end, or until a second signal arrives."""
    systemd.stopping(patience_s + KEEP_DEADLINE_S + SPARE_S)
    stop = _Stop(watches, signals, keep=systemd.keeps_fds)
    stop.tell(patience_s)
    stop.wait()
    if not systemd.keeps_fds:  # else owners of GPU memory stay as well
        wait_for_orphans()
    stop.leave_nothing()


class _Stop:
    def __init__(self, watches: Iterable[Watch], signals: Signals, keep: bool) -> None:
        self._watches = list(watches)
        self._running = {watch.daemon: watch for watch in self._watches if watch.daemon}
        self._signals = signals
        self._keep = keep
        self._deadline_s = 0.0
        self._hurried = False
        self._selector = selectors.DefaultSelector()

    def tell(self, patience_s: float) -> None:
        """A second time it means: at once."""
        for watch in self._running.values():
            watch.tell(Packet("stop", {"keep": self._keep, "patience_s": patience_s}))
        own_s = KEEP_DEADLINE_S if self._keep else STOP_DEADLINE_S
        self._deadline_s = time.monotonic() + patience_s + own_s

    def wait(self) -> None:
        """Until all have ended; whoever is late is killed."""
        self._selector.register(self._signals, selectors.EVENT_READ)
        for daemon in self._running:
            self._selector.register(daemon.child.pidfd, selectors.EVENT_READ, daemon)
            self._selector.register(daemon.channel, selectors.EVENT_READ, daemon)
        while self._running:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                self._kill()
            for key, _ in self._selector.select(max(0.0, left_s) if left_s > 0 else None):
                self._handle(key)
        self._selector.close()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._signals:
            self._hurry()
        elif (watch := self._running.get(key.data)) is None:
            return  # buried a moment ago
        elif key.fd == key.data.child.pidfd:
            self._bury(key.data, watch)
        else:
            self._hear(key.data, watch)

    def _hurry(self) -> None:
        impatient = any(number in (signal.SIGTERM, signal.SIGINT) for number in self._signals.arrived())
        if impatient and not self._hurried:
            self._hurried = True
            LOG.info("a second signal: leases are not waited for any longer")
            self.tell(0.0)

    def _hear(self, daemon: Daemon, watch: Watch) -> None:
        try:
            watch.hear()
        except ChannelEndedError:
            self._selector.unregister(daemon.channel)

    def _bury(self, daemon: Daemon, watch: Watch) -> None:
        self._selector.unregister(daemon.child.pidfd)
        if daemon.channel in self._selector.get_map():
            self._selector.unregister(daemon.channel)
        del self._running[daemon]
        watch.bury()

    def _kill(self) -> None:
        for daemon in self._running:
            LOG.warning("the daemon of %s does not stop; it is killed", daemon.device)
            daemon.child.kill()

    def leave_nothing(self) -> None:
        """What a daemon removes itself, unless it was killed."""
        for watch in self._watches:
            if watch.left_files:
                self._clean_up(watch)
            watch.clear()

    def _clean_up(self, watch: Watch) -> None:
        if not watch.folder.exists():
            return
        try:
            folder = DeviceDir(watch.folder.parent, watch.device)
        except InvalidArgumentError as error:
            LOG.warning("%s is left as it is: %s", watch.folder, error)
            return
        if not self._keep:
            shutil.rmtree(folder.path / JOURNAL_FOLDER, ignore_errors=True)
        folder.close()
