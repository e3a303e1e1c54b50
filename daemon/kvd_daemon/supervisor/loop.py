"""The supervisor's loop: one selector over signals, processes and channels, and the clock."""

import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import InvalidArgumentError
from kvd_daemon.channel import ChannelEndedError, Packet
from kvd_daemon.processes import DEVICE_FAILED, FIRST, FOLLOWS, OPERATOR_MISTAKE
from kvd_daemon.settings import FIXED, LATER, Settings

from .child import adopt_orphans, reap_orphans
from .claims import Claims
from .daemon import Daemon
from .handoff import Handoff
from .kept import Kept
from .rollout import Rollout
from .signals import Signals
from .stop import stop_all
from .systemd import Systemd
from .watch import Watch

MAX_WAIT_S = 3600.0  # seconds; a selector takes no infinity
LOG = logging.getLogger("kvd.supervisor")


@dataclass(frozen=True)
class Operator:
    """What the command line gives the loop.

    `announce` is called once, with the names of those that serve, when that is all but GPUs that fail.
    `reread` gives the settings as they are written now, or raises InvalidArgumentError if a daemon could not
    start with them in place of the running ones. `upgrade` becomes new code, and returns only if that failed.
    """

    announce: Callable[[Collection[str]], None]
    reread: Callable[[Settings], Settings]
    upgrade: Callable[[Handoff, Signals], None]


class Supervisor:
    """Runs until SIGTERM, SIGINT, or an operator's mistake."""

    def __init__(
        self, settings: Settings, operator: Operator, systemd: Systemd, kept: Kept, claims: Claims
    ) -> None:
        self._settings = settings
        self._claims = claims
        self._operator = operator
        self._systemd = systemd
        self._kept = kept
        run_dir = Path(settings.run_dir)
        self._watches = {name: Watch(name, run_dir / name, kept) for name in settings.device_names}
        self._rollout = Rollout(self._watches)
        self._signals = Signals()
        self._selector = selectors.DefaultSelector()
        self._announced = False
        self._stopping = False
        self._alive_due_s = 0.0

    def take_over(self, daemons: tuple[Daemon, ...]) -> None:
        """Before `run`: what the code before this one started. One after another is replaced."""
        self._announced = True
        for daemon in daemons:
            self._watches[daemon.device].daemon = daemon
            self._watch(daemon)
        self._rollout.begin(daemon.device for daemon in daemons)

    def run(self) -> int:
        """The exit status."""
        self._selector.register(self._signals, selectors.EVENT_READ)
        adopt_orphans()
        self._kept.drop_all_but(self._watches)
        self._start_missing()
        status = 0
        try:
            self._do_what_is_due()
            while status == 0 and not self._stopping:
                status = self._step()
            return status
        finally:
            patience_s = 0.0 if status else self._settings.drain_timeout_ns / 1e9
            stop_all(self._watches.values(), self._signals, self._systemd, patience_s)
            self._claims.release()
            self._selector.close()
            self._signals.close()

    def _start_missing(self) -> None:
        for watch in self._watches.values():
            if watch.daemon is None:
                self._start(watch)

    def _start(self, watch: Watch) -> None:
        try:
            self._watch(watch.start(self._settings, FOLLOWS if self._announced else FIRST))
        except OSError as error:
            watch.refused(error)

    def _watch(self, daemon: Daemon) -> None:
        self._selector.register(daemon.child.pidfd, selectors.EVENT_READ, daemon)
        self._selector.register(daemon.channel, selectors.EVENT_READ, daemon)

    def _step(self) -> int:
        """Wait for things to happen; the exit status if they end it, else 0."""
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is self._signals:
                for number in self._signals.arrived():
                    self._obey(number)
                continue
            daemon: Daemon = key.data
            watch = self._watches[daemon.device]
            if watch.daemon is not daemon:
                continue  # buried a moment ago
            if key.fd != daemon.child.pidfd:
                self._hear(watch, daemon)
            elif (status := self._bury(watch, daemon)) != 0:
                return status
        self._do_what_is_due()
        return 0

    def _patience_s(self) -> float:
        """Until the next thing is due that no descriptor tells."""
        now_s = time.monotonic()
        moments = [moment for watch in self._watches.values() for moment in watch.events(now_s)]
        if self._systemd.watchdog_s and self._alive_due_s > now_s:  # else health is waited for
            moments.append(self._alive_due_s)
        return max(0.0, min(moments, default=now_s + MAX_WAIT_S) - now_s)

    def _hear(self, watch: Watch, daemon: Daemon) -> None:
        try:
            watch.hear()
        except ChannelEndedError:
            self._selector.unregister(daemon.channel)  # its process is about to follow

    def _bury(self, watch: Watch, daemon: Daemon) -> int:
        self._selector.unregister(daemon.child.pidfd)
        if daemon.channel in self._selector.get_map():
            self._selector.unregister(daemon.channel)
        status = watch.bury()
        watch.device_failed = status == DEVICE_FAILED
        others = any(not other.device_failed for other in self._watches.values())
        if not daemon.ready and not self._announced and not (watch.device_failed and others):
            LOG.error("the daemon of %s ended with status %d before it served", daemon.device, status)
            return OPERATOR_MISTAKE if status in (OPERATOR_MISTAKE, DEVICE_FAILED) else 1
        watch.start_another(status)
        return 0

    def _do_what_is_due(self) -> None:
        now_s = time.monotonic()
        for watch in self._watches.values():
            if watch.is_due(now_s):
                self._start(watch)
            watch.judge(now_s)
        self._rollout.advance()
        self._tell_systemd(now_s)
        reap_orphans({watch.daemon.child.pid for watch in self._watches.values() if watch.daemon})

    def _tell_systemd(self, now_s: float) -> None:
        watches = self._watches.values()
        serving = {watch.device for watch in watches if watch.daemon and watch.daemon.ready}
        if not self._announced and all(watch.device_failed or watch.device in serving for watch in watches):
            self._announced = True
            self._operator.announce(serving)
            self._systemd.ready()
        healthy = all(watch.healthy(now_s) for watch in watches)
        self._systemd.status(", ".join(watch.summary(now_s) for watch in watches))
        if self._systemd.watchdog_s and healthy and now_s >= self._alive_due_s:
            self._systemd.alive()
            self._alive_due_s = now_s + self._systemd.watchdog_s

    def _obey(self, number: signal.Signals) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stopping = True
        elif number == signal.SIGHUP:
            self._reload()
        elif reason := self._no_upgrade():
            LOG.warning("SIGUSR2 is passed over: %s", reason)
        else:
            self._upgrade()

    def _no_upgrade(self) -> str:
        """Why new code does not take over now: it would not know of it. Empty if it may."""
        if self._stopping:
            return "kvd stops"
        if not self._announced:
            return "not everything serves yet"
        return "daemons are being replaced already" if self._rollout.under_way else ""

    def _reload(self) -> None:
        self._systemd.reloading()
        try:
            settings = self._operator.reread(self._settings)
        except InvalidArgumentError as error:
            LOG.error("SIGHUP: nothing is changed, the settings are bad: %s", error)
        else:
            self._tell_what_waits(settings)
            self._settings = self._settings.reloaded(settings)
            for watch in self._watches.values():
                watch.tell(Packet("settings", {"settings": self._settings.to_json()}))
            LOG.info("SIGHUP: the settings were read again")
            logging.getLogger().setLevel(self._settings.log_level.upper())
        if self._announced:
            self._systemd.ready()

    def _tell_what_waits(self, written: Settings) -> None:
        if fixed := self._settings.differing(written, FIXED):
            LOG.warning("SIGHUP: %s cannot change while kvd runs; it takes another kvd", ", ".join(fixed))
        if later := self._settings.differing(written, LATER):
            LOG.warning("SIGHUP: %s: for daemons that start later (kvctl daemon restart)", ", ".join(later))

    def _upgrade(self) -> None:
        daemons = tuple(watch.daemon for watch in self._watches.values() if watch.daemon)
        kept = {device: self._kept.of(device) for device in self._watches}
        handoff = Handoff(os.getpid(), self._settings, daemons, kept, self._claims.fds)
        self._operator.upgrade(handoff, self._signals)
