"""The run directory: where the sockets are, who may enter, and the lock that keeps a second daemon out."""

import fcntl
import os
import stat
import time
from pathlib import Path

from kvd.errors import InvalidArgumentError
from kvd.run_dir import ATTACH_SOCKET, GRPC_SOCKET, LOCK_FILE, MAX_SOCKET_PATH_BYTES

JOURNAL_FOLDER = "journal"
LOCK_PATIENCE_S = 3.0  # a killed kvd's children, and theirs, need a moment to follow it
LOCK_RETRY_S = 0.02  # between two looks at the lock


class RunDirInUseError(InvalidArgumentError):
    """Another kvd runs there."""


def private_folder(folder: Path) -> Path:
    """Make the folder (0700) or check that it is ours. Raises InvalidArgumentError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"run dir {folder}: {error.strerror}; choose another with --run-dir"
        ) from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise InvalidArgumentError(
            f"run dir {folder} is no folder of user {os.geteuid()}; choose another with --run-dir"
        )
    if found.st_mode & 0o022:
        raise InvalidArgumentError(f"others may write to run dir {folder}; run: chmod go-w {folder}")
    return folder


class DeviceDir:
    """`RUN_DIR/NAME` of one device daemon, held by a lock as long as this process lives.

    Only kvd's user (and root) may enter, or `group` too: it may open the sockets, and nothing else there.
    """

    def __init__(self, run_dir: Path, device: str, group: int | None = None) -> None:
        self._group = group
        self._published: dict[Path, os.stat_result] = {}
        self.path = private_folder(private_folder(run_dir) / device)
        if group is not None:
            _give(run_dir, group, 0o750)
            _give(self.path, group, 0o750)
        self.grpc_socket = self.path / GRPC_SOCKET
        self.grpc_socket_at_first = self.path / "grpc.new"
        self.attach_socket = self.path / ATTACH_SOCKET
        self.journal = self.path / "journal"
        if len(os.fsencode(self.attach_socket)) > MAX_SOCKET_PATH_BYTES:
            raise InvalidArgumentError(
                f"{self.attach_socket} is too long for a socket ({MAX_SOCKET_PATH_BYTES} bytes); "
                "use a shorter --run-dir"
            )
        self.lock_fd = locked(self.path / LOCK_FILE)
        self._remove_sockets()  # those of a killed daemon: nobody listens, the lock is ours

    @property
    def is_ours(self) -> bool:
        """Whether the lock there is the one that this process holds."""
        return holds(self.lock_fd, self.path / LOCK_FILE)

    def has(self, socket_path: Path) -> bool:
        """Whether what was published there last is there still."""
        return socket_path in self._published and _is_at(self._published[socket_path], socket_path)

    def close(self) -> None:
        """Leaves nothing but empty folders; and what is another's, if this folder was removed meanwhile."""
        if self.is_ours:
            self._remove_sockets()
        unlock(self.lock_fd, self.path / LOCK_FILE)

    def publish_grpc(self) -> None:
        """gRPC removes the name it bound when it stops, whoever has that by then: so it is given another."""
        self.publish(self.grpc_socket_at_first)
        os.rename(self.grpc_socket_at_first, self.grpc_socket)
        self._published[self.grpc_socket] = os.stat(self.grpc_socket)

    def publish(self, socket_path: Path) -> None:
        """Whoever may open sockets here may open this one. It was the owner's alone until now."""
        if self._group is None:
            os.chmod(socket_path, 0o600)
        else:
            _give(socket_path, self._group, 0o660)
        self._published[socket_path] = os.stat(socket_path)

    def _remove_sockets(self) -> None:
        for path in (self.grpc_socket_at_first, self.grpc_socket, self.attach_socket):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise InvalidArgumentError(
                    f"{path}: {error.strerror}; remove it, or choose another --run-dir"
                ) from error


def _give(path: Path, group: int, mode: int) -> None:
    """Raises InvalidArgumentError if the group is not one of ours."""
    try:
        os.chown(path, -1, group)
        os.chmod(path, mode)
    except OSError as error:
        raise InvalidArgumentError(
            f"--socket-group {group}: {path} cannot be given to it ({error.strerror}); name a group "
            f"that user {os.geteuid()} is in"
        ) from error


def locked(path: Path) -> int:
    """A descriptor that holds the file's lock. Raises RunDirInUseError after LOCK_PATIENCE_S."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidArgumentError(f"{path}: {error.strerror}; choose another --run-dir") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
        else:
            if holds(fd, path):
                return fd
            os.close(fd)  # its holder removed the file on its way out
        if time.monotonic() > deadline:
            raise RunDirInUseError(
                f"another kvd serves {path.parent}; stop it (kvctl status shows its pid), or use another "
                "--run-dir"
            )
        time.sleep(LOCK_RETRY_S)


def holds(fd: int, path: Path) -> bool:
    """Whether the file there is still the one that was locked."""
    return _is_at(os.fstat(fd), path)


def unlock(fd: int, path: Path) -> None:
    """Leaves no file; but another's, if this one was removed meanwhile."""
    if holds(fd, path):
        path.unlink(missing_ok=True)
    os.close(fd)


def _is_at(known: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(known, os.stat(path))
    except OSError:
        return False
