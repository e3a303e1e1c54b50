"""What is compared: each method's policy for a given share of kept tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from kvd.policy import DEFAULT_SINKS, H2O, Dual, ExpectedAttention, KeyDiff, Policy, SnapKV, Span, Streaming

KEEPS = (0.08, 0.16, 0.25, 0.5)
PUBLISHED_WINDOW = 32  # tokens; SnapKV's published runs
TUNED_KERNEL = 21  # tokens; reaches from a cue to the end of its answer


@dataclass(frozen=True)
class Budget:
    """`keep` of `tokens`; the question is the last `question_tokens` of them, as far as it is known."""

    keep: float
    tokens: int
    block_size: int
    question_tokens: int

    @property
    def kept_tokens(self) -> int:
        """What the voting policies keep: whole blocks."""
        return SnapKV(window=1, keep=self.keep).target_tokens(self.tokens, self.block_size)


def _streaming(budget: Budget) -> Policy:
    return Streaming(sinks=DEFAULT_SINKS, window=budget.kept_tokens - DEFAULT_SINKS)


def _h2o(budget: Budget) -> Policy:
    return H2O(recent=budget.kept_tokens // 2, keep=budget.kept_tokens)


def _span(granularity: str) -> Callable[[Budget], Policy]:
    return lambda budget: Span(window=budget.question_tokens, keep=budget.keep, granularity=granularity)


METHODS: dict[str, Callable[[Budget], Policy]] = {
    "StreamingLLM": _streaming,
    "H2O, half recent": _h2o,
    "SnapKV avg 5 (published)": lambda b: SnapKV(PUBLISHED_WINDOW, 5, "avg", b.keep),
    "SnapKV max 7 (published)": lambda b: SnapKV(PUBLISHED_WINDOW, 7, "max", b.keep),
    "SnapKV max 21 (tuned)": lambda b: SnapKV(PUBLISHED_WINDOW, TUNED_KERNEL, "max", b.keep),
    "Dual max 21": lambda b: Dual(PUBLISHED_WINDOW, TUNED_KERNEL, "max", b.keep),
    "KeyDiff": lambda b: KeyDiff(recent=PUBLISHED_WINDOW, keep=b.keep),
    "Expected Attention": lambda b: ExpectedAttention(recent=PUBLISHED_WINDOW, keep=b.keep),
    "Span": _span("token"),
    "Span by block": _span("block"),
}
"""By name as printed."""

DENSE = "dense"
