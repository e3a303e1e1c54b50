"""Where the daemon of a device listens."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvd.arguments import refused, text
from kvd.errors import DeviceUnavailableError, InvalidArgumentError
from kvd.run_dir import ATTACH_SOCKET, GRPC_SOCKET, MAX_SOCKET_PATH_BYTES, default_run_dir

MAX_PATH_CHARS = 4096  # characters; PATH_MAX


@dataclass(frozen=True)
class Endpoint:
    """One device's directory, which holds its sockets."""

    directory: Path

    @property
    def device(self) -> str:
        return self.directory.name

    @property
    def grpc_target(self) -> str:
        return f"unix:{self.directory / GRPC_SOCKET}"

    @property
    def attach_path(self) -> str:
        return str(self.directory / ATTACH_SOCKET)


def find_endpoint(where: str | os.PathLike[str] | None = None, device: str | None = None) -> Endpoint:
    """The device directory `where`, or `device` (default: the first one) in the run directory `where`.

    Without `where` it is $KVD_ENDPOINT, else the default run directory. Raises DeviceUnavailableError if no
    daemon has been there, InvalidArgumentError if that is no path of a directory.
    """
    unnamed = isinstance(where, str | None) and not where
    default = os.environ.get("KVD_ENDPOINT") or default_run_dir(os.environ, os.geteuid())
    base = _absolute(default if unnamed else where)
    wanted = None if device is None else _folder_name(device)
    try:
        if (base / ATTACH_SOCKET).exists():
            return _fits(base, wanted)
        if wanted is not None:
            return _fits(base / wanted, wanted)
        found = sorted(path.parent for path in base.glob(f"*/{ATTACH_SOCKET}"))
    except OSError as error:
        raise DeviceUnavailableError(f"{base}: {error.strerror}; name kvd's run directory") from None
    if not found:
        raise DeviceUnavailableError(
            f"no device in {base}; start one with `kvd --run-dir {base}`, or name it with KVD_ENDPOINT"
        )
    return _fits(found[0], None)


def _folder_name(device: object) -> str:
    name = text("device", device, MAX_SOCKET_PATH_BYTES)
    if "\0" in name or name != Path(name).name:
        raise refused("device", device, 'a name such as "host0"')
    return name


def _absolute(named: object) -> Path:
    """The path of a string or a PathLike, which a socket's path could begin with."""
    path = os.fspath(named) if isinstance(named, os.PathLike) else named
    if not isinstance(path, str) or "\0" in path:
        raise refused("endpoint", named, "a directory, as a string or a path,")
    base = Path(text("endpoint", path, MAX_PATH_CHARS)).absolute()
    if len(os.fsencode(base)) > MAX_SOCKET_PATH_BYTES:
        raise refused("endpoint", named, f"a path that fits a socket's {MAX_SOCKET_PATH_BYTES} bytes")
    return base


def _fits(directory: Path, device: str | None) -> Endpoint:
    if device is not None and directory.name != device:
        raise InvalidArgumentError(f"{directory} is device {directory.name!r}, not {device!r}")
    longest = len(os.fsencode(directory / ATTACH_SOCKET))
    if longest > MAX_SOCKET_PATH_BYTES:
        raise InvalidArgumentError(
            f"{directory} is too long for a Unix socket by {longest - MAX_SOCKET_PATH_BYTES} bytes; "
            f"use a shorter run directory"
        )
    return Endpoint(directory)
