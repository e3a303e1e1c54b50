"""As much of systemd as kvd sees: a notify socket, a store of descriptors, and a start with what it keeps."""

import array
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.running_kvd import PATIENCE_S, RunningKvd

START = """
import os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
high = [os.dup2(fd, 200 + index) for index, fd in enumerate(fds)]
for index, fd in enumerate(high):
    os.dup2(fd, 3 + index, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=sys.argv[2])
os.environ["WATCHDOG_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "kvd_daemon.cli", *sys.argv[3:]])
"""


class ServiceManager:
    """Use as a context manager. `stored` are descriptors by name, `heard` what the service said, in order."""

    def __init__(self, folder: Path, watchdog_s: float = 0.0) -> None:
        self._folder = folder
        self._watchdog_s = watchdog_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self.stored: dict[str, int] = {}
        self.heard: list[str] = []

    def __enter__(self) -> "ServiceManager":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for fd in self.stored.values():
            os.close(fd)

    def start(self, *arguments: str) -> RunningKvd:
        """A kvd that gets what is stored."""
        run_dir, log = self._folder / "run", self._folder / "kvd.log"
        fds = list(self.stored.values())
        words = [",".join(map(str, fds)), ":".join(self.stored), "--run-dir", str(run_dir), *arguments]
        environment = os.environ | {"NOTIFY_SOCKET": str(self._folder / "notify"), "FDSTORE": "8192"}
        if self._watchdog_s:
            environment["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        with log.open("a") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-c", START, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env=environment,
                pass_fds=fds,
            )
        return RunningKvd(process, run_dir, log)

    def until(self, word: str) -> None:
        """The service says something that begins like this, once more from now on."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self._hear_one(deadline - time.monotonic()).startswith(word):
                return
        raise AssertionError(f"never said {word}; heard {self.heard}")

    def hear_all(self) -> list[str]:
        """What lies in the socket now."""
        heard = []
        while select.select([self._socket], [], [], 0)[0]:
            heard.append(self._hear_one(0))
        return heard

    def _hear_one(self, patience_s: float) -> str:
        if not select.select([self._socket], [], [], max(0.0, patience_s))[0]:
            return ""
        content, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _, _, data in ancillary:
            fds.frombytes(data)
        first, *rest = content.decode().split("\n")
        fields = dict(line.split("=", 1) for line in rest)
        if first == "FDSTORE=1":
            assert fields["FDPOLL"] == "0", "systemd would drop a pidfd when its process exits"
            [self.stored[fields["FDNAME"]]] = fds
            first = f"store {fields['FDNAME']}"
        elif first == "FDSTOREREMOVE=1":
            os.close(self.stored.pop(fields["FDNAME"]))
            first = f"remove {fields['FDNAME']}"
        self.heard.append(first)
        return first
