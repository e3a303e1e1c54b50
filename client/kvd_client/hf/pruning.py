"""What compression needs from forward passes: the queries that vote, or running attention scores (H2O)."""

import torch

from kvd.errors import InvalidArgumentError
from kvd.limits import MAX_TOKENS_PER_LEASE
from kvd.policy import H2O, Keep, Policy, SnapKV, Span
from kvd_client import CompressionReport, Lease
from kvd_client.hf.queries import Queries

OBSERVED_TOKENS = 256  # at once, or one block if that is more: their queries travel in one scratch lease


class Pruning:
    """Keeps one lease ready to be compressed with `policy`, and compresses it.

    Raises InvalidArgumentError for policies that prune nothing on request.
    """

    def __init__(self, lease: Lease, policy: Policy) -> None:
        if not isinstance(policy, SnapKV | Span | H2O):
            raise InvalidArgumentError(f"{policy} has nothing to compress; use SnapKV, Dual, Span or H2O")
        self._lease, self._policy = lease, policy
        self._observed_at_once = max(OBSERVED_TOKENS, lease.pool.spec.block_size)
        self.queries = Queries(lease.pool.spec.layers, None if isinstance(policy, H2O) else policy.window)

    def commit(self, new_tokens: int) -> None:
        """Count a forward pass's tokens; under H2O, add what they attended to.

        Single tokens are added a block at a time, so that decoding does not wait for a call at every step.
        """
        self.queries.settle()
        while isinstance(self._policy, H2O) and self.queries.count >= self._lease.pool.spec.block_size:
            committed = self.queries.count - new_tokens
            piece = min(self.queries.count, self._observed_at_once)
            self._lease.commit(piece - committed)
            self._observe(piece)
            new_tokens -= piece - committed
        self._lease.commit(new_tokens)

    @property
    def budget_tokens(self) -> int | None:
        """Tokens to keep, if the policy names a number and not a share."""
        return Keep.of(self._policy.keep).tokens

    def check_bound(self) -> None:
        """Raises InvalidArgumentError unless the policy keeps a number of tokens, however many there are."""
        if self.budget_tokens is None:
            raise InvalidArgumentError('"bounded" needs a number of tokens to keep, e.g. keep=512')
        block_size = self._lease.pool.spec.block_size
        for tokens in range(MAX_TOKENS_PER_LEASE - block_size, MAX_TOKENS_PER_LEASE):
            self._policy.target_tokens(tokens, block_size)

    def is_over(self) -> bool:
        """Whether a whole block has come on top of the budget: once a block, not once a token."""
        block_size = self._lease.pool.spec.block_size
        target = self._policy.target_tokens(self._lease.length, block_size)
        return self._lease.length >= target + block_size

    def compress_prompt(self) -> CompressionReport:
        """`compress`; a prompt too short for sinks, window and share stays whole, as one within budget."""
        try:
            self._policy.target_tokens(self._lease.length, self._lease.pool.spec.block_size)
        except InvalidArgumentError:
            return CompressionReport.of_nothing(self._lease.length, self._lease.block_table.size)
        return self.compress()

    def compress(self) -> CompressionReport:
        """Raises what Lease.compress raises."""
        if not isinstance(self._policy, H2O):
            return self._lease.compress(self._policy, queries=self.newest_queries())
        if self.queries.count:
            self._observe(self.queries.count)
        return self._lease.compress(self._policy)

    def newest_queries(self) -> torch.Tensor:
        """Those that would vote now, [layers, tokens, query_heads, head_dim]; under H2O, those not counted.
        Raises InvalidArgumentError if there are none."""
        if self.queries.count == 0:
            raise InvalidArgumentError("no queries yet; run the prompt through the attached model first")
        return self.queries.oldest(self.queries.count)

    def _observe(self, tokens: int) -> None:
        self._lease.observe(self.queries.oldest(tokens))
        self.queries.drop_oldest(tokens)
