"""What a lease keeps when it is compressed. One class per policy; see docs of each for its source.

Every policy answers the same four questions: is it sane (`__post_init__`), how many sink tokens it
locks (`sinks`), how many tokens it keeps of N (`target_tokens`), whether it needs queries.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from typing import ClassVar

from kvd.arguments import one_of, refused, whole
from kvd.errors import InvalidArgumentError
from kvd.limits import MAX_TOKENS_PER_LEASE

DEFAULT_SINKS = 4  # tokens; StreamingLLM, section 3.2
MAX_KEEP_DENOMINATOR = 1_000_000  # on the wire; finer ratios mean nothing at 128k tokens
MAX_KERNEL = 255  # tokens; wider pooling than any measured setting
MAX_WINDOW = 1 << 20  # tokens; eight times the longest context in wide use
ROPE_STYLES = ("half_split", "interleaved")  # how a rotary embedding pairs the elements of a key
KEPT_AMOUNT = "a ratio in (0, 1] or a number of tokens"


def _whole(policy: object, name: str, low: int, high: int) -> None:
    """Make the field a Python integer, or refuse it."""
    object.__setattr__(policy, name, whole(name, getattr(policy, name), low, high))


def _odd_kernel(policy: "SnapKV | Span") -> None:
    _whole(policy, "kernel", 1, MAX_KERNEL)
    if policy.kernel % 2 == 0:
        raise InvalidArgumentError(
            f"kernel={policy.kernel} is even; pooling needs an odd width such as {policy.kernel + 1}"
        )


@dataclass(frozen=True)
class Keep:
    """How much is kept: an exact ratio in (0, 1], or a number of tokens."""

    ratio: Fraction | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.tokens is None):
            raise InvalidArgumentError(
                "Keep takes a ratio or a number of tokens: Keep.of(0.15), Keep.of(512)"
            )
        if self.ratio is not None and not (isinstance(self.ratio, Fraction) and 0 < self.ratio <= 1):
            raise refused("ratio", self.ratio, "a Fraction in (0, 1]; Keep.of takes a float, which")
        if self.tokens is not None:
            _whole(self, "tokens", 1, MAX_TOKENS_PER_LEASE)

    @classmethod
    def of(cls, amount: "float | Fraction | int | Keep") -> "Keep":
        """0.15 or Fraction(3, 20) is a ratio, 512 a number of tokens, 1 everything (ratio one)."""
        if isinstance(amount, Keep):
            return amount
        if isinstance(amount, Integral) and not isinstance(amount, bool) and amount > 1:
            return cls(tokens=whole("keep", amount, 1, MAX_TOKENS_PER_LEASE))
        if not isinstance(amount, Real) or isinstance(amount, bool) or not 0 < amount <= 1:
            raise refused("keep", amount, KEPT_AMOUNT)
        ratio = Fraction(str(amount)).limit_denominator(MAX_KEEP_DENOMINATOR)
        if ratio == 0:
            raise refused("keep", amount, KEPT_AMOUNT)
        return cls(ratio=ratio)

    def of_tokens(self, token_count: int) -> int:
        """ceil(N * num / den) in integers, or the number of tokens."""
        if self.ratio is None:
            assert self.tokens is not None
            return self.tokens
        return -(-token_count * self.ratio.numerator // self.ratio.denominator)

    def __str__(self) -> str:
        return f"{float(self.ratio):g}" if self.ratio is not None else f"{self.tokens} tokens"


def _as_keep(policy: object) -> None:
    object.__setattr__(policy, "keep", Keep.of(getattr(policy, "keep")))  # noqa: B009 - frozen, typed loosely on purpose


@dataclass(frozen=True)
class Dense:
    """Keeps everything."""

    sinks: ClassVar[int] = 0
    needs_queries: ClassVar[bool] = False

    def target_tokens(self, token_count: int, block_size: int) -> int:
        """All of them."""
        return token_count

    def __str__(self) -> str:
        return "dense"


@dataclass(frozen=True)
class Streaming:
    """The first `sinks` tokens and the last `window`: constant memory (StreamingLLM, Xiao 2023).

    rope="original" leaves keys as they are; "cache" makes positions those inside the cache, by
    moving the sink keys forward next to the window.
    """

    sinks: int = DEFAULT_SINKS
    window: int = 1020
    rope: str = "original"
    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _whole(self, "sinks", 0, MAX_WINDOW)
        _whole(self, "window", 1, MAX_WINDOW)
        one_of("rope", self.rope, ("original", "cache"))

    def sink_blocks(self, block_size: int) -> int:
        """Leading blocks that are locked."""
        return -(-self.sinks // block_size)

    def capacity_blocks(self, block_size: int) -> int:
        """Blocks for ever: sinks, a full window, and one that fills while the oldest is still needed."""
        return self.sink_blocks(block_size) + -(-self.window // block_size) + 1

    def target_tokens(self, token_count: int, block_size: int) -> int:
        """sinks + window, or fewer if there are fewer."""
        return min(token_count, self.sinks + self.window)

    def __str__(self) -> str:
        return f"streaming(sinks={self.sinks}, window={self.window}, rope={self.rope})"


@dataclass(frozen=True)
class SnapKV:
    """Window queries vote, votes are pooled into clusters, the top ones stay (SnapKV, Li 2024).

    With sinks it is the two-stage pipeline: sinks are locked first and leave the vote's candidates.
    """

    window: int = 32
    kernel: int = 5
    pooling: str = "avg"
    keep: "Keep | float | int" = field(default_factory=lambda: Keep.of(0.15))
    sinks: int = 0
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _as_keep(self)
        _whole(self, "window", 1, MAX_WINDOW)
        _whole(self, "sinks", 0, MAX_WINDOW)
        _odd_kernel(self)
        one_of("pooling", self.pooling, ("avg", "max"))

    def target_tokens(self, token_count: int, block_size: int) -> int:
        """C: the kept amount in whole blocks, or N if that is no less."""
        return _block_target(Keep.of(self.keep), token_count, block_size, self.sinks + self.window)

    def __str__(self) -> str:
        name = "dual" if self.sinks else "snapkv"
        sinks = f"sinks={self.sinks}, " if self.sinks else ""
        return f"{name}({sinks}window={self.window}, kernel={self.kernel}, {self.pooling}, keep={self.keep})"


@dataclass(frozen=True)
class Dual(SnapKV):
    """The two-stage pipeline: stage 1 locks the sinks, stage 2 is SnapKV over the rest."""

    sinks: int = DEFAULT_SINKS


@dataclass(frozen=True)
class Ranked:
    """Base of policies that keep the best tokens by some score, the `recent` last ones, and the sinks."""

    recent: int = 32
    keep: "Keep | float | int" = field(default_factory=lambda: Keep.of(0.5))
    sinks: int = DEFAULT_SINKS
    name: ClassVar[str]
    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _as_keep(self)
        _whole(self, "recent", 0, MAX_WINDOW)
        _whole(self, "sinks", 0, MAX_WINDOW)

    def target_tokens(self, token_count: int, block_size: int) -> int:
        """C: the kept amount in whole blocks, or N if that is no less."""
        return _block_target(Keep.of(self.keep), token_count, block_size, self.sinks + self.recent)

    def __str__(self) -> str:
        return f"{self.name}(sinks={self.sinks}, recent={self.recent}, keep={self.keep})"


@dataclass(frozen=True)
class H2O(Ranked):
    """Largest accumulated attention plus the recent tokens (H2O, Zhang 2023); sinks exempt."""

    recent: int = 128
    keep: "Keep | float | int" = field(default_factory=lambda: Keep.of(0.2))
    name: ClassVar[str] = "h2o"


@dataclass(frozen=True)
class KeyDiff(Ranked):
    """The keys that differ most from all others, sinks and recent tokens (KeyDiff, Park et al. 2025).

    Looks at keys alone: it needs neither queries nor scores, and does not know what will be asked.
    """

    name: ClassVar[str] = "keydiff"


@dataclass(frozen=True)
class ExpectedAttention(Ranked):
    """What queries like those given would attend to, whatever they ask (Expected Attention, Devoto 2025).

    Queries are taken as normally distributed, with mean and covariance of those given per query head: then
    the attention to expect has a closed form; it and 0.01 are weighed with the value's length. Give many, at
    positions to come: see kvd_client.future_queries. Sinks and the last `recent` tokens stay.
    """

    name: ClassVar[str] = "expected"
    needs_queries: ClassVar[bool] = True


@dataclass(frozen=True)
class Span:
    """Whole spans that any window query looked at: max vote, wide max pooling, max over heads.

    granularity="block" keeps whole blocks, the same for all layers and heads: the table loses ids,
    no byte moves, sealed blocks stay sealed and shared.
    """

    window: int = 32
    kernel: int = 21
    keep: "Keep | float | int" = field(default_factory=lambda: Keep.of(0.16))
    granularity: str = "token"
    sinks: int = DEFAULT_SINKS
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _as_keep(self)
        _whole(self, "window", 1, MAX_WINDOW)
        _whole(self, "sinks", 0, MAX_WINDOW)
        _odd_kernel(self)
        one_of("granularity", self.granularity, ("token", "block"))

    def target_tokens(self, token_count: int, block_size: int) -> int:
        """C: the kept amount in whole blocks, or N if that is no less.

        By block, the newest block may be partly filled: the kept length is then C less what it lacks.
        """
        least = self.sinks + self.window
        if self.granularity == "block":  # whole sink blocks and whole window blocks stay
            window = min(self.window, token_count)
            first_window_block = (token_count - window) // block_size
            window_blocks = -(-token_count // block_size) - first_window_block
            least = (-(-self.sinks // block_size) + window_blocks) * block_size
        return _block_target(Keep.of(self.keep), token_count, block_size, least)

    def __str__(self) -> str:
        amounts = f"sinks={self.sinks}, window={self.window}, kernel={self.kernel}, keep={self.keep}"
        return f"span({self.granularity}, {amounts})"


Policy = Dense | Streaming | SnapKV | H2O | Span | KeyDiff | ExpectedAttention


def _block_target(keep: Keep, token_count: int, block_size: int, least: int) -> int:
    """Kept tokens rounded up to whole blocks; all if that is no fewer; never below `least`."""
    target = -(-keep.of_tokens(token_count) // block_size) * block_size
    if target >= token_count:
        return token_count
    if target < least:
        raise InvalidArgumentError(
            f"keep={keep} of {token_count} tokens is {target} in whole blocks, but sinks and window alone "
            f"need {least}; keep more, or use a smaller window",
            target_tokens=target,
            least_tokens=least,
        )
    return target
