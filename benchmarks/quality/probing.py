"""One prompt in the pool, compressed in every way, each asked the same probe through the real path.

The prompt is prefilled once and sealed; every method leases its blocks by prefix, compresses them through
the daemon, and answers from what is left in the pool. Probes leave no token behind.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from kvd_demo.forward import advance
from kvd_demo.sealed_prompt import SealedPrompt

from kvd.policy import H2O, Policy
from kvd_client import CompressionReport, Lease
from kvd_client.hf import KvdCache


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


@dataclass(frozen=True)
class Prober:
    """Asks probes about one prompt, which must have been read, and may be leased after each `after`."""

    model: Any
    prompt: SealedPrompt

    def dense(self, probe: Probe) -> Outcome:
        """Nothing compressed."""
        with self.prompt.lease(probe.after) as lease:
            return Outcome(self._ask(lease, probe), None)

    def compressed(self, policy: Policy, probe: Probe) -> Outcome:
        """Compressed with `policy`, then asked."""
        pruned = self.prompt.pruned(policy, probe.after)
        with pruned.lease as lease:
            return Outcome(self._ask(lease, probe), pruned.report)

    def observed(self, policies: Sequence[H2O], probe: Probe) -> Iterator[Outcome]:
        """H2O, from the largest kept amount to the smallest."""
        with ExitStack() as held:
            for pruned in self.prompt.pruned_further(policies, probe.after):
                held.enter_context(pruned.lease)
                yield Outcome(self._ask(pruned.lease, probe), pruned.report)

    def _ask(self, lease: Lease, probe: Probe) -> torch.Tensor:
        return advance(self.model, ProbeCache(lease), probe.token_ids, probe.keep_logits)
