"""Work that goes on whoever stops waiting for it, and whose bugs are found though nobody waits for it."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvd.errors import KvdError

from .health import Health

LOG = logging.getLogger("kvd.engine")


class Background:
    """Of one device."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run `work` to its end whoever stops waiting for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        """Its awaiter has the error, if there still is one; of a bug everybody shall know."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KvdError):
            LOG.error("%s ends with a bug", task, exc_info=error)
            self.health.find(f"a bug ended background work ({error!r}); the daemon's log has the details")
