"""A kvd's claim on its devices: nobody else serves them, also while one of them has no daemon.

A daemon's own lock is free from its death to the start of the next one. A second kvd that took it then would
find a journal without the memory it tells of, and every lease would be lost.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvd_daemon.run_dir import locked, unlock


class Claims:
    """Locked files `RUN_DIR/DEVICE.kvd`, from here on or from the code before this one."""

    def __init__(self, run_dir: Path, fds: Mapping[str, int]) -> None:
        self._run_dir = run_dir
        self.fds = dict(fds)

    @classmethod
    def on(cls, run_dir: Path, devices: Iterable[str]) -> "Claims":
        """Raises RunDirInUseError."""
        claims = cls(run_dir, {})
        for device in devices:
            claims.fds[device] = locked(claims._path(device))
        return claims

    def _path(self, device: str) -> Path:
        return self._run_dir / f"{device}.kvd"

    def release(self) -> None:
        for device, fd in self.fds.items():
            unlock(fd, self._path(device))
        self.fds.clear()
