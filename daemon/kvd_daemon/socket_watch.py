"""Sockets that somebody deletes under a running daemon (a cleaner of /tmp, an rm too many) are bound again.

Without them nobody new can come in, and who is connected would not notice. If the whole folder was removed,
or is another kvd's by now, this one leaves it alone and turns red: what it holds can still be used.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from kvd.errors import InvalidArgumentError
from kvd_daemon.engine.health import Health
from kvd_daemon.run_dir import DeviceDir

LOOK_EVERY_S = 1.0  # seconds; a look costs three calls of stat
LOG = logging.getLogger("kvd.sockets")


async def watch_sockets(
    folder: DeviceDir, health: Health, doors: Mapping[Path, Callable[[], Awaitable[None]]]
) -> None:
    """Until cancelled. `doors` binds each socket of `folder` again and publishes it."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        trouble = ""
        for path, bind_again in doors.items():
            if not folder.has(path):
                trouble = await _again(folder, path, bind_again)
        health.found_of("sockets", trouble)


async def _again(folder: DeviceDir, path: Path, bind_again: Callable[[], Awaitable[None]]) -> str:
    """What is wrong, or nothing if it is bound again."""
    if not folder.is_ours:
        return (
            f"{folder.path} was removed, or another kvd serves there: nobody can connect any more, workers "
            f"that are connected go on; restart this kvd (pid {os.getppid()}) when they are done"
        )
    LOG.warning("somebody deleted %s; it is bound again", path)
    try:
        await bind_again()
    except InvalidArgumentError as error:
        return str(error)
    return ""
