"""A lease for a prompt: what is here of it already becomes its prefix."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvd.errors import ExhaustedError, PinNotFoundError
from kvd.limits import MAX_PIN_TTL_S
from kvd_client import prefix
from kvd_client._match import DEFAULT_TTL_S, Match, find

if TYPE_CHECKING:
    from kvd_client._lease import Lease
    from kvd_client._pool import LeaseWish, Pool

MAX_MATCHES = 3  # of one prompt, when matches end before their lease is granted; then it goes without


@dataclass(frozen=True)
class Prompt:
    """Its number of tokens, and the hashes of its full blocks."""

    tokens: int
    hashes: Sequence[bytes]
    block_size: int

    @classmethod
    def of(cls, tokens: Any, block_size: int, namespace: str) -> "Prompt":
        """Raises InvalidArgumentError."""
        ids = prefix.token_ids(tokens)
        return cls(ids.size, prefix.hashes(ids, block_size, namespace), block_size)

    @property
    def shareable(self) -> Sequence[bytes]:
        """Of the blocks before the last token: a model has to see at least one to go on."""
        return self.hashes[: max(0, self.tokens - 1) // self.block_size]


def lease_prompt(pool: "Pool", wish: "LeaseWish", prompt: Prompt, wait_s: float) -> "Lease":
    """Match and lease. A match may end while its lease stands in line: then again, for what is left of the
    wait, and at last without."""
    wish = replace(wish, tokens=max(wish.tokens, prompt.tokens))
    until = time.monotonic() + wait_s
    for _ in range(MAX_MATCHES):
        with _match(pool, prompt.shareable, _left(until)) as match, suppress(PinNotFoundError):
            lease = pool.lease_many([replace(wish, prefix=match)], _left(until))[0]
            break
    else:
        lease = pool.lease_many([wish], _left(until))[0]
    lease.prompt_hashes = prompt.hashes
    return lease


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _match(pool: "Pool", hashes: Sequence[bytes], wait_s: float) -> Match:
    """None where holding the blocks beside what is held is more than the tenant may do."""
    with suppress(ExhaustedError):
        return find(pool, hashes, min(MAX_PIN_TTL_S, DEFAULT_TTL_S + wait_s))
    return Match(pool, (), 0)
