"""How long a kernel worker has been silent, by a clock that is fair to it.

A worker that runs is charged the processor time it got, so that a loaded machine is no wedge; one that is
stopped or waits for something is charged the time that passes. A daemon that was stopped itself charges
nothing for that: it cannot know what the worker said meanwhile.
"""

import os
from pathlib import Path

MAX_CHARGE_S = 1.0  # seconds that one look may charge; looks come several times a second
RUNNING = "R"  # state of /proc/PID/stat: on a processor, or ready for one
STOPPED = "T"  # by a signal; only another one lets it go on
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Vigil:
    """Over the process `pid`, from `now_s` on. Times are seconds of time.monotonic()."""

    def __init__(self, pid: int, now_s: float) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._looked_s = now_s
        self._cpu_s = 0.0
        self.silence_s = 0.0
        """Charged since the last word."""
        self.stopped_s = 0.0
        """Charged of it since it was seen to be stopped: no load and no job explains that."""

    def heard(self) -> None:
        """A word came, or nothing was asked before: silence begins anew."""
        self.silence_s = 0.0

    def look(self, now_s: float) -> float:
        """Charge what passed since the last look; the silence so far."""
        passed_s = min(now_s - self._looked_s, MAX_CHARGE_S)
        state, cpu_s = self._state()
        self.silence_s += min(passed_s, cpu_s - self._cpu_s) if state == RUNNING else passed_s
        self.stopped_s = self.stopped_s + passed_s if state == STOPPED else 0.0
        self._looked_s, self._cpu_s = now_s, cpu_s
        return self.silence_s

    def _state(self) -> tuple[str, float]:
        """Its state's letter and its processor time in seconds; empty if it is gone."""
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()  # its name may hold anything
        except OSError:
            return "", self._cpu_s
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
