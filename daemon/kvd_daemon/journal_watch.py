"""A journal that somebody deletes under a running daemon is written again; where it cannot be, health is red.

Nobody would notice before the daemon's death, and then everything would be lost.
"""

import asyncio

from kvd_daemon.engine.health import Health
from kvd_daemon.journal import Journal

LOOK_EVERY_S = 1.0  # seconds; a look costs three calls of stat


async def watch_journal(journal: Journal, health: Health) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        health.found_of("journal", journal.look())
