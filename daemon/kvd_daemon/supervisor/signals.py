"""Signals as events of a selector, and none lost while new code takes over."""

import os
import signal
from collections.abc import Iterator

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
MAX_WAITING = 4096  # bytes read at a time, a signal each


class Signals:
    """The selectable end of a pipe that every handled signal writes a byte to."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd)
        for number in HANDLED:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # blocked if the code before held them back

    def fileno(self) -> int:
        return self._read_fd

    def arrived(self) -> Iterator[signal.Signals]:
        """In order."""
        for number in os.read(self._read_fd, MAX_WAITING):
            if number in HANDLED:
                yield signal.Signals(number)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._read_fd)
        os.close(self._write_fd)


def hold_back() -> None:
    """Until a `Signals` exists, also beyond exec."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def let_through() -> None:
    """Undoes `hold_back`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
