"""Exact match decided in one forward pass, and how sure a share of successes is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .tasks import Sample

Z_95 = 1.96  # standard deviations of a two-sided 95 % interval


def answer_probe(sample: Sample) -> list[int]:
    """What to feed after the document: the question and all of the answer but its last token.

    The last `len(sample.answer_ids)` logits of that pass go to `exact_match_teacher_forced`.
    """
    return [*sample.question_ids, *sample.answer_ids[:-1]]


def exact_match_teacher_forced(logits: Tensor, answer_ids: Sequence[int]) -> bool:
    """Whether greedy decoding would give exactly `answer_ids`.

    logits  [len(answer_ids), vocabulary], row i from the pass over the prompt and answer_ids[:i]

    One pass is enough: as long as every row before agreed, greedy decoding has fed the same tokens, so
    row i is what it would have seen; at the first that differs, so does its answer.
    """
    if len(logits) != len(answer_ids):
        raise ValueError(
            f"{len(logits)} rows of logits for {len(answer_ids)} answer tokens; pass one row each"
        )
    return bool((logits.argmax(-1).cpu() == torch.tensor(answer_ids)).all())


@dataclass(frozen=True)
class Share:
    """`hits` of `trials`, with the 95 % Wilson interval (Wilson 1927), good also at 0 and at all."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        return self.hits / self.trials

    @property
    def interval(self) -> tuple[float, float]:
        n, p, zz = self.trials, self.value, Z_95 * Z_95
        middle = (p + zz / (2 * n)) / (1 + zz / n)
        half = Z_95 / (1 + zz / n) * math.sqrt(p * (1 - p) / n + zz / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.2f} [{low:.2f}, {high:.2f}] ({self.hits}/{self.trials})"
