"""What a run survived, as numbers and as a table."""

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """`unexcused` says what must not have happened; empty after a good run."""

    seed: int
    seconds: float
    faults: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    recoveries_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    actions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    lost_leases: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    checked_bytes: int = 0
    wrong_bytes: int = 0
    audits: int = 0
    most_on_disk_bytes: int = 0
    unexcused: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add_worker(self, state: dict[str, Any]) -> None:
        """A worker's own report, taken once, at its end."""
        for name in ("actions", "errors"):
            for key, count in state[name].items():
                getattr(self, name)[key] += count
        for key, count in state["lost"].items():
            self.lost_leases[key] += count
        self.checked_bytes += state["checked_bytes"]
        self.wrong_bytes += state["wrong_bytes"]
        self.unexcused += state["unexcused"]

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"seed {self.seed}, {self.seconds:.0f} s, {self.audits} audits of every lease's bytes"]
        lines += ["", f"{'fault':<28}{'survived':>9}{'p50 s':>9}{'p99 s':>9}{'max s':>9}"]
        for name in sorted(self.faults):
            times = sorted(self.recoveries_s.get(name, []))
            last = math.ceil(0.99 * len(times)) - 1
            shown = [statistics.median(times), times[last], times[-1]] if times else []
            cells = "".join(f"{value:>9.3f}" for value in shown)
            lines.append(f"{name:<28}{self.faults[name]:>9}{cells}")
        lines += ["", "actions   " + _counts(self.actions), "errors    " + _counts(self.errors)]
        lines += ["excused   " + _counts(self.lost_leases), *(f"left out  {why}" for why in self.left_out)]
        lines += [f"checked   {self.checked_bytes / 2**20:.1f} MiB, wrong or lost bytes: {self.wrong_bytes}"]
        lines += [f"on disk   {self.most_on_disk_bytes / 2**10:.0f} KiB at most, when it was looked at"]
        return [*lines, *(f"UNEXCUSED {what}" for what in self.unexcused)]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
