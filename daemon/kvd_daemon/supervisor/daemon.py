"""A running daemon as its supervisor sees it: the process, the channel to it, and how it says it is."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvd_daemon.channel import Channel, ChannelEndedError, Packet
from kvd_daemon.fd_store import names_file
from kvd_daemon.settings import Settings

from .child import Child
from .patience import Patience

READY_DEADLINE_S = 30.0  # seconds to serve, without those that it waits for a core; it takes one
SILENCE_S = 5.0  # seconds without a report, of which there is one a second, that make it unhealthy
UNHEALTHY_S = 60.0  # seconds of ill health, counted like that, after which another one takes its place
LOOK_S = 1.0  # between two looks at one that is not well
MAX_PACKETS = 1000  # read at a time; then it is others' turn
FAILING = "failing"


@dataclass(eq=False)
class Daemon:
    """Of one device. Times are of the monotonic clock, which is the same in all processes."""

    device: str
    child: Child
    channel: Channel
    started_s: float
    ready: bool = False
    state: str = "starting"
    detail: str = ""
    heard_s: float = 0.0
    patience: Patience = field(init=False)

    def __post_init__(self) -> None:
        self.patience = Patience(self.child.pid, time.monotonic())

    @classmethod
    def start(cls, settings: Settings, device: str, kept: Mapping[str, int], when: str) -> "Daemon":
        """It inherits what the device's last daemon had put. `when` is FIRST or FOLLOWS. Raises OSError."""
        channel, theirs = Channel.pair()
        kept_fd = names_file(dict(kept))
        own = (theirs.fileno(), kept_fd)
        try:
            arguments = [settings.to_json(), device, str(os.getpid()), *map(str, own), when]
            child = Child.start("kvd_daemon.main", arguments, (*own, *kept.values()))
        except OSError:
            channel.close()
            raise
        finally:
            theirs.close()
            os.close(kept_fd)
        return cls(device, child, channel, time.monotonic())

    def hear(self, kept: Callable[[Packet], None]) -> bool:
        """What it has said; `kept` gets what is about descriptors. Whether there may be more.

        Raises ChannelEndedError.
        """
        for _ in range(MAX_PACKETS):
            packet = self.channel.receive()
            if packet is None:
                return False
            if packet.kind in ("put", "drop"):
                kept(packet)
            else:
                packet.close()
                self._note(packet)
        return True

    def hear_to_the_end(self, kept: Callable[[Packet], None]) -> None:
        """Of one that has exited: what it put before its end is kept."""
        with contextlib.suppress(ChannelEndedError):
            while self.hear(kept):
                pass

    def _note(self, packet: Packet) -> None:
        now = time.monotonic()
        if packet.kind == "ready":
            self.ready, self.heard_s = True, now
        elif packet.kind == "health":
            self.state, self.detail = str(packet.fields["state"]), str(packet.fields["detail"])
            self.heard_s = now

    def silent(self, now_s: float) -> bool:
        return self.ready and now_s - self.heard_s > SILENCE_S

    def healthy(self, now_s: float) -> bool:
        return self.ready and self.state != FAILING and not self.silent(now_s)

    def hopeless(self, now_s: float) -> str:
        """Why another one should take its place; empty if it should not. Ask at every one of `events`."""
        if self.healthy(now_s):
            self.patience.begin_anew(now_s)
            return ""
        unwell_s = self.patience.look(now_s)
        if not self.ready:
            return "does not get ready" if unwell_s > READY_DEADLINE_S else ""
        if unwell_s <= UNHEALTHY_S:
            return ""
        if self.silent(now_s):
            return f"has not been heard of for {now_s - self.heard_s:.0f} s"
        return f"is unwell: {self.detail}"

    def events(self, now_s: float) -> Iterator[float]:
        """Moments at which time alone changes something."""
        yield self.heard_s + SILENCE_S if self.healthy(now_s) else now_s + LOOK_S

    def summary(self, now_s: float) -> str:
        if not self.ready:
            return "starting"
        if self.silent(now_s):
            return "silent"
        return f"{self.state}: {self.detail}" if self.detail else self.state

    def close(self) -> None:
        """Of one that was reaped."""
        self.child.close()
        self.channel.close()
