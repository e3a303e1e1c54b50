"""Signals as events of a selector, and none lost while new code takes over."""

import os
import signal

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

    def arrived(self) -> list[signal.Signals]:
        """In order, but SIGUSR2 last: it may end this code."""
        try:
            numbers = os.read(self._read_fd, MAX_WAITING)
        except BlockingIOError:
            return []
        return sorted(map(signal.Signals, filter(HANDLED.__contains__, numbers)), key=signal.SIGUSR2.__eq__)

    def hold_back(self) -> None:
        """Until there is another `Signals`, also beyond exec: what arrives, and what is not handled yet."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        for number in self.arrived():
            os.kill(os.getpid(), number)

    def let_through(self) -> None:
        """Undoes `hold_back`."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._read_fd)
        os.close(self._write_fd)
