"""Descriptors that outlive daemons, by device and name; and under systemd, this process too."""

import logging
import os
import stat
from collections.abc import Iterable, Mapping

from kvd_daemon.channel import Packet

from .systemd import Systemd

LOG = logging.getLogger("kvd.kept")


class Kept:
    """Every descriptor is held here once and, if systemd keeps some for us, there under `DEVICE.NAME`."""

    def __init__(self, systemd: Systemd, by_device: Mapping[str, Mapping[str, int]]) -> None:
        """`by_device` is what an earlier process of this service left."""
        self._systemd = systemd
        self._by_device = {device: dict(fds) for device, fds in by_device.items()}

    def of(self, device: str) -> dict[str, int]:
        return dict(self._by_device.get(device, {}))

    def devices(self) -> list[str]:
        return list(self._by_device)

    def put(self, device: str, packet: Packet) -> None:
        """Of a daemon's word `put`."""
        fds = self._by_device.setdefault(device, {})
        name = str(packet.fields["name"])
        if len(packet.fds) != 1 or name in fds:
            LOG.error("%s: %s comes with %d descriptors, and is not kept", device, name, len(packet.fds))
            packet.close()
            return
        [fds[name]] = packet.fds
        self._systemd.store(f"{device}.{name}", fds[name])

    def drop(self, device: str, name: str) -> None:
        """Nothing happens if it is not there."""
        fd = self._by_device.get(device, {}).pop(name, None)
        if fd is not None:
            self._systemd.unstore(f"{device}.{name}")
            os.close(fd)

    def drop_all_but(self, devices: Iterable[str]) -> None:
        """Of devices that are served no more."""
        for device in self._by_device.keys() - set(devices):
            LOG.warning("%s is not served any more: its memory is given back", device)
            self.drop_all(device)

    def drop_all(self, device: str) -> None:
        for name in self.of(device):
            self.drop(device, name)


def by_device(names: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """`DEVICE.NAME` as systemd knows them; what is none of ours is closed."""
    found: dict[str, dict[str, int]] = {}
    for full_name, fd in names.items():
        device, _, name = full_name.partition(".")
        if name:
            found.setdefault(device, {})[name] = fd
        else:
            LOG.warning("systemd hands over %r, which is none of kvd's", full_name)
            os.close(fd)
    return found


def memory_bytes(fds: Iterable[int]) -> int:
    """Memory that the files among them have taken already."""
    found = [os.fstat(fd) for fd in fds]
    return sum(512 * each.st_blocks for each in found if stat.S_ISREG(each.st_mode))
