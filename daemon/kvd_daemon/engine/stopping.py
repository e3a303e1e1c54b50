"""That this daemon shall end, and what it leaves."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum


class Ending(StrEnum):
    """What becomes of sessions, leases and bytes."""

    STOP = "stop"  # they end with the daemon
    KEEP = "keep"  # they wait for a daemon that a new supervisor starts
    RESTART = "restart"  # they wait for a daemon that this supervisor starts at once

    @property
    def keeps(self) -> bool:
        return self is not Ending.STOP


@dataclass(frozen=True)
class Wanted:
    """How to end. `patience_s`: seconds that leases get to end by themselves."""

    ending: Ending
    patience_s: float = 0.0


class Stopping:
    """The first word decides how it ends; another one means that nothing shall be waited for any longer."""

    def __init__(self) -> None:
        self._first: Wanted | None = None
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    def ask(self, wanted: Wanted) -> None:
        if self._first is None:
            self._first = wanted
            self._asked.set()
        else:
            self._hurried.set()

    async def asked(self) -> Wanted:
        """How it ends, as soon as somebody wants it to."""
        await self._asked.wait()
        assert self._first is not None
        return self._first

    async def hurried(self) -> None:
        """Returns when somebody is impatient."""
        await self._hurried.wait()
