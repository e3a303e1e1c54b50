"""One prompt in the pool, compressed in every way, each asked the same probe through the real path.

The prompt is prefilled once into a dense lease and sealed; every method leases its blocks by prefix,
compresses them through the daemon, and answers from what is left in the pool. Probes leave no token behind.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvd.policy import Policy
from kvd_client import CompressionReport, Lease, Pool
from kvd_client.hf import KvdCache
from kvd_client.hf.queries import Queries

from .perplexity import advance

OBSERVED_WINDOW = 64  # tokens; the widest window any method votes with
PREFILL_TOKENS = 512  # at once, so that attention's temporaries stay small
CALL_SECONDS = 120.0  # a compression waits for the kernel worker, which others use too


class WatchedCache(KvdCache):
    """Keeps the queries of the newest tokens for compressions of other leases."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease)
        self.queries = Queries(lease.pool.spec.layers, OBSERVED_WINDOW)

    def see_queries(self, layer: int, query: torch.Tensor) -> None:
        self.queries.add(layer, query)

    def forward_ends(self) -> None:
        super().forward_ends()
        self.queries.settle()

    def last(self, tokens: int) -> torch.Tensor:
        """Queries [layers, tokens, query_heads, head_dim] of the last tokens, or as many as there are."""
        return self.queries.oldest(self.queries.count)[:, -tokens:]


class ProbeCache(KvdCache):
    """Forward passes whose tokens do not stay, so that one lease can be asked many times."""

    def forward_ends(self) -> None:
        self.sequence.finish()


@dataclass(frozen=True)
class Probe:
    """Tokens to feed after the prompt, and how many of the last logits count."""

    token_ids: Sequence[int]
    keep_logits: int


@dataclass(frozen=True)
class Outcome:
    """Logits [keep_logits, vocabulary] and what the compression reported (None: dense)."""

    logits: torch.Tensor
    report: CompressionReport | None


def prefill(model: Any, cache: KvdCache, token_ids: Sequence[int]) -> None:
    """Read the prompt in pieces."""
    for start in range(0, len(token_ids), PREFILL_TOKENS):
        advance(model, cache, token_ids[start : start + PREFILL_TOKENS])


def ask(model: Any, lease: Lease, probe: Probe) -> torch.Tensor:
    """Logits of a probe that leaves no trace in the lease."""
    return advance(model, ProbeCache(lease), probe.token_ids, probe.keep_logits)


class PromptInPool:
    """A prompt that was prefilled and sealed once; every method leases its cached blocks by their hashes.

    No other lease holds them while one is compressed: a copy beside sharers would free nothing, and kvd
    refuses it. The tokens behind the last full block are kept aside and written into each lease.
    """

    def __init__(self, model: Any, pool: Pool, token_ids: Sequence[int]) -> None:
        self._model, self._pool, self._token_count = model, pool, len(token_ids)
        self._hashes = _chained_hashes(token_ids, pool.spec.block_size)
        with pool.lease(len(token_ids)) as lease:
            self._cache = WatchedCache(lease)
            prefill(model, self._cache, token_ids)
            lease.seal(self._hashes)
            tail = lease.slot_mapping(len(self._hashes) * pool.spec.block_size, lease.length)
            self._tail = [pool.gather(layer, tail) for layer in range(pool.spec.layers)]

    def dense(self, probe: Probe) -> Outcome:
        """Nothing compressed."""
        with self._leased() as lease:
            return Outcome(ask(self._model, lease, probe), None)

    def compressed(self, policy: Policy, probe: Probe) -> Outcome:
        """Compressed with `policy`, then asked."""
        with self._leased() as lease:
            queries = self._cache.last(getattr(policy, "window", 1)) if policy.needs_queries else None
            report = lease.compress(policy, queries=queries, timeout=CALL_SECONDS)
            return Outcome(ask(self._model, lease, probe), report)

    @contextmanager
    def _leased(self) -> Iterator[Lease]:
        with self._pool.lease(self._token_count + 1, prefix=self._hashes) as lease:
            tail_tokens = self._token_count - lease.length
            slots = lease.slot_mapping(lease.length, self._token_count)
            for layer, (keys, values) in enumerate(self._tail):
                self._pool.write(layer, slots, keys, values)
            lease.commit(tail_tokens)
            yield lease


def observed(
    model: Any, pool: Pool, token_ids: Sequence[int], policies: Sequence[Policy], probe: Probe
) -> list[Outcome]:
    """H2O: one prefill that observes every query, then each policy in turn, from the largest kept share
    to the smallest. The sets are nested, so this equals compressing each from the start."""
    outcomes = []
    with pool.lease(len(token_ids), policies[0]) as lease:
        prefill(model, KvdCache(lease, "when_asked"), token_ids)
        for policy in policies:
            report = lease.compress(policy, timeout=CALL_SECONDS)
            outcomes.append(Outcome(ask(model, lease, probe), report))
    return outcomes


def _chained_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One per full block, each covering all tokens before its end."""
    chain, hashes = b"", []
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = torch.tensor(list(token_ids[end - block_size : end]), dtype=torch.int64).numpy().tobytes()
        chain = hashlib.sha256(chain + block).digest()
        hashes.append(chain)
    return hashes
