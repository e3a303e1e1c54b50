"""One device: the daemon that runs, or when the next one starts; and a file that says so while none does."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvd.run_dir import DOWN_FILE
from kvd_daemon.channel import Packet
from kvd_daemon.processes import OPERATOR_MISTAKE, RESTART_WANTED
from kvd_daemon.settings import Settings

from .daemon import Daemon
from .kept import Kept

FIRST_BACKOFF_S = 0.1  # before a dead daemon is started again; doubled each time
MAX_BACKOFF_S = 10.0  # for one that never serves: each attempt costs half a second of a core
MAX_SERVED_BACKOFF_S = 0.5  # after one that did serve: its workers wait, and two seconds are promised them
STEADY_S = 60.0  # a daemon that lived this long starts over with the first backoff
RESTART_DEADLINE_S = 5.0  # seconds to leave everything in order; past them it is killed, which loses nothing
LOG = logging.getLogger("kvd.supervisor")


class Watch:
    """`daemon` is None between two of them; `due_s` is when the next one starts.

    `left_files`: the last daemon ended without removing what it had in its folder. `device_failed`: it could
    not use its GPU, and no other one could since.
    """

    def __init__(self, device: str, folder: Path, kept: Kept) -> None:
        self.device = device
        self.daemon: Daemon | None = None
        self.due_s: float | None = None
        self.folder = folder
        self._down = folder / DOWN_FILE
        self._kept = kept
        self._backoff_s = FIRST_BACKOFF_S
        self._restart_by_s: float | None = None
        self._condemned = False
        self._lived_s, self._served = 0.0, False
        self.left_files = False
        self.device_failed = False

    def start(self, settings: Settings, when: str) -> Daemon:
        """As Daemon.start. Raises OSError if the system refuses a process."""
        self.due_s = None
        self.daemon = Daemon.start(settings, self.device, self._kept.of(self.device), when)
        return self.daemon

    def hear(self) -> None:
        """Raises ChannelEndedError."""
        assert self.daemon is not None
        was_ready = self.daemon.ready
        self.daemon.hear(self._keep)
        if self.daemon.ready and not was_ready:
            self.device_failed = False
            self._down.unlink(missing_ok=True)

    def _keep(self, packet: Packet) -> None:
        if packet.kind == "put":
            self._kept.put(self.device, packet)
        else:
            packet.close()
            self._kept.drop(self.device, str(packet.fields["name"]))

    def bury(self) -> int:
        """Of a daemon that has exited: its last words are heard. Its exit status."""
        assert self.daemon is not None
        daemon, self.daemon = self.daemon, None
        self._restart_by_s, self._condemned = None, False
        status = daemon.child.reap()
        daemon.hear_to_the_end(self._keep)
        daemon.close()
        self._lived_s, self._served = time.monotonic() - daemon.started_s, daemon.ready
        self.left_files = status not in (0, OPERATOR_MISTAKE)
        return status

    def start_another(self, status: int) -> None:
        """After `bury`: at once, or when it has paused, the longer the more often that happens."""
        now_s = time.monotonic()
        if status == RESTART_WANTED:
            self.due_s = now_s
            LOG.info("the daemon of %s makes room for the next one", self.device)
            return
        backoff_s = FIRST_BACKOFF_S if self._lived_s > STEADY_S else self._backoff_s
        self._backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        if self._served:
            backoff_s = min(backoff_s, MAX_SERVED_BACKOFF_S)
        self.due_s = now_s + backoff_s
        self._say_down(f"its daemon ended with status {status}; kvd starts another one every {backoff_s:g} s")

    def refused(self, error: OSError) -> None:
        """The system gave no process: again later."""
        self._say_down(f"no process for its daemon: {error.strerror}; kvd tries again")
        self.due_s = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _say_down(self, text: str) -> None:
        """For kvctl, which finds nobody to ask."""
        LOG.error("%s is down: %s", self.device, text)
        new = self._down.with_name(f"{DOWN_FILE}.new")
        with contextlib.suppress(OSError):  # a full disk, a removed folder: the log has it
            new.write_text(text)
            os.replace(new, self._down)

    def restart(self) -> None:
        """Have the daemon make room for another one, which starts when it has."""
        if self.daemon is not None:
            self.daemon.channel.send(Packet("restart"))
            self._restart_by_s = time.monotonic() + RESTART_DEADLINE_S

    def tell(self, packet: Packet) -> None:
        """The daemon, if there is one."""
        if self.daemon is not None:
            self.daemon.channel.send(packet)

    def is_due(self, now_s: float) -> bool:
        return self.due_s is not None and self.due_s <= now_s

    def judge(self, now_s: float) -> None:
        """Kills a daemon that hangs or is beyond repair: the next one finds everything it had."""
        if self.daemon is None or self._condemned:
            return
        reason = self.daemon.hopeless(now_s)
        if self._restart_by_s is not None and now_s > self._restart_by_s:
            reason = "does not make room"
        if reason:
            LOG.error("the daemon of %s %s; it is killed", self.device, reason)
            self._condemned = True
            self.daemon.child.kill()

    def healthy(self, now_s: float) -> bool:
        return self.daemon is not None and self.daemon.healthy(now_s)

    def summary(self, now_s: float) -> str:
        """For people."""
        return f"{self.device} {self.daemon.summary(now_s) if self.daemon else 'down'}"

    def events(self, now_s: float) -> Iterator[float]:
        """Moments at which time alone changes something."""
        if self.due_s is not None:
            yield self.due_s
        if self.daemon is not None and not self._condemned:
            yield from self.daemon.events(now_s)
            if self._restart_by_s is not None:
                yield self._restart_by_s

    def clear(self) -> None:
        """Nobody watches any more."""
        self._down.unlink(missing_ok=True)
        self._down.with_name(f"{DOWN_FILE}.new").unlink(missing_ok=True)
