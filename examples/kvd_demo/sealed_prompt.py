"""A prompt that is read once, sealed, and leased again and again without another prefill."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvd_client import H2O, CompressionReport, ExpectedAttention, Lease, Policy, Pool, Span, future_queries
from kvd_client.hf import KvdCache
from kvd_demo.forward import advance

SAMPLED_QUERIES = 512  # that stand for those to come, where a policy expects them
SAVED_QUERIES = 32  # the widest window that votes elsewhere
PIECE_TOKENS = (
    250  # prefilled or observed at once: small temporaries, and queries that fit few scratch blocks
)

Tail = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Pruned:
    """A compressed lease; scoring, choosing and compacting took `seconds` in all."""

    lease: Lease
    report: CompressionReport
    seconds: float


class SealedPrompt:
    """Its full blocks are sealed under their tokens' hashes; the tokens behind them are kept aside.

    cuts     numbers of tokens after which it may be leased; else only the whole
    queries  [layers, tokens, query_heads, head_dim], taken while the model read the prompt

    No other lease should hold its blocks while one is compressed: a copy beside sharers would free nothing,
    and kvd refuses it.
    """

    def __init__(self, pool: Pool, ids: Sequence[int], cuts: Sequence[int] = ()) -> None:
        self._pool, self._ids = pool, ids
        self._hashes = _chained_hashes(ids, pool.spec.block_size)
        self._cuts = {len(ids), *cuts}
        self._tails: dict[int, Tail] = {}
        self.queries = torch.empty(0)
        self._inv_freq = torch.empty(0)

    def read(self, model: Any, progress: Callable[[int], None]) -> None:
        """Prefill into a lease, seal it, give it back: the blocks stay, findable by their hashes.

        `progress` hears how many tokens are read.
        """
        with self._pool.lease(len(self._ids)) as lease:
            cache = KvdCache(lease, "when_asked", policy=Span(window=len(self._ids)))
            for start in range(0, len(self._ids), PIECE_TOKENS):
                advance(model, cache, self._ids[start : start + PIECE_TOKENS])
                progress(lease.length)
            self.queries = cache.window_queries()
            self._inv_freq = model.model.rotary_emb.inv_freq
            self._tails = {cut: self._tail(lease, cut) for cut in self._cuts}
            lease.seal(self._hashes)

    def _tail(self, lease: Lease, cut: int) -> Tail:
        slots = lease.slot_mapping(cut - cut % self._pool.spec.block_size, cut)
        return [self._pool.gather(layer, slots) for layer in range(self._pool.spec.layers)]

    def lease(self, tokens: int | None = None) -> Lease:
        """Its first `tokens` (default: all) in a new lease, at the price of one block: the sealed ones are
        shared."""
        tokens = len(self._ids) if tokens is None else tokens
        shared = self._hashes[: tokens // self._pool.spec.block_size]
        lease = self._pool.lease(tokens, prefix=shared, lease_ahead=0)
        slots = lease.extend(tokens - lease.length)
        for layer, (keys, values) in enumerate(self._tails[tokens]):
            self._pool.write(layer, slots, keys, values)
        lease.commit(slots.size)
        return lease

    def pruned(self, policy: Policy, tokens: int | None = None) -> Pruned:
        """The same, compressed with `policy`."""
        if isinstance(policy, H2O):
            return next(self.pruned_further([policy], tokens))
        lease = self.lease(tokens)
        report = lease.compress(policy, queries=self._asked(policy, lease))
        return Pruned(lease, report, report.kernel_time)

    def _asked(self, policy: Policy, lease: Lease) -> Any:
        """The window's queries, or for a policy that expects them, many as if asked after the prompt."""
        if not policy.needs_queries:
            return None
        if isinstance(policy, ExpectedAttention):
            first = max(0, lease.length - SAMPLED_QUERIES)
            positions = np.arange(first, lease.length)
            queries = self.queries[:, first : lease.length]
            return future_queries(queries, positions, self._inv_freq.numpy(), lease.position)
        return self.queries[:, : lease.length][:, -getattr(policy, "window", 0) :]

    def pruned_further(self, policies: Sequence[H2O], tokens: int | None = None) -> Iterator[Pruned]:
        """H2O: one private copy that observes every query, then each policy in turn on the same lease.

        From the largest kept amount to the smallest the sets are nested, so this equals compressing each from
        the start.
        """
        lease = self._copied(tokens)
        watching_s = self._watch(lease, len(self._ids) if tokens is None else tokens)
        for policy in policies:
            report = lease.compress(policy)
            yield Pruned(lease, report, watching_s + report.kernel_time)

    def save(self, file: Path) -> None:
        """What another process needs to hold the same prompt: its bytes and the last queries."""
        with self.lease() as lease:
            table = lease.block_table
            planes = [self._pool.layer(layer, "numpy") for layer in range(self._pool.spec.layers)]
            kv = np.stack([np.stack([k[table], v[table]]) for k, v in planes])
        np.savez(file, kv=kv, queries=self.queries[:, -SAVED_QUERIES:].numpy(), tokens=len(self._ids))

    def _copied(self, tokens: int | None) -> Lease:
        """A private copy, none of whose tokens counts as written yet."""
        with self.lease(tokens) as source:
            lease = self._pool.lease(source.length, lease_ahead=0)
            to, of = lease.block_table, source.block_table
            for layer in range(self._pool.spec.layers):
                for plane in self._pool.layer(layer, "numpy"):
                    plane[to] = plane[of]
        return lease

    def _watch(self, lease: Lease, tokens: int) -> float:
        """Let every query of the prompt look at it, piece by piece; the seconds it took."""
        started = time.monotonic()
        for piece in torch.split(self.queries[:, :tokens], PIECE_TOKENS, dim=1):
            lease.commit(piece.shape[1])
            lease.observe(piece)
        return time.monotonic() - started


def _chained_hashes(ids: Sequence[int], block_size: int) -> list[bytes]:
    """One for each full block; it stands for all tokens up to the block's end."""
    hashes, chain = [], b""
    for end in range(block_size, len(ids) + 1, block_size):
        chain = hashlib.sha256(chain + repr(list(ids[end - block_size : end])).encode()).digest()
        hashes.append(chain)
    return hashes
