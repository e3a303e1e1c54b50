"""What systemd is told and keeps: readiness, a watchdog, and descriptors that outlive this process.

The protocols of sd_notify(3) and sd_listen_fds(3). Without systemd all of it does nothing.
"""

import array
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence

FIRST_LISTEN_FD = 3  # sd-daemon.h, SD_LISTEN_FDS_START
SEND_PATIENCE_S = 1.0  # seconds that systemd gets to read; it takes microseconds
WATCHDOG_SHARE = 3  # signs of life per watchdog interval; systemd advises two
LOG = logging.getLogger("kvd.systemd")


class Systemd:
    """The service manager, if there is one."""

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._keeps_fds = bool(self._address) and _count(environ, "FDSTORE") > 0
        watched = _count(environ, "WATCHDOG_PID") in (0, pid)
        self.watchdog_s = _count(environ, "WATCHDOG_USEC") / 1e6 / WATCHDOG_SHARE if watched else 0.0
        self._status = ""

    @property
    def keeps_fds(self) -> bool:
        """Whether descriptors given to `store` come back to the next process of this service."""
        return self._keeps_fds

    def ready(self) -> None:
        """Everything serves."""
        self._send("READY=1")

    def reloading(self) -> None:
        """`ready` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, within_s: float) -> None:
        """It ends, and may need so long for it."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def alive(self) -> None:
        """A sign of life, due every `watchdog_s` seconds if that is not 0."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """For people: `systemctl status` shows it."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def store(self, name: str, fd: int) -> None:
        """Also of what it has already."""
        if self.keeps_fds and not self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,)):
            LOG.error("systemd does not take %s: what is lent now ends with this kvd", name)
            self._keeps_fds = False

    def unstore(self, name: str) -> None:
        if self.keeps_fds:
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, text: str, fds: Sequence[int] = ()) -> bool:
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(SEND_PATIENCE_S)
            try:
                connection.sendmsg([text.encode()], rights, 0, address)
            except OSError as error:
                LOG.warning("systemd does not hear %s: %s", text.split("\n")[0], error)
                return False
        return True


def inherited_fds(environ: Mapping[str, str], pid: int) -> dict[str, int]:
    """What systemd kept of the last process of this service, by name."""
    if _count(environ, "LISTEN_PID") != pid:
        return {}
    fds = range(FIRST_LISTEN_FD, FIRST_LISTEN_FD + _count(environ, "LISTEN_FDS"))
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    named = dict(zip(names, fds, strict=False))
    for fd in set(fds) - set(named.values()):
        os.close(fd)  # without a name, or of a name that came twice
    return named


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
