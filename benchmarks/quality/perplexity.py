"""Perplexity of a text read through any cache, chunk by chunk, as a server would stream it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvd_demo.forward import advance

CHUNK_TOKENS = 64  # small against any window, so that a bounded cache is full almost all the time


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood over `token_count` predicted tokens."""

    log_loss: float
    token_count: int

    @property
    def value(self) -> float:
        return math.exp(self.log_loss / self.token_count)


def perplexity(
    model: Any, cache: Any, token_ids: Sequence[int], skip: int = 0, chunk: int = CHUNK_TOKENS
) -> Perplexity:
    """Read `token_ids` through an empty `cache` and score each token from the ones before it.

    skip: leave the first so many out of the score, e.g. those that any window still holds.
    Every token is fed once and in order: what the cache forgets is what the score shows.
    """
    log_loss, count = 0.0, 0
    for start in range(0, len(token_ids) - 1, chunk):
        fed = token_ids[start : start + chunk]
        wanted = torch.tensor(token_ids[start + 1 : start + 1 + chunk])
        logits = advance(model, cache, fed, keep_logits=len(fed))[: len(wanted)].cpu()
        losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        scored = losses[max(0, skip - start - 1) :]  # losses[i] belongs to token start + 1 + i
        log_loss, count = log_loss + float(scored.double().sum()), count + len(scored)
    return Perplexity(log_loss, count)
