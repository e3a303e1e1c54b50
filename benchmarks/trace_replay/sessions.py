"""How many sessions of a trace a live kvd holds at once, whole and compressed.

Prompts of the trace's own lengths, in its order, are leased, written and, the second time, compressed, until
the pool refuses the next one. All of them are alive then, and what a sample of them holds is read.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvd_client
from kvd.errors import PoolExhaustedError
from kvd.limits import NULL_BLOCKS
from kvd.policy import Dual
from kvd_client import Lease, Pool

from .live import CALL_TIMEOUT_S, SPEC
from .requests import BLOCK_TOKENS, Request

POLICY = Dual(keep=0.15)
POOL = "sessions"
QUERY_HEADS = 4
SAMPLE = 50  # sessions at most that are read at the end, the first and the last among them
SEED = 1
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Filled:
    """Sessions alive when the pool refused one of `refused_tokens`; blocks and tokens they hold by then."""

    sessions: int
    prompt_tokens: int
    kept_tokens: int
    blocks: int
    refused_tokens: int

    @property
    def blocks_each(self) -> float:
        return self.blocks / self.sessions

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "blocks_each": round(self.blocks_each, 1)}


class Prompts:
    """Keys and values of prompts: random rows, and in each value whose it is and where. Exact in float32."""

    def __init__(self, longest: int) -> None:
        random = np.random.default_rng(SEED)
        self._rows: Floats = random.standard_normal((longest, 1, SPEC.head_dim_k), np.float32)
        self.queries: Floats = random.standard_normal(
            (SPEC.layers, POLICY.window, QUERY_HEADS, SPEC.head_dim_k), np.float32
        )

    def keys(self, number: int, positions: npt.NDArray[np.int64]) -> Floats:
        keys: Floats = self._rows[(positions + number) % len(self._rows)]
        return keys

    def values(self, number: int, positions: npt.NDArray[np.int64]) -> Floats:
        values: Floats = np.zeros((positions.size, 1, SPEC.head_dim_v), np.float32)
        values[:, 0, 0], values[:, 0, 1] = number, positions
        return values


def pool_blocks(capacity: int) -> int:
    """Blocks of kvd in `capacity` blocks of the trace."""
    return capacity * BLOCK_TOKENS // SPEC.block_size


def pool_bytes(capacity: int) -> int:
    """Memory of that pool, its null block included."""
    return SPEC.pool_bytes(pool_blocks(capacity) + NULL_BLOCKS)


def that_fit(run_dir: Path, requests: Sequence[Request], capacity: int) -> dict[str, Any]:
    """In a pool of `capacity` blocks of the trace: without compression, then in the same pool with it."""
    blocks = pool_blocks(capacity)
    prompts = Prompts(max(request.input_tokens for request in requests))
    with kvd_client.connect(run_dir, timeout=CALL_TIMEOUT_S) as client:
        pool = client.pool(POOL, SPEC, blocks=blocks)
        whole = filled(pool, prompts, requests, compressed=False)
        pruned = filled(pool, prompts, requests, compressed=True)
    return {
        "pool_blocks": blocks,
        "block_tokens": SPEC.block_size,
        "policy": str(POLICY),
        "whole": whole.plain(),
        "compressed": pruned.plain(),
        "ratio": round(pruned.sessions / whole.sessions, 2),
    }


def filled(pool: Pool, prompts: Prompts, requests: Sequence[Request], compressed: bool) -> Filled:
    """Fill the pool, read a sample of what is alive, and release all of it."""
    alive: list[Lease] = []
    lengths = _lengths(requests)
    for number, tokens in lengths:
        try:
            lease = written(pool, prompts, number, tokens)
        except PoolExhaustedError:
            break
        if compressed:
            lease.compress(POLICY, prompts.queries)
        alive.append(lease)
    for number in _sample(len(alive)):
        check(alive[number], prompts, number, compressed)
    found = Filled(
        sessions=len(alive),
        prompt_tokens=sum(lease.position for lease in alive),
        kept_tokens=sum(lease.length for lease in alive),
        blocks=sum(lease.block_table.size for lease in alive),
        refused_tokens=tokens,
    )
    pool.release_many(alive)
    return found


def written(pool: Pool, prompts: Prompts, number: int, tokens: int) -> Lease:
    """Raises PoolExhaustedError if there is no room."""
    lease = pool.lease(tokens, lease_ahead=0)
    slots, positions = lease.extend(tokens), np.arange(tokens)
    lease.write(0, slots, prompts.keys(number, positions), prompts.values(number, positions))
    lease.commit(tokens)
    return lease


def check(lease: Lease, prompts: Prompts, number: int, compressed: bool) -> None:
    """Raises AssertionError unless each slot holds the token that it should, sinks and window among them."""
    positions = lease.kept_positions()[0, 0].astype(np.int64)
    tokens = lease.position
    kept = POLICY.target_tokens(tokens, SPEC.block_size) if compressed else tokens
    assert positions.size == kept, f"session {number} keeps {positions.size} tokens of {tokens}, not {kept}"
    assert (np.diff(positions) > 0).all(), f"session {number}: the kept tokens are not in order"
    assert (positions[: POLICY.sinks] == np.arange(POLICY.sinks)).all(), (
        f"session {number}: its sinks are gone"
    )
    window = np.arange(tokens - POLICY.window, tokens)
    assert (positions[-POLICY.window :] == window).all(), f"session {number}: its window is gone"
    keys, values = lease.gather(0, "numpy")
    assert (keys == prompts.keys(number, positions)).all(), f"session {number} has other keys"
    assert (values == prompts.values(number, positions)).all(), f"session {number} has other values"


def _lengths(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """Number and tokens of each prompt; from the first one again where the trace ends."""
    return enumerate(request.input_tokens for request in itertools.cycle(requests))


def _sample(count: int) -> list[int]:
    return sorted(set(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int).tolist()))
