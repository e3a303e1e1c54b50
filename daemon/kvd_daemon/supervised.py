"""The daemon's half of its supervision: it says how it is, and hears what it shall do.

To the supervisor: `put`, `drop` (see fd_store), `ready`, `health`. From it: `stop`, `restart`, `settings`.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

from kvd_daemon.channel import Channel, ChannelEndedError, Packet
from kvd_daemon.engine.engine import Engine
from kvd_daemon.engine.stopping import Ending, Wanted
from kvd_daemon.settings import Settings

HEALTH_INTERVAL_S = 1.0  # seconds between two reports; five of them missing mean that it hangs
MAX_DETAIL_CHARS = 500  # characters of a report; some lines of words, and the packet stays small
MAX_UNREAD_BYTES = 64 << 10  # of what the supervisor has not read: room is left for descriptors
LOG = logging.getLogger("kvd.supervised")


class Supervised:
    """A daemon that `kvd` started."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._heard: dict[str, Callable[[Packet], None]] = {
            "stop": self._stop,
            "restart": lambda _: engine.stopping.ask(Wanted(Ending.RESTART)),
            "settings": lambda packet: engine.reload(Settings.from_json(packet.fields["settings"])),
        }

    def ready(self) -> None:
        """It serves from now on."""
        self._channel.send(Packet("ready"))
        self._report()
        self._engine.health.listen(self._report)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear())
            group.create_task(self._report_often())

    async def _report_often(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _report(self) -> None:
        health = self._engine.health
        if self._channel.unread_bytes() < MAX_UNREAD_BYTES:
            fields = {"state": health.state.value, "detail": health.detail[:MAX_DETAIL_CHARS]}
            self._channel.send(Packet("health", fields))

    async def _hear(self) -> None:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._channel, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                while (packet := self._channel.receive()) is not None:
                    self._obey(packet)
        except ChannelEndedError:
            LOG.warning("the supervisor has left")  # and this process is killed in a moment
        finally:
            loop.remove_reader(self._channel)

    def _obey(self, packet: Packet) -> None:
        packet.close()
        obey = self._heard.get(packet.kind)
        if obey is None:
            LOG.warning("the supervisor says %r, which this version does not know", packet.kind)
        else:
            obey(packet)

    def _stop(self, packet: Packet) -> None:
        ending = Ending.KEEP if packet.fields["keep"] else Ending.STOP
        self._engine.stopping.ask(Wanted(ending, packet.fields["patience_s"]))


def obey_signals(engine: Engine, patience_s: float) -> None:
    """SIGTERM and SIGINT to this process. Under a supervisor it is that one's signals that end a service."""
    on_signal = Wanted(Ending.RESTART) if engine.descriptors.survives else Wanted(Ending.STOP, patience_s)
    loop: Any = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, engine.stopping.ask, on_signal)
