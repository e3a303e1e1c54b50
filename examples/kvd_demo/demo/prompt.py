"""A prompt that is read once, sealed, and leased again and again without another prefill."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from kvd_client import H2O, CompressionReport, Lease, Policy, Pool, Span
from kvd_client.hf import KvdCache

SAVED_QUERIES = 32  # the widest window that votes elsewhere
PREFILL_TOKENS = 250  # at once; the progress bar moves once for each


@dataclass(frozen=True)
class Pruned:
    """A compressed lease; scoring, choosing and compacting took `seconds` in all."""

    lease: Lease
    report: CompressionReport
    seconds: float


class SealedPrompt:
    """Its full blocks are sealed under their tokens' hashes; the few tokens behind them are kept aside.

    queries  [layers, tokens, query_heads, head_dim], taken while the model read the prompt
    """

    def __init__(self, model: LlamaForCausalLM, pool: Pool, ids: Sequence[int]) -> None:
        self._pool, self._ids = pool, ids
        self.queries = torch.empty(0)
        self._hashes = _chained_hashes(ids, pool.spec.block_size)
        self._model = model
        self._tail: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, progress: Callable[[int], None]) -> None:
        """Prefill into a lease, seal it, give it back: the blocks stay, findable by their hashes."""
        with self._pool.lease(len(self._ids)) as lease:
            cache = KvdCache(lease, "when_asked", policy=Span(window=len(self._ids)))
            for piece in torch.split(torch.tensor([self._ids]), PREFILL_TOKENS, dim=1):
                self._model(piece, past_key_values=cache, logits_to_keep=1)
                progress(lease.length)
            self.queries = cache.window_queries()
            lease.seal(self._hashes)
            rest = lease.slot_mapping(len(self._hashes) * self._pool.spec.block_size, lease.length)
            self._tail = [self._pool.gather(layer, rest) for layer in range(self._pool.spec.layers)]

    def lease(self) -> Lease:
        """The whole prompt in a new lease, at the price of one block: the sealed ones are shared."""
        lease = self._pool.lease(len(self._ids), prefix=self._hashes, lease_ahead=0)
        slots = lease.extend(len(self._ids) - lease.length)
        for layer, (keys, values) in enumerate(self._tail):
            self._pool.write(layer, slots, keys, values)
        lease.commit(slots.size)
        return lease

    def pruned(self, policy: Policy) -> Pruned:
        """The prompt in a lease of its own, compressed with `policy`."""
        if isinstance(policy, H2O):
            lease = self._copied()
            watching_s = self._watch(lease)
            report = lease.compress(policy)
            return Pruned(lease, report, watching_s + report.kernel_time)
        lease = self.lease()
        window = getattr(policy, "window", 0)
        queries = self.queries[:, -window:] if policy.needs_queries else None
        report = lease.compress(policy, queries=queries)
        return Pruned(lease, report, report.kernel_time)

    def save(self, file: Path) -> None:
        """What another process needs to hold the same prompt: its bytes and the last queries."""
        with self.lease() as lease:
            table = lease.block_table
            planes = [self._pool.layer(layer, "numpy") for layer in range(self._pool.spec.layers)]
            kv = np.stack([np.stack([k[table], v[table]]) for k, v in planes])
        np.savez(file, kv=kv, queries=self.queries[:, -SAVED_QUERIES:].numpy(), tokens=len(self._ids))

    def _copied(self) -> Lease:
        """A private copy of the prompt, none of which counts as written yet."""
        lease = self._pool.lease(len(self._ids), lease_ahead=0)
        with self.lease() as source:
            to, of = lease.block_table, source.block_table
            for layer in range(self._pool.spec.layers):
                for plane in self._pool.layer(layer, "numpy"):
                    plane[to] = plane[of]
        return lease

    def _watch(self, lease: Lease) -> float:
        """Let every query of the prompt look at it, piece by piece; the seconds it took."""
        started = time.monotonic()
        for piece in torch.split(self.queries, PREFILL_TOKENS, dim=1):
            lease.commit(piece.shape[1])
            lease.observe(piece)
        return time.monotonic() - started


def _chained_hashes(ids: Sequence[int], block_size: int) -> list[bytes]:
    """One for each full block; it stands for all tokens up to the block's end."""
    hashes, chain = [], b""
    for end in range(block_size, len(ids) + 1, block_size):
        chain = hashlib.sha256(chain + repr(ids[end - block_size : end]).encode()).digest()
        hashes.append(chain)
    return hashes
