"""Where the daemon of a device listens."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import DeviceUnavailableError, InvalidArgumentError

GRPC_SOCKET = "grpc.sock"
ATTACH_SOCKET = "attach.sock"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path, its final zero not counted


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


def default_run_dir() -> Path:
    """$KVD_RUN_DIR; else /run/kvd for root, $XDG_RUNTIME_DIR/kvd, or /tmp/kvd-UID."""
    if named := os.environ.get("KVD_RUN_DIR"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/run/kvd")
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvd"
    return Path(f"/tmp/kvd-{os.geteuid()}")


def find_endpoint(where: str | os.PathLike[str] | None = None, device: str | None = None) -> Endpoint:
    """The device directory `where`, or `device` (default: the first one) in the run directory `where`.

    Without `where` it is $KVD_ENDPOINT, else the default run directory. Raises DeviceUnavailableError if no
    daemon has been there.
    """
    named = where or os.environ.get("KVD_ENDPOINT") or default_run_dir()
    base = Path(os.fspath(named)).absolute()
    if (base / ATTACH_SOCKET).exists():
        return _fits(base, device)
    if device is not None:
        return _fits(base / device, device)
    found = sorted(path.parent for path in base.glob(f"*/{ATTACH_SOCKET}"))
    if not found:
        raise DeviceUnavailableError(
            f"no device in {base}; start one with `kvd --run-dir {base}`, or name it with KVD_ENDPOINT"
        )
    return _fits(found[0], None)


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
