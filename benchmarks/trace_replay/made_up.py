"""A trace of the same shape as the published one, from a seed, for who does not have that.

Conversations begin at random, each request is the whole conversation so far, and the next turn follows after
a while or never. All quantiles and chances below come from the published trace of one hour.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from .requests import BLOCK_TOKENS, Request

TICK_MS = 3000  # requests arrive in batches so far apart, as in the published trace
TICKS = 1180  # of one hour
NEW_A_TICK = 6.25  # conversations
QUANTILES = (0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1)
FIRST_TOKENS = (890, 897, 905, 1336, 5264, 13056, 25559, 38494, 86000, 126195)
GROWTH_TOKENS = (0, 0, 0, 187, 454, 900, 4000, 6500, 14000, 30000)  # from turn to turn
OUTPUT_TOKENS = (3, 10, 24, 156, 350, 472, 597, 698, 1118, 2000)
GAP_S = (15, 30, 42, 66, 123, 290, 560, 800, 1900, 3000)  # until the next turn
MAX_TOKENS = 126_195  # of a prompt, as in the published trace
SHORT_TOKENS = 1500  # a first prompt below is mostly a question of one turn
GOES_ON = (
    0.41,
    0.45,
    0.55,
    0.64,
    0.68,
    0.70,
    0.75,
)  # chance of another turn, by turn; the last for all later
SHORT_GOES_ON = 0.17
LONG_TOKENS = 24_000  # a prompt beyond is less often followed
LONG_GOES_ON = 0.85  # by so much
EDITED = 0.15  # chance that a turn changes what was said before
EDITED_BLOCKS = 25  # so many on average


@dataclass(frozen=True, order=True, slots=True)
class _Turn:
    """One request to come: when, in a random order within a tick, and what it follows."""

    tick: int
    order: int
    number: int
    tokens: int
    shared: tuple[int, ...]


def made_up(seed: int, ticks: int = TICKS) -> list[Request]:
    """Requests of `ticks` times three seconds; the same for the same seed."""
    random, maker = np.random.default_rng(seed), _Maker()
    waiting: list[_Turn] = []
    requests: list[Request] = []
    for tick in range(ticks):
        for _ in range(random.poisson(NEW_A_TICK)):
            tokens = _drawn(random, FIRST_TOKENS)
            heapq.heappush(waiting, _Turn(tick, int(random.integers(1 << 40)), 0, tokens, (0,)))
        while waiting and waiting[0].tick <= tick:
            turn = heapq.heappop(waiting)
            requests.append(maker.request(turn, _drawn(random, OUTPUT_TOKENS)))
            following = _next(random, turn, requests[-1].blocks)
            if following is not None:
                heapq.heappush(waiting, following)
    return requests


class _Maker:
    """Gives new blocks their ids; 0 is the beginning that all prompts have in common."""

    def __init__(self) -> None:
        self._last_id = 0

    def request(self, turn: _Turn, output_tokens: int) -> Request:
        missing = -(-turn.tokens // BLOCK_TOKENS) - len(turn.shared)
        fresh = range(self._last_id + 1, self._last_id + 1 + max(missing, 0))
        self._last_id = fresh.stop - 1
        return Request(turn.tick * TICK_MS, turn.tokens, output_tokens, (*turn.shared, *fresh))


def _next(random: np.random.Generator, turn: _Turn, blocks: tuple[int, ...]) -> _Turn | None:
    """The turn that follows, if one does. A prompt's last block is not full, so it is never shared."""
    if random.random() >= _chance(turn):
        return None
    full = turn.tokens // BLOCK_TOKENS
    if random.random() < EDITED:
        full = max(1, full - int(random.geometric(1 / EDITED_BLOCKS)))
    tick = turn.tick + max(1, round(_drawn(random, GAP_S) * 1000 / TICK_MS))
    tokens = min(MAX_TOKENS, turn.tokens + _drawn(random, GROWTH_TOKENS))
    return _Turn(tick, int(random.integers(1 << 40)), turn.number + 1, tokens, blocks[:full])


def _chance(turn: _Turn) -> float:
    if turn.number == 0 and turn.tokens < SHORT_TOKENS:
        return SHORT_GOES_ON
    chance = GOES_ON[min(turn.number, len(GOES_ON) - 1)]
    return chance * LONG_GOES_ON if turn.tokens > LONG_TOKENS else chance


def _drawn(random: np.random.Generator, values: tuple[int, ...]) -> int:
    return round(float(np.interp(random.random(), QUANTILES, values)))
