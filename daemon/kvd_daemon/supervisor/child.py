"""A child process as a number and a pidfd: what of it survives when the supervisor executes new code."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

NOT_FOR_CHILDREN = frozenset(
    (
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "LISTEN_FDS",
        "LISTEN_PID",
        "LISTEN_FDNAMES",
        "FDSTORE",
    )
)
"""What systemd tells this process alone."""


PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ORPHAN_PATIENCE_S = 1.0  # seconds for killed kernel workers to be gone; on a quiet machine it takes none
ORPHAN_POLL_S = 0.005  # between two looks at them
MAX_ORPHANS = 64  # collected at a time; a daemon leaves one, rarely two


@dataclass(frozen=True)
class Child:
    """`pidfd` becomes readable when the process has exited. `reap` and `close` it then."""

    pid: int
    pidfd: int

    @classmethod
    def start(cls, module: str, arguments: Sequence[str], fds: Collection[int]) -> "Child":
        """`python -m MODULE ARGUMENTS`, which inherits `fds` under their numbers, and no other.

        In a process group of its own: Ctrl-C in a terminal is for the supervisor. Raises OSError.
        """
        environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
        environment.setdefault("GRPC_VERBOSITY", "ERROR")  # a connection that ends is no news for operators
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", module, *arguments],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds),  # onto itself: it is inherited
            ],
            setpgroup=0,
            setsigmask=(),
        )
        return cls(pid, os.pidfd_open(pid))

    def kill(self) -> None:
        """SIGKILL; nothing happens if it has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int:
        """Waits for its end. The exit status, or the negative number of the signal that ended it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        os.close(self.pidfd)


def adopt_orphans() -> None:
    """Kernel workers of a dead daemon become children of this process, wherever it runs."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_orphans() -> None:
    """When no child of our own is left: what killed daemons left behind ends too, in a moment."""
    deadline_s = time.monotonic() + ORPHAN_PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(ORPHAN_POLL_S)


def reap_orphans(own: Collection[int]) -> None:
    """Collect what has exited, up to the first of `own`, whose status somebody else asks for."""
    for _ in range(MAX_ORPHANS):
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in own:
            return
        os.waitpid(found.si_pid, 0)
