"""How long the event loop was stuck: what runs on it too long delays everybody's calls."""

import asyncio
import time
from collections import deque

TICK_S = 0.1  # between two looks; a stall is seen to this precision
WINDOW_S = 60.0  # seconds over which the longest stall is told


class Stalls:
    """`longest_s` of the last minute; `tick` is awaited again and again."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    async def tick(self) -> None:
        """Returns after TICK_S, or as much later as the loop was stuck."""
        asked_s = time.monotonic()
        await asyncio.sleep(TICK_S)
        now_s = time.monotonic()
        self.note(now_s, now_s - asked_s - TICK_S)

    def note(self, now_s: float, late_s: float) -> None:
        """Only what nothing longer has followed can be the longest one some day."""
        while self._seen and self._seen[-1][1] <= late_s:
            self._seen.pop()
        self._seen.append((now_s, late_s))
        while self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def longest_s(self) -> float:
        """Seconds; 0 before the first look."""
        return self._seen[0][1] if self._seen else 0.0
