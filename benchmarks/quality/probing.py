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

from kvd.policy import H2O, Policy
from kvd_client import CompressionReport, Lease, Pool
from kvd_client.hf import KvdCache
from kvd_client.hf.queries import Queries

from .perplexity import advance

PREFILL_TOKENS = 512  # at once, so that attention's temporaries stay small
OBSERVED_TOKENS = 256  # at once, so that their queries fit a few scratch blocks
CALL_SECONDS = 120.0  # a compression waits for the kernel worker, which others use too


class WatchedCache(KvdCache):
    """Keeps the queries of all tokens for compressions of other leases."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(lease)
        self.queries = Queries(lease.pool.spec.layers, None)

    def see_queries(self, layer: int, query: torch.Tensor) -> None:
        self.queries.add(layer, query[0])

    def forward_ends(self) -> None:
        super().forward_ends()
        self.queries.settle()


class ProbeCache(KvdCache):
    """Forward passes whose tokens do not stay, so that one lease can be asked many times."""

    def forward_ends(self) -> None:
        self.batch.finish()


@dataclass(frozen=True)
class Probe:
    """Tokens to feed after the first `after` tokens of the prompt, and how many of the last logits count."""

    after: int
    token_ids: Sequence[int]
    keep_logits: int


@dataclass(frozen=True)
class Outcome:
    """Logits [keep_logits, vocabulary] and what the compression reported (None: dense)."""

    logits: torch.Tensor
    report: CompressionReport | None


def ask(model: Any, lease: Lease, probe: Probe) -> torch.Tensor:
    """Logits of a probe that leaves no trace in the lease."""
    return advance(model, ProbeCache(lease), probe.token_ids, probe.keep_logits)


class PromptInPool:
    """A prompt that was prefilled and sealed once; every method leases its cached blocks by their hashes.

    No other lease holds them while one is compressed: a copy beside sharers would free nothing, and kvd
    refuses it. Keys and values behind the last full block of each cut are kept aside and written into
    each lease.

    cuts  the numbers of tokens after which probes will ask
    """

    def __init__(self, model: Any, pool: Pool, token_ids: Sequence[int], cuts: Sequence[int]) -> None:
        self._model, self._pool = model, pool
        self._hashes = _chained_hashes(token_ids, pool.spec.block_size)
        with pool.lease(len(token_ids)) as lease:
            cache = WatchedCache(lease)
            for start in range(0, len(token_ids), PREFILL_TOKENS):
                advance(model, cache, token_ids[start : start + PREFILL_TOKENS])
            self._queries = cache.queries.oldest(len(token_ids))
            self._tails = {cut: self._tail(lease, cut) for cut in cuts}
            lease.seal(self._hashes)

    def dense(self, probe: Probe) -> Outcome:
        """Nothing compressed."""
        with self._leased(probe.after) as lease:
            return Outcome(ask(self._model, lease, probe), None)

    def compressed(self, policy: Policy, probe: Probe) -> Outcome:
        """Compressed with `policy`, then asked. Not for H2O."""
        with self._leased(probe.after) as lease:
            window = getattr(policy, "window", 1)
            queries = self._queries[:, : probe.after][:, -window:] if policy.needs_queries else None
            report = lease.compress(policy, queries=queries, timeout=CALL_SECONDS)
            return Outcome(ask(self._model, lease, probe), report)

    def observed(self, policies: Sequence[H2O], probe: Probe) -> Iterator[Outcome]:
        """H2O: a private copy that observes every query, then each policy in turn.

        From the largest kept share to the smallest the sets are nested, so this equals compressing each
        from the start.
        """
        with self._pool.lease(probe.after, policies[0]) as lease:
            self._copy_into(lease, probe.after)
            for start in range(0, probe.after, OBSERVED_TOKENS):
                piece = self._queries[:, start : min(start + OBSERVED_TOKENS, probe.after)]
                lease.commit(piece.shape[1])
                lease.observe(piece, timeout=CALL_SECONDS)
            for policy in policies:
                report = lease.compress(policy, timeout=CALL_SECONDS)
                yield Outcome(ask(self._model, lease, probe), report)

    @contextmanager
    def _leased(self, tokens: int) -> Iterator[Lease]:
        """The first `tokens` of the prompt: sealed blocks, and a block of its own for the rest."""
        full_blocks = tokens // self._pool.spec.block_size
        with self._pool.lease(tokens + 1, prefix=self._hashes[:full_blocks]) as lease:
            rest = tokens - lease.length
            slots = lease.slot_mapping(lease.length, tokens)
            for layer, (keys, values) in enumerate(self._tails[tokens]):
                self._pool.write(layer, slots, keys, values)
            lease.commit(rest)
            yield lease

    def _copy_into(self, lease: Lease, tokens: int) -> None:
        with self._leased(tokens) as source:
            slots = lease.slot_mapping(0, tokens)
            for layer in range(self._pool.spec.layers):
                self._pool.write(layer, slots, *source.gather(layer))

    def _tail(self, lease: Lease, cut: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        slots = lease.slot_mapping(cut - cut % self._pool.spec.block_size, cut)
        return [self._pool.gather(layer, slots) for layer in range(self._pool.spec.layers)]


def _chained_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One per full block, each covering all tokens before its end."""
    chain, hashes = b"", []
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = torch.tensor(list(token_ids[end - block_size : end]), dtype=torch.int64).numpy().tobytes()
        chain = hashlib.sha256(chain + block).digest()
        hashes.append(chain)
    return hashes
