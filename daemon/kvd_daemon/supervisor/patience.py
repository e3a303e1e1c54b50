"""How long a daemon has been in trouble, by a clock that is fair to it.

A process that waits for a core on a loaded machine is slow, not broken: another one in its place would be no
faster, and start by replaying a journal. So time in which its threads were ready to run and did not get to is
not held against it, and of its children's, for which it may have to wait: a kernel worker that starts. One
that hangs, spins or is stopped gets no such excuse.
"""

from dataclasses import dataclass
from pathlib import Path

MAX_CHARGE_S = 2.0  # seconds that one look may charge: a supervisor that stood still itself heard nobody
RUNNING = "R"  # state of /proc/PID/task/TID/stat: on a core, or ready for one
NS_PER_S = 1e9


@dataclass(frozen=True)
class Threads:
    """Seconds of them all: on a core, and ready for one (which Linux tells when that has ended)."""

    ran_s: float = 0.0
    waited_s: float = 0.0
    ready: bool = False


class Patience:
    """Over the process `pid`, from `now_s` on. Times are seconds of time.monotonic()."""

    def __init__(self, pid: int, now_s: float) -> None:
        self._pid = pid
        self.begin_anew(now_s)

    def begin_anew(self, now_s: float) -> None:
        """It is well."""
        self._looked_s, self._charged_s = now_s, 0.0
        self._seen: Threads | None = None

    def look(self, now_s: float) -> float:
        """Charge what passed since the last look; what was charged since it was well."""
        passed_s, before, now = min(now_s - self._looked_s, MAX_CHARGE_S), self._seen, self._threads()
        if before is not None and now.ready:
            passed_s = min(passed_s, max(0.0, now.ran_s - before.ran_s))
        elif before is not None:
            passed_s -= max(0.0, now.waited_s - before.waited_s)  # less than before: a thread has ended
        self._charged_s += max(0.0, passed_s)
        self._looked_s, self._seen = now_s, now
        return self._charged_s

    def _threads(self) -> Threads:
        found = [_thread(task) for pid in (self._pid, *_children(self._pid)) for task in _tasks(pid)]
        ran_s, waited_s = sum(one.ran_s for one in found), sum(one.waited_s for one in found)
        return Threads(ran_s, waited_s, any(one.ready for one in found))


def _tasks(pid: int) -> list[Path]:
    """None if it has exited."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    """Of its first thread; none where Linux does not say."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _thread(task: Path) -> Threads:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        ran_ns, waited_ns = map(int, (task / "schedstat").read_text().split()[:2])
    except (OSError, IndexError, ValueError):  # it has ended
        return Threads()
    return Threads(ran_ns / NS_PER_S, waited_ns / NS_PER_S, state == RUNNING)
