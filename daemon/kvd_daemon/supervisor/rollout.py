"""Daemons are replaced one after another; the first new one that fails ends it."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping

from .daemon import Daemon
from .watch import Watch

LOG = logging.getLogger("kvd.rollout")


class Rollout:
    """`advance` is called after anything happened."""

    def __init__(self, watches: Mapping[str, Watch]) -> None:
        self._watches = watches
        self._waiting: deque[str] = deque()
        self._device = ""  # whose daemon is being replaced
        self._old: Daemon | None = None
        self._new: Daemon | None = None

    @property
    def under_way(self) -> bool:
        return bool(self._waiting or self._device)

    def begin(self, devices: Iterable[str]) -> None:
        self._waiting.extend(devices)

    def advance(self) -> None:
        if self._device:
            self._look()
        if not self._device and self._waiting:
            self._device = self._waiting.popleft()
            watch = self._watches[self._device]
            self._old, self._new = watch.daemon, None
            watch.restart()

    def _look(self) -> None:
        now = self._watches[self._device].daemon
        if self._new is None and now is not None and now is not self._old:
            self._new = now
        if self._new is None:
            return  # the old one still makes room
        if self._new.ready:
            LOG.info("the daemon of %s is replaced", self._device)
            self._device = ""
        elif now is not self._new:
            LOG.error("the new daemon of %s does not serve; the others stay as they are", self._device)
            self._waiting.clear()
            self._device = ""
